"""Simulated GPUs: a script for CUDA and NCCL runs on CPU ranks.

CUDA devices become the CPU, nccl becomes gloo, and streams do nothing. A torch function mode maps
devices in `.to` and in factories; what does not go through torch functions is patched. The variable
STEPLADDER_PRETEND_GPUS asks for it, with the number of GPUs that a machine has.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from stepladder.tools.check.probe_settings import (
    PROBE_SETTINGS,
    SIMULATED_GPUS,
    SIMULATED_GPUS_AVAILABLE,
)
from stepladder.tools.check.simulated_cuda import patch_cuda

CPU_DEVICE = torch.device("cpu")


class MoveCounter:
    """Counts the moves of tensors and modules to a GPU."""

    def __init__(self) -> None:
        self.moves = 0

    def add(self) -> None:
        self.moves += 1

    def print_at_exit(self) -> None:
        if self.moves and int(os.environ.get("RANK", 0)) == 0:
            sys.stderr.write(f"stepladder: {self.moves} moves to a simulated GPU on rank 0\n")


counter = MoveCounter()


def is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


def is_index(value: Any) -> bool:
    """Return whether a value is an int, as the index of a device is, and no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def map_device(device: Any) -> Any:
    """Return the CPU for a CUDA device, which counts as a move, and anything else as it is."""
    if is_cuda(device):
        counter.add()
        return CPU_DEVICE
    return device


class SimulateGpus(TorchFunctionMode):
    """Maps CUDA devices to the CPU in all calls of torch functions."""

    def __torch_function__(
        self, original: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(original, "__name__", "")
        if original is torch.device:
            return original(*args, **kwargs)
        if name == "cuda" and args and isinstance(args[0], torch.Tensor):
            counter.add()
            return args[0]
        if name == "pin_memory":
            return args[0]
        if name == "to" and len(args) > 1 and is_index(args[1]):
            counter.add()
            args = (args[0], CPU_DEVICE, *args[2:])
        device = kwargs.get("device")
        if is_cuda(device) or is_index(device):
            counter.add()
            kwargs = {**kwargs, "device": CPU_DEVICE}
        if any(is_cuda(arg) for arg in args):
            args = tuple(map_device(arg) for arg in args)
        return original(*args, **kwargs)


def attach() -> None:
    """Simulate GPUs in this process. Called once, after torch has been imported."""
    SimulateGpus().__enter__()  # type: ignore[no-untyped-call]
    is_available = os.environ.get(SIMULATED_GPUS_AVAILABLE, "1") == "1"
    patch_cuda(int(os.environ[SIMULATED_GPUS]), is_available)
    patch_modules()
    patch_loading()
    patch_groups()
    if PROBE_SETTINGS not in os.environ:
        atexit.register(counter.print_at_exit)


class IsAnyGenerator(type):
    """Makes `isinstance` accept the generators of torch itself."""

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, torch._C.Generator)


class CpuGenerator(metaclass=IsAnyGenerator):
    """Stands in for torch.Generator, and makes `torch.Generator(device="cuda")` on the CPU."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return torch._C.Generator("cpu" if isinstance(device, int) else map_device(device))


def patch_modules() -> None:
    original_to = torch.nn.Module.to
    original_init = DistributedDataParallel.__init__

    def module_to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            device = kwargs["device"]
            kwargs["device"] = CPU_DEVICE if isinstance(device, int) else map_device(device)
        if args:
            first = CPU_DEVICE if is_index(args[0]) else map_device(args[0])
            args = (first, *args[1:])
        return original_to(self, *args, **kwargs)

    def stay_on_cpu(self: Any, *args: Any, **kwargs: Any) -> Any:
        counter.add()
        return self

    def wrapper_init(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        kwargs |= {"device_ids": None, "output_device": None}
        original_init(self, module, **kwargs)

    torch.nn.Module.to = module_to  # type: ignore[method-assign]
    torch.nn.Module.cuda = stay_on_cpu  # type: ignore[method-assign]
    torch.Tensor.cuda = stay_on_cpu  # type: ignore[method-assign]
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign, assignment]
    torch.Generator = CpuGenerator  # type: ignore[misc]
    setattr(DistributedDataParallel, "__init__", wrapper_init)  # noqa: B010


def patch_loading() -> None:
    original_load = torch.load

    def load_to_cpu(*args: Any, **kwargs: Any) -> Any:
        args = (*args[:1], *args[2:])  # without map_location
        options = {**kwargs, "map_location": CPU_DEVICE}
        return original_load(*args, **options)

    torch.load = load_to_cpu
    torch.serialization.load = load_to_cpu


def patch_groups() -> None:
    if not dist.is_available():
        return
    for name in ("init_process_group", "new_group"):
        replace_in_distributed(name, with_gloo(getattr(c10d, name)))
    original_all_reduce = c10d.all_reduce
    original_barrier = c10d.barrier

    def all_reduce(
        tensor: Any,
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if op != dist.ReduceOp.AVG:
            return original_all_reduce(tensor, op, group, async_op)
        original_all_reduce(tensor, dist.ReduceOp.SUM, group)  # gloo has no mean
        tensor.div_(dist.get_world_size(group))
        return CompletedWork() if async_op else None

    def barrier(
        group: Any = None,
        async_op: bool = False,
        device_ids: Any = None,
    ) -> Any:
        return original_barrier(group, async_op)

    replace_in_distributed("all_reduce", all_reduce)
    replace_in_distributed("barrier", barrier)
    replace_in_distributed("is_nccl_available", lambda: True)


class CompletedWork:
    """The handle of an asynchronous collective that is complete."""

    def wait(self, *_: Any) -> bool:
        return True


def replace_in_distributed(name: str, function: Callable[..., Any]) -> None:
    setattr(c10d, name, function)
    setattr(dist, name, function)


def with_gloo(original: Any) -> Any:
    """Return a function that calls the original with gloo in place of nccl."""

    def init_with_gloo(*args: Any, **kwargs: Any) -> Any:
        args = tuple(gloo_for_nccl(arg) for arg in args)
        kwargs.pop("device_id", None)
        kwargs = {name: gloo_for_nccl(value) for name, value in kwargs.items()}
        return original(*args, **kwargs)

    return init_with_gloo


def gloo_for_nccl(value: Any) -> Any:
    is_backend = isinstance(value, str) and "://" not in value
    if is_backend and "nccl" in value:
        return "gloo"
    return value
