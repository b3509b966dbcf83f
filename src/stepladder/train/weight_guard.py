"""A check of `--sync exact`: only the optimizer's step may change weights.

A microbatch that changes a weight changes it on its own rank alone, and for the microbatches that
this rank computes after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from stepladder.core.errors import InputError
from stepladder.train.fingerprints import count_writes, fingerprint

CHANGED_BY_PASS = "the loss, or a hook in it,"
FROZEN_HINT = "a moving average of the weights: ema_decay=0.999 in the Job; or --sync ddp"
TRAINED_HINT = (
    "compute the changed weight from the trained one in forward, as"
    " torch.nn.utils.parametrizations do (Embedding: F.normalize in place of max_norm);"
    " or --sync ddp"
)


class WeightChanged(InputError):
    """Something besides the optimizer's step has changed a weight, or a buffer in an evaluation."""

    kind = "parameter"

    def __init__(self, name: str, tensor: Tensor, changed_by: str) -> None:
        self.tensor = name
        what = "weight" if isinstance(tensor, nn.Parameter) else "buffer"
        is_trained = tensor.requires_grad
        super().__init__(
            f"--sync exact: {changed_by} changes the {what} {name}, so each rank would train"
            " another one",
            TRAINED_HINT if is_trained else FROZEN_HINT,
        )


class _WeightGuard:
    """Detects weights that change between two moments, by torch's count of writes.

    The count misses writes through `.data` and NumPy: `begin` can also keep hashes of the values.
    """

    def __init__(self, params: Mapping[str, Tensor], changed_by: str) -> None:
        self.names = list(params)
        self.params = list(params.values())
        self.changed_by = changed_by
        self.versions: list[int] = []
        self.compares_values = False
        self.hashes: list[bytes] = []

    def begin(self, compares_values: bool) -> None:
        """Note the state of all weights; takes 0.1 us for each without comparing values."""
        self.versions = self._read_versions()
        self.compares_values = compares_values
        self.hashes = self._hash_values() if compares_values else []

    def _read_versions(self) -> list[int]:
        return [count_writes(_get_local(param)) for param in self.params]

    def _hash_values(self) -> list[bytes]:
        # Of copies: fully_shard cannot free the memory of what NumPy has seen.
        return [fingerprint(_get_local(param).detach().clone()) for param in self.params]

    def validate_unwritten(self) -> None:
        """Raise WeightChanged if torch has counted a write since `begin`."""
        versions = self._read_versions()
        if versions != self.versions:
            self._raise_first(versions, self.versions)

    def validate(self) -> None:
        """Raise WeightChanged if a weight was written since `begin`, or has other values."""
        self.validate_unwritten()
        self.validate_values()

    def validate_values(self) -> None:
        """Raise WeightChanged if a weight has other values than at `begin`, if it kept hashes."""
        if self.compares_values:
            hashes = self._hash_values()
            if hashes != self.hashes:
                self._raise_first(hashes, self.hashes)

    def _raise_first(self, present: list[Any], noted: list[Any]) -> None:
        pairs = zip(present, noted, strict=True)
        index = next(index for index, (now, before) in enumerate(pairs) if now != before)
        raise WeightChanged(self.names[index], self.params[index], self.changed_by)


class PassGuard:
    """Detects weights that change in the passes of a step.

    fully_shard gathers the weights of a module for its forward and its backward, and then drops the
    gathered copy with all that was written to it. So each such module has a guard of its own.
    """

    def __init__(self, model: nn.Module) -> None:
        self.guard = _WeightGuard(dict(model.named_parameters()), CHANGED_BY_PASS)
        self.gathered: dict[nn.Module, _WeightGuard] = {}  # of modules that forward has called
        self.hooks: list[Any] = []
        for name, module in model.named_modules():
            if hasattr(module, "set_custom_reduce_scatter"):
                # Between fully_shard's own hooks, which gather and drop the weights.
                note = partial(self._note_gathered, f"{name}." if name else "")
                self.hooks.append(module.register_forward_pre_hook(note))
                check = self._validate_gathered
                self.hooks.append(module.register_forward_hook(check, prepend=True))

    def begin(self, compares_values: bool) -> None:
        """Note the weights before the passes of a step."""
        self.gathered.clear()
        self.guard.begin(compares_values)

    def validate(self) -> None:
        """Compare after the passes.

        Raises:
            WeightChanged: A weight has changed.
        """
        self.guard.validate()
        for guard in self.gathered.values():
            guard.validate_unwritten()

    def _note_gathered(self, prefix: str, module: nn.Module, _args: Any) -> None:
        params = dict(_list_own_parameters(module, prefix))
        guard = _WeightGuard(params, CHANGED_BY_PASS)
        guard.begin(self.guard.compares_values)
        self.gathered[module] = guard

    def _validate_gathered(self, module: nn.Module, _args: Any, _output: Any) -> None:
        if module in self.gathered:
            self.gathered[module].validate()

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self.hooks:
            hook.remove()


def _list_own_parameters(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters that fully_shard has gathered, by name."""
    for name, param in module.named_parameters(prefix=prefix.removesuffix(".")):
        if not hasattr(param, "_local_tensor"):
            yield name, param


@contextmanager
def validate_unchanged_weights(model: nn.Module, changed_by: str) -> Iterator[None]:
    """Raise WeightChanged at the end of the block if a weight or a buffer has other values then.

    A metric may write them if it restores them, as one of averaged weights does.
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    guard = _WeightGuard(tensors, changed_by)
    guard.begin(compares_values=True)
    yield
    guard.validate_values()


def _get_local(param: Tensor) -> Tensor:
    """Return this rank's rows of a weight."""
    local: Tensor = getattr(param, "_local_tensor", param)
    return local
