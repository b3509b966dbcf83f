"""Devices, tensors and factories of simulated GPUs: what names a CUDA device gets the CPU.

A function with a parameter `original` is called with the one that it replaces.
"""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

CPU_DEVICE = torch.device("cpu")
DEVICE_CLASS = torch.device
GENERATOR_CLASS = torch.Generator
CUDA_TYPE_PREFIX = "torch.cuda."  # of the legacy tensor types, such as torch.cuda.FloatTensor


class MoveCounter:
    """Counts the moves of tensors to a GPU."""

    def __init__(self) -> None:
        self.moves = 0

    def add(self) -> None:
        self.moves += 1

    def print_at_exit(self) -> None:
        atexit.register(self.print_moves)

    def print_moves(self) -> None:
        is_first_rank = int(os.environ.get("RANK", 0)) == 0
        if self.moves and is_first_rank and get_worker_info() is None:
            sys.stderr.write(f"stepladder: {self.moves} moves to a simulated GPU on rank 0\n")


counter = MoveCounter()


def is_cuda(device: Any) -> bool:
    if isinstance(device, DEVICE_CLASS):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


def is_index(value: Any) -> bool:
    """Return whether a value is an int, as the index of a device is, and no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def map_device(device: Any) -> Any:
    """Return the CPU for a CUDA device or index, which counts as a move, else the argument."""
    if is_cuda(device) or is_index(device):
        counter.add()
        return CPU_DEVICE
    return device


def map_device_type(device: Any) -> Any:
    """Return "cpu" for the name of a CUDA device, and anything else as it is."""
    return "cpu" if is_cuda(device) else device


class StandIn(type):
    """The class of a class that stands for one of torch: in `isinstance`, `==` and as a key."""

    original: type

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, cls.original)

    def __subclasscheck__(cls, other: Any) -> bool:
        return other is cls or issubclass(other, cls.original)

    def __eq__(cls, other: Any) -> bool:
        return other is cls or other is cls.original

    def __hash__(cls) -> int:
        return hash(cls.original)


class SimulatedDevice(metaclass=StandIn):
    """Stands for torch.device. An index alone is a CUDA device, as on a machine with GPUs."""

    original = DEVICE_CLASS

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if args and is_index(args[0]):
            return DEVICE_CLASS("cuda", *args, **kwargs)
        return cls.original(*args, **kwargs)


class SimulatedGenerator(metaclass=StandIn):
    """Stands for torch.Generator, and makes `torch.Generator(device="cuda")` on the CPU."""

    original = GENERATOR_CLASS

    def __new__(cls, device: Any = "cpu") -> Any:
        return cls.original(map_device(device))


# The storages that the script has pinned. They are ordinary memory.
pinned_storages: weakref.WeakSet[Any] = weakref.WeakSet()


def mark_pinned(tensor: Tensor) -> Tensor:
    with suppress(NotImplementedError):  # sparse tensors have no storage
        pinned_storages.add(tensor.untyped_storage())
    return tensor


def pin_memory(self: Tensor, device: Any = None) -> Tensor:
    """Return a copy, as pinning does, unless the tensor is pinned already."""
    return self if is_pinned(self) else mark_pinned(self.clone())


def is_pinned(self: Tensor, device: Any = None) -> bool:
    with suppress(NotImplementedError):
        return self.untyped_storage() in pinned_storages
    return False


def stay_on_cpu(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Stand in for `Tensor.cuda`."""
    counter.add()
    return self


def record_stream(self: Tensor, stream: Any) -> None:
    """Stand in for `Tensor.record_stream`."""


def move_to_cpu(original: Any, owner: Any, *args: Any, **kwargs: Any) -> Any:
    """Stand in for `to` of tensors or modules, for which each CUDA device is the CPU."""
    if args:
        args = (map_device(args[0]), *args[1:])
    if "device" in kwargs:
        kwargs["device"] = map_device(kwargs["device"])
    return original(owner, *args, **kwargs)


def make_on_cpu(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Make tensors on the CPU that were to be on a CUDA device."""
    if kwargs.get("device") is not None:
        kwargs["device"] = map_device(kwargs["device"])
    if not kwargs.get("pin_memory"):
        return original(*args, **kwargs)
    del kwargs["pin_memory"]
    return mark_pinned(original(*args, **kwargs))


def name_cpu_type(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace the name of a CUDA tensor type by that of the CPU's type."""
    names = [a.replace(CUDA_TYPE_PREFIX, "torch.") if isinstance(a, str) else a for a in args]
    return original(*names, **kwargs)


def with_cpu_type(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace the device type "cuda" by "cpu"."""
    if "device_type" in kwargs:
        kwargs["device_type"] = map_device_type(kwargs["device_type"])
    return original(*map(map_device_type, args), **kwargs)


def load_to_cpu(original: Any, f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Stand in for `torch.load`: read all tensors to the CPU, whatever device they were on."""
    return original(f, CPU_DEVICE, *args, **kwargs)
