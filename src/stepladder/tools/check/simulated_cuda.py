"""The simulated `torch.cuda` of scripts on a machine without a GPU.

It has devices by number, streams, events, memory figures and mixed precision.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

GPU_NAME = "simulated GPU"
GPU_MEMORY_BYTES = 16 << 30
COMPUTE_CAPABILITY = (8, 0)
FUNCTIONS_OF_ZERO = (
    "memory_allocated",
    "max_memory_allocated",
    "memory_reserved",
    "max_memory_reserved",
    "memory_cached",
    "max_memory_cached",
    "utilization",
)
FUNCTIONS_WITHOUT_EFFECT = (
    "synchronize",
    "empty_cache",
    "reset_peak_memory_stats",
    "reset_max_memory_allocated",
    "init",
    "ipc_collect",
    "set_stream",
    "manual_seed",
    "manual_seed_all",
    "set_per_process_memory_fraction",
    "set_rng_state",
    "set_rng_state_all",
    "reset_accumulated_memory_stats",
)
SAME_IN_ACCELERATOR = (
    "is_available",
    "device_count",
    "synchronize",
    "empty_cache",
    "current_stream",
    "set_stream",
    "memory_allocated",
    "max_memory_allocated",
    "memory_reserved",
    "max_memory_reserved",
    "reset_peak_memory_stats",
    "reset_accumulated_memory_stats",
    "get_device_capability",
)


class CurrentDevice:
    """The device that the script has set."""

    def __init__(self) -> None:
        self.index = 0

    def set(self, device: Any) -> None:
        if isinstance(device, int):
            self.index = device
        else:
            self.index = torch.device(device).index or 0

    def get(self) -> int:
        return self.index


class NotSimulated(AttributeError):
    """Raised where a script uses something that the simulated CUDA does not have."""


class SimulatedObject:
    """An object of simulated CUDA. It names the attributes that it does not have."""

    def __getattr__(self, name: str) -> Any:
        raise NotSimulated(f"{type(self).__name__} has no {name}: it is not simulated")


class SimulatedStream(SimulatedObject):
    """A stream without effect: on a CPU everything happens in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.cuda_stream = 0

    def synchronize(self) -> None: ...
    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def record_event(self, event: Any = None) -> SimulatedEvent:
        return event or SimulatedEvent()

    def query(self) -> bool:
        return True

    def __enter__(self) -> SimulatedStream:
        return self

    def __exit__(self, *_: object) -> None: ...


