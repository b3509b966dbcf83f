"""A script for CUDA and NCCL on CPU ranks: devices become the CPU, nccl becomes gloo, streams do
nothing.

A function mode maps devices in `.to` and in factories; what does not go through torch functions is
patched. The ranks' environment asks for it: STEPLADDER_PRETEND_GPUS is the number of GPUs that a
machine is said to have."""

from __future__ import annotations

import atexit
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel as Wrapper
from torch.overrides import TorchFunctionMode

from stepladder.tools.check.pretend_cuda import patch_cuda
from stepladder.tools.check.settings import PRETEND

CPU = torch.device("cpu")


class Moves:
    count = 0


def is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


def mapped(device: Any) -> Any:
    """The CPU for a CUDA device, which counts as a move; all else as it is."""
    if is_cuda(device):
        Moves.count += 1
        return CPU
    return device


class PretendGpus(TorchFunctionMode):
    def __torch_function__(
        self, original: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(original, "__name__", "")
        if original is torch.device:
            return original(*args, **kwargs)
        if name == "cuda" and args and isinstance(args[0], torch.Tensor):
            Moves.count += 1
            return args[0]
        if name == "pin_memory":
            return args[0]
        if (
            name == "to"
            and len(args) > 1
            and isinstance(args[1], int)
            and not isinstance(args[1], bool)
        ):
            Moves.count += 1
            args = (args[0], CPU, *args[2:])
        device = kwargs.get("device")
        if is_cuda(device) or (isinstance(device, int) and not isinstance(device, bool)):
            kwargs = {**kwargs, "device": CPU}
            Moves.count += 1
        if any(is_cuda(arg) for arg in args):
            args = tuple(mapped(arg) for arg in args)
        return original(*args, **kwargs)


def attach() -> None:
    """Called once per process, when torch has been imported."""
    gpus = int(os.environ[PRETEND])
    PretendGpus().__enter__()  # type: ignore[no-untyped-call]
    patch_cuda(gpus, says_available=os.environ.get(f"{PRETEND}_ASKED", "1") == "1")
    patch_modules()
    patch_groups()
    if "STEPLADDER_CHECK" not in os.environ:
        atexit.register(tell)


def tell() -> None:
    if Moves.count and int(os.environ.get("RANK", 0)) == 0:
        sys.stderr.write(f"stepladder: {Moves.count} moves to a pretended GPU on rank 0\n")


class _AnyGenerator(type):
    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, torch._C.Generator)


class CpuGenerator(metaclass=_AnyGenerator):
    """torch.Generator(device="cuda"), on the CPU."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return torch._C.Generator("cpu" if isinstance(device, int) else mapped(device))


def patch_modules() -> None:
    original_to = torch.nn.Module.to
    original_load = torch.load
    original_init = Wrapper.__init__

    def module_to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = (
                CPU if isinstance(kwargs["device"], int) else mapped(kwargs["device"])
            )
        first = args[:1] and (
            CPU if isinstance(args[0], int) and not isinstance(args[0], bool) else mapped(args[0])
        )
        return original_to(self, *((first, *args[1:]) if args else ()), **kwargs)

    def module_cuda(self: Any, device: Any = None) -> Any:
        Moves.count += 1
        return self

    def tensor_cuda(self: Any, *args: Any, **kwargs: Any) -> Any:
        Moves.count += 1
        return self

    def load_here(*args: Any, **kwargs: Any) -> Any:
        if len(args) > 1:
            args = (args[0], *args[2:])
        return original_load(*args, **{**kwargs, "map_location": CPU})

    def wrapper_init(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        kwargs |= {"device_ids": None, "output_device": None}
        original_init(self, module, **kwargs)

    torch.nn.Module.to, torch.nn.Module.cuda = module_to, module_cuda  # type: ignore[method-assign]
    torch.Tensor.cuda = tensor_cuda  # type: ignore[method-assign]
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign, assignment]
    torch.load = torch.serialization.load = load_here
    torch.Generator = CpuGenerator  # type: ignore[misc]
    Wrapper.__init__ = wrapper_init  # type: ignore[method-assign]


def patch_groups() -> None:
    if not dist.is_available():
        return
    for name in ("init_process_group", "new_group"):
        replace(name, on_gloo(getattr(c10d, name)))
    original_all_reduce = c10d.all_reduce
    original_barrier = c10d.barrier

    def all_reduce(
        tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        if op != dist.ReduceOp.AVG:
            return original_all_reduce(tensor, op, group, async_op)
        original_all_reduce(tensor, dist.ReduceOp.SUM, group)  # gloo has no mean
        tensor.div_(dist.get_world_size(group))
        return _Done() if async_op else None

    def wait(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        return original_barrier(group, async_op)

    replace("all_reduce", all_reduce)
    replace("barrier", wait)
    replace("is_nccl_available", lambda: True)


class _Done:
    def wait(self, *_: Any) -> bool:
        return True


def replace(name: str, function: Any) -> None:
    setattr(c10d, name, function)
    setattr(dist, name, function)


def on_gloo(original: Any) -> Any:
    def meet(*args: Any, **kwargs: Any) -> Any:
        args = tuple(gloo(arg) for arg in args)
        kwargs = {key: gloo(value) for key, value in kwargs.items() if key != "device_id"}
        return original(*args, **kwargs)

    return meet


def gloo(value: Any) -> Any:
    if isinstance(value, str) and "nccl" in value and "://" not in value:
        return "gloo"
    return value
