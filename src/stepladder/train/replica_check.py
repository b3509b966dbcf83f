"""A check during training: hashes of everything that must be equal on all ranks are compared.

On a free core a check costs 1.2 ms per MB of weights, buffers and optimizer state (the hash of a
copy in main memory), and one collective of 16 bytes per rank. Details are exchanged only if
something differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from stepladder.core.errors import InputError, RanksDiffer
from stepladder.core.numbers import format_ranks
from stepladder.train.comm import Comm
from stepladder.train.fingerprints import digest, find_minority, fingerprint, split_fingerprints

# The likely cause of each kind of difference. A kind explains those that come after it.
LIKELY_CAUSES = {
    "learning rate": "a learning rate set by rank, or a schedule that reads this rank's own loss",
    "data order": "a rank-seeded shuffle: give every rank the same --seed",
    "optimizer": "optimizer state that one rank loaded, changed or stepped on its own",
    "start": "weights initialised by rank: seed torch the same on every rank before the model is"
    " built",
    "parameter": "weights updated outside the optimizer, or by one rank only",
    "buffer": "a buffer that forward changes from what this rank alone has seen",
}


class _Item(NamedTuple):
    """One value that must be equal on all ranks; `kind` is a key of LIKELY_CAUSES."""

    kind: str
    name: str
    digest: bytes


class ReplicasDiffer(RanksDiffer):
    """The ranks no longer hold the same values.

    Args:
        step: The steps that were done, which `at` names too.
        kind: What kind of value differs, a key of LIKELY_CAUSES.
        tensor: The first value that differs, in registration order.
        ranks: The ranks that differ from the most common value, or from rank 0's in a tie.
        cause: The likely cause.
    """

    def __init__(self, step: int, kind: str, tensor: str, ranks: list[int], cause: str) -> None:
        self.at = step
        self.kind = kind
        self.tensor = tensor
        self.ranks = ranks
        self.cause = cause
        self.what = tensor if tensor.startswith(kind) else f"{kind} {tensor}"
        super().__init__(
            f"after step {step}, {self.what} of {format_ranks(ranks)} differs from the others'."
            f" Likely cause: {cause}"
        )


class ReplicaCheck:
    """Compares a rank's model, optimizer, learning rates and data order with those of its peers."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        comm: Comm,
        unshared_buffers: Iterable[torch.Tensor] = (),
    ) -> None:
        """Create the check.

        Args:
            model: The model.
            optimizer: Its optimizer.
            comm: The ranks.
            unshared_buffers: Buffers that may differ between ranks, such as the statistics that
                batch norm has of a rank's share.
        """
        self.model = model
        self.optimizer = optimizer
        self.comm = comm
        self.unshared_ids = {id(buffer) for buffer in unshared_buffers}
        self.names = {param: name for name, param in model.named_parameters()}
        self.is_first = True

    def check(self, step: int, epoch_order_digest: bytes) -> None:
        """Compare this rank with its peers. All ranks must call this method.

        Args:
            step: Steps done.
            epoch_order_digest: The hash of the order in which the epoch reads its samples.

        Raises:
            ReplicasDiffer: The ranks differ; every rank raises it.
        """
        if self.comm.alone:
            return
        items = list(self._list_items(epoch_order_digest))
        total = digest(b"".join(item.name.encode() + item.digest for item in items))
        if len(set(self.comm.gather_bytes(total))) > 1:
            raise self._find_difference(step, items)
        self.is_first = False

    def _list_items(self, epoch_order_digest: bytes) -> Iterator[_Item]:
        for name, param in self.model.named_parameters():
            yield _Item("parameter", name, fingerprint(param))
        for name, buffer in self.model.named_buffers():
            if id(buffer) not in self.unshared_ids:
                yield _Item("buffer", name, fingerprint(buffer))
        for number, group in enumerate(self.optimizer.param_groups):
            for index, param in enumerate(group["params"]):
                owner = self.names.get(param, f"group {number}, parameter {index}")
                for name, value in self.optimizer.state.get(param, {}).items():
                    yield _Item("optimizer", f"{name} of {owner}", fingerprint(value))
        for number, group in enumerate(self.optimizer.param_groups):
            rate = fingerprint(float(group["lr"]))
            yield _Item("learning rate", f"learning rate of group {number}", rate)
        yield _Item("data order", "data order of the epoch", epoch_order_digest)

    def _find_difference(self, step: int, items: list[_Item]) -> ReplicasDiffer:
        """Return which ranks differ in what. All ranks call this once their totals differ."""
        names = [(item.kind, item.name) for item in items]
        if ranks := find_minority(self.comm.gather_bytes(fingerprint(names))):
            cause = "a model that is built by rank"
            return ReplicasDiffer(step, "set of tensors", "set of tensors", ranks, cause)
        hashes = self.comm.gather_bytes(b"".join(item.digest for item in items))
        hashes_by_item = zip(*map(split_fingerprints, hashes), strict=True)
        ranks_by_item = {}
        for item, item_hashes in zip(items, hashes_by_item, strict=True):
            if ranks := find_minority(list(item_hashes)):
                ranks_by_item[item] = ranks
        first = next(iter(ranks_by_item))
        kinds = {item.kind for item in ranks_by_item}
        if self.is_first and "parameter" in kinds:
            kinds = kinds - {"parameter"} | {"start"}
        cause = next(text for kind, text in LIKELY_CAUSES.items() if kind in kinds)
        return ReplicasDiffer(step, first.kind, first.name, ranks_by_item[first], cause)


def validate_finite_weights(model: torch.nn.Module, step: int) -> None:
    """Check that all weights are finite, since the loss may be a number even if they are not.

    Args:
        model: The model.
        step: The number of steps done.

    Raises:
        InputError: A weight is infinite or not a number.
    """
    for name, weight in model.named_parameters():
        # torch has no isfinite for the types of one byte.
        values = weight.float() if weight.itemsize == 1 else weight
        is_finite: Any = torch.isfinite(values).all()
        if hasattr(is_finite, "full_tensor"):  # a DTensor
            is_finite = is_finite.full_tensor()
        if not is_finite:
            raise InputError(
                f"after step {step} the weights of {name} are not finite",
                "a smaller --lr or --warmup-steps N; a snapshot that is there is kept",
            )