class SimulatedEvent(SimulatedObject):
    """An event that records the time of the machine's clock."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.time_s = 0.0

    def record(self, stream: Any = None) -> None:
        self.time_s = time.perf_counter()

    def synchronize(self) -> None: ...
    def wait(self, stream: Any = None) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, end: SimulatedEvent) -> float:
        """Return the milliseconds from this event to a later one."""
        return (end.time_s - self.time_s) * 1000


class DeviceProperties(SimulatedObject):
    """The properties of a simulated GPU."""

    def __init__(self) -> None:
        self.name = GPU_NAME
        self.total_memory = GPU_MEMORY_BYTES
        self.major = COMPUTE_CAPABILITY[0]
        self.minor = COMPUTE_CAPABILITY[1]
        self.multi_processor_count = 1


class IsAvailable:
    """Stands in for torch.cuda.is_available.

    It records that the script has asked: the script may be able to run without a GPU.
    """

    def __init__(self, answer: bool) -> None:
        self.answer = answer

    def __call__(self) -> bool:
        from stepladder.tools.check.events import GpuQuery
        from stepladder.tools.check.probe import probe_log

        log = probe_log.active_log
        if log is not None and log.is_called_by_user():
            log.write_with_line(GpuQuery())
        return self.answer


@contextmanager
def empty_context(*args: Any, **kwargs: Any) -> Iterator[None]:
    """Stand in for a context that needs no action."""
    yield


def make_function(result: Any) -> Callable[..., Any]:
    """Return a new function that ignores its arguments and returns a constant.

    Each name needs a function of its own: torch._dynamo refuses one function under two names for
    which it has different rules (seen on torch 2.13).
    """

    def return_constant(*args: Any, **kwargs: Any) -> Any:
        return result

    return return_constant


def patch_cuda(gpus: int, is_available: bool) -> None:
    """Replace the functions of torch.cuda, torch.accelerator and torch.amp.

    Args:
        gpus: The number of GPUs of this machine.
        is_available: The answer of `torch.cuda.is_available()`.
    """
    functions = simulated_functions(gpus, is_available)
    for name, function in functions.items():
        setattr(torch.cuda, name, function)
    patch_accelerator(functions)
    patch_amp()


def simulated_functions(gpus: int, is_available: bool) -> dict[str, Any]:
    """Return the functions and classes that replace those of torch.cuda, by name."""
    device = CurrentDevice()
    functions: dict[str, Any] = {name: make_function(None) for name in FUNCTIONS_WITHOUT_EFFECT}
    functions |= {name: make_function(0) for name in FUNCTIONS_OF_ZERO}
    functions |= {
        "is_available": IsAvailable(is_available),
        "device_count": lambda: gpus,
        "set_device": device.set,
        "current_device": device.get,
        "is_initialized": lambda: True,
        "get_device_name": lambda device=None: GPU_NAME,
        "get_device_capability": lambda device=None: COMPUTE_CAPABILITY,
        "get_device_properties": lambda device=None: DeviceProperties(),
        "memory_stats": lambda device=None: defaultdict(int),
        "mem_get_info": lambda device=None: (GPU_MEMORY_BYTES, GPU_MEMORY_BYTES),
        "is_bf16_supported": lambda *args, **kwargs: True,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "get_rng_state_all": lambda: [torch.get_rng_state()],
        "memory_summary": lambda *args, **kwargs: "",
        "Stream": SimulatedStream,
        "Event": SimulatedEvent,
        "current_stream": lambda device=None: SimulatedStream(),
        "default_stream": lambda device=None: SimulatedStream(),
        "stream": lambda stream: empty_context(),
        "device": empty_context,
        "nvtx": SimpleNamespace(
            range_push=make_function(None),
            range_pop=make_function(None),
            range=empty_context,
            mark=make_function(None),
        ),
    }
    return functions


def patch_accelerator(cuda: dict[str, Any]) -> None:
    """Replace torch.accelerator for scripts; torch's own code must see that there is none."""
    functions = {name: cuda[name] for name in SAME_IN_ACCELERATOR}
    functions |= {
        "set_device_index": cuda["set_device"],
        "set_device_idx": cuda["set_device"],
        "current_device_index": cuda["current_device"],
        "current_device_idx": cuda["current_device"],
        "device_index": empty_context,
        "get_memory_info": cuda["mem_get_info"],
    }
    if cuda["is_available"].answer:
        functions["current_accelerator"] = lambda check_available=False: torch.device("cuda")
    for name, function in functions.items():
        original = getattr(torch.accelerator, name)
        setattr(
            torch.accelerator,
            name,
            unless_called_by_torch(original, function),
        )


def unless_called_by_torch(
    original: Callable[..., Any], function: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a function that calls the original for torch's own code, and the other for scripts."""

    def choose_by_caller(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.startswith("torch."):
            return original(*args, **kwargs)
        return function(*args, **kwargs)

    return choose_by_caller


def patch_amp() -> None:
    """Replace mixed precision: autocast becomes the CPU's with bfloat16, losses are not scaled."""
    original_autocast = torch.amp.autocast.__init__
    original_scaler = torch.amp.GradScaler.__init__

    def autocast_init(
        self: Any, device_type: str = "cuda", dtype: Any = None, **kwargs: Any
    ) -> None:
        if dtype == torch.float16:
            dtype = torch.bfloat16
        if device_type == "cuda":
            device_type = "cpu"
        original_autocast(self, device_type, dtype=dtype, **kwargs)

    def scaler_init(self: Any, *args: Any, **kwargs: Any) -> None:
        original_scaler(self, "cpu", enabled=False)

    class CudaAutocast(torch.amp.autocast):
        def __init__(
            self, enabled: bool = True, dtype: Any = None, cache_enabled: bool = True
        ) -> None:
            super().__init__(
                "cpu",
                dtype=dtype,
                enabled=enabled,
                cache_enabled=cache_enabled,
            )

    class CudaGradScaler(torch.amp.GradScaler):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__("cpu", enabled=False)

    torch.amp.autocast.__init__ = autocast_init  # type: ignore[method-assign, assignment]
    torch.amp.GradScaler.__init__ = scaler_init  # type: ignore[method-assign]
    torch.cuda.amp.autocast = CudaAutocast  # type: ignore[misc, assignment]
    torch.cuda.amp.GradScaler = CudaGradScaler  # type: ignore[misc, assignment]
