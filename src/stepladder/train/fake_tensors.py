"""Tensors that have a shape and no storage (torch's FakeTensor), and the bytes they stand for."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakTensorKeyDictionary

from stepladder.rank.torch_fixes import FakeTensor, FakeTensorMode, TorchDispatchMode, tree_leaves
from stepladder.train.job import Job

READ_NUMBER = torch.ops.aten._local_scalar_dense.default  # `.item()` and its like


class _SharedFakeMode(FakeTensorMode):
    """A mode that a weight and its copies share; copy.deepcopy would copy the mode."""

    def __deepcopy__(self, _memo: dict[int, Any]) -> _SharedFakeMode:
        return self


class FakeModelBuilder:
    """Builds jobs whose weights take no memory."""

    def __init__(self) -> None:
        # The FakeTensorMode of all tensors that it makes.
        self.mode = _SharedFakeMode(allow_non_fake_inputs=True)
        self.fake_by_real = WeakTensorKeyDictionary()

    def build(self, build: Callable[[], Job]) -> Job:
        """Return the job that `build` makes, with fake weights and buffers.

        Each real weight exists only until the model registers it, so one at a time takes memory.
        """
        hook = register_module_parameter_registration_hook(self._register)
        try:
            with warnings.catch_warnings():
                # copy.deepcopy asks for the address of a storage.
                warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
                job = build()
        finally:
            hook.remove()
        for module in job.model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else self._make_fake(buffer)
        return job

    def _register(self, _module: nn.Module, _name: str, param: Any) -> Any:
        return None if param is None else self._make_fake(param)

    def _make_fake(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        if tensor not in self.fake_by_real:
            self.fake_by_real[tensor] = self.mode.from_tensor(tensor)
        fake: Tensor = self.fake_by_real[tensor]
        return fake


class StorageTally(TorchDispatchMode):
    """Counts the bytes of the fake tensors that exist in a `with` block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # Bytes at this moment.
        self.now = 0
        # The most bytes at any moment.
        self.peak = 0
        self.storages: dict[int, weakref.ref[Any]] = {}  # by id
        self.sizes: dict[int, int] = {}
        self.resize_storage = torch.UntypedStorage.resize_

    def __enter__(self) -> Any:
        """Begin to count the bytes of storages, including those that are resized.

        fully_shard frees the weights of a block by resizing, which is no operation that torch
        dispatches.

        Returns:
            This object, which holds the counts.
        """

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = self.resize_storage(storage, size)
            if id(storage) in self.storages:
                self._set_size(id(storage), size)
            return result

        torch.UntypedStorage.resize_ = resize  # type: ignore[assignment, method-assign]
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *raised: Any) -> None:
        """Stop counting."""
        torch.UntypedStorage.resize_ = self.resize_storage  # type: ignore[method-assign]
        super().__exit__(*raised)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation of torch, and count the tensors that it returns."""
        if func is READ_NUMBER and isinstance(args[0], FakeTensor):
            return _make_number(args[0].dtype)
        result = func(*args, **(kwargs or {}))
        self.add(result)
        return result

    def add(self, tree: Any) -> None:
        """Count the tensors in nested lists, tuples and dicts, each storage once."""
        for tensor in map(to_local, tree_leaves(tree)):
            if isinstance(tensor, FakeTensor):
                self._add_storage(tensor.untyped_storage())

    def reset_peak(self) -> None:
        """Forget larger amounts than the present one."""
        self.peak = self.now

    def _add_storage(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key in self.storages:
            return

        def remove(_ref: Any) -> None:
            del self.storages[key]
            self.now -= self.sizes.pop(key)

        self.storages[key] = weakref.ref(storage, remove)
        self._set_size(key, storage.nbytes())

    def _set_size(self, key: int, size: int) -> None:
        self.now += size - self.sizes.get(key, 0)
        self.sizes[key] = size
        self.peak = max(self.peak, self.now)


def _make_number(dtype: torch.dtype) -> bool | float | int:
    """Return any number of a type, to be read from a tensor that holds none."""
    if dtype == torch.bool:
        return True
    return 1.0 if dtype.is_floating_point else 1


def to_local(value: Any) -> Any:
    """Return this rank's rows of a DTensor, and any other value unchanged."""
    return value.detach().to_local() if hasattr(value, "to_local") else value
