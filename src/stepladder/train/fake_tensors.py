"""Tensors that have a shape and no storage (torch's FakeTensor): a job built of them, and what they
would take.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakTensorKeyDictionary

from stepladder.rank.torch_fixes import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    tree_leaves,
)
from stepladder.train.job import Job

READ = torch.ops.aten._local_scalar_dense.default


class OneMode(FakeTensorMode):
    """A mode that a copied weight has in common with its original: copy.deepcopy would copy it too."""

    def __deepcopy__(self, _memo: dict[int, Any]) -> OneMode:
        return self


class FakeModelBuilder:
    """Builds models whose weights take no memory. fake: the mode that their tensors belong to."""

    def __init__(self) -> None:
        self.fake = OneMode(allow_non_fake_inputs=True)
        self.known = WeakTensorKeyDictionary()

    def build(self, build: Callable[[], Job]) -> Job:
        """The job. Of the weights that it makes there is one at a time, until it is registered."""
        hook = register_module_parameter_registration_hook(self._registered)
        try:
            with (
                warnings.catch_warnings()
            ):  # copy.deepcopy asks for the address of a storage, and finds none
                warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
                job = build()
        finally:
            hook.remove()
        for module in job.model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else self._without_storage(buffer)
        return job

    def _registered(self, _module: nn.Module, _name: str, param: Any) -> Any:
        return None if param is None else self._without_storage(param)

    def _without_storage(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        if tensor not in self.known:
            self.known[tensor] = self.fake.from_tensor(tensor)
        found: torch.Tensor = self.known[tensor]
        return found


class StorageTally(TorchDispatchMode):
    """Counts the bytes of tensors that come to be in the block. now, peak: bytes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self.seen: dict[int, weakref.ref[Any]] = {}
        self.sizes: dict[int, int] = {}

    def __enter__(self) -> Any:
        self.resize = resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            """fully_shard lets go of a block's weights by this, and no operation tells."""
            found = resize(storage, size)
            if id(storage) in self.seen:
                self._move(id(storage), size)
            return found

        torch.UntypedStorage.resize_ = resized  # type: ignore[assignment, method-assign]
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *raised: Any) -> None:
        torch.UntypedStorage.resize_ = self.resize  # type: ignore[method-assign]
        super().__exit__(*raised)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is READ and isinstance(
            args[0], FakeTensor
        ):  # a number of a tensor that has none: any will do
            return {torch.bool: True}.get(
                args[0].dtype, 1.0 if args[0].dtype.is_floating_point else 1
            )
        found = func(*args, **(kwargs or {}))
        self.add(found)
        return found

    def add(self, tree: Any) -> None:
        """Count the tensors in a nest of lists, tuples and dicts, each storage once; of DTensors
        the rows here.
        """
        for tensor in map(to_local, tree_leaves(tree)):
            if isinstance(tensor, FakeTensor):
                self._count(tensor.untyped_storage())

    def _count(self, storage: torch.UntypedStorage) -> None:
        number = id(storage)
        if number in self.seen:
            return

        def gone(_ref: Any) -> None:
            del self.seen[number]
            self.now -= self.sizes.pop(number)

        self.seen[number] = weakref.ref(storage, gone)
        self._move(number, storage.nbytes())

    def _move(self, number: int, size: int) -> None:
        self.now += size - self.sizes.get(number, 0)
        self.sizes[number] = size
        self.peak = max(self.peak, self.now)


def to_local(value: Any) -> Any:
    """Of a tensor that is spread over ranks, what this one has; anything else as it is."""
    return value.detach().to_local() if hasattr(value, "to_local") else value
