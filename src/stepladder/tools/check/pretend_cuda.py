"""`torch.cuda` as scripts use it, on a machine without a GPU: numbers of devices, streams, events,
memory, amp.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

ZEROS = (
    "memory_allocated",
    "max_memory_allocated",
    "memory_reserved",
    "max_memory_reserved",
    "memory_cached",
    "max_memory_cached",
    "utilization",
)
NOTHING = (
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


class Current:
    device = 0


class NotSimulated(AttributeError):
    """What a script asks of simulated CUDA, and it does not have."""


class Simulated:
    """Stands in for one of CUDA's objects, and says plainly what it does not have."""

    def __getattr__(self, name: str) -> Any:
        raise NotSimulated(f"{type(self).__name__} has no {name}: it is not simulated")


class NoStream(Simulated):
    """Everything on a CPU happens in its order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.cuda_stream = 0

    def synchronize(self) -> None: ...
    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def record_event(self, event: Any = None) -> Moment:
        return event or Moment()

    def query(self) -> bool:
        return True

    def __enter__(self) -> NoStream:
        return self

    def __exit__(self, *_: object) -> None: ...


class Moment(Simulated):
    """A moment, by the machine's clock."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.at = 0.0

    def record(self, stream: Any = None) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None: ...
    def wait(self, stream: Any = None) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Moment) -> float:
        return (other.at - self.at) * 1000


class DeviceProperties(Simulated):
    """Properties of a simulated GPU."""

    def __init__(self) -> None:
        self.name = "pretended GPU"
        self.total_memory = 16 << 30
        self.major = 8
        self.minor = 0
        self.multi_processor_count = 1


@contextmanager
def on_device(device: Any = None) -> Iterator[None]:
    yield


def number_of(device: Any) -> int:
    if isinstance(device, int):
        return device
    return torch.device(device).index or 0


def patch_cuda(gpus: int, says_available: bool) -> None:
    cuda: Any = torch.cuda

    def set_device(device: Any) -> None:
        Current.device = number_of(device)

    for name in NOTHING:
        setattr(cuda, name, lambda *args, **kwargs: None)
    for name in ZEROS:
        setattr(cuda, name, lambda *args, **kwargs: 0)
    cuda.is_available = Asked(says_available)
    cuda.device_count = lambda: gpus
    cuda.set_device = set_device
    cuda.current_device = lambda: Current.device
    cuda.is_initialized = lambda: True
    cuda.get_device_name = lambda device=None: "pretended GPU"
    cuda.get_device_capability = lambda device=None: (8, 0)
    cuda.get_device_properties = lambda device=None: DeviceProperties()
    cuda.memory_stats = lambda device=None: defaultdict(int)
    cuda.mem_get_info = lambda device=None: (16 << 30, 16 << 30)
    cuda.is_bf16_supported = lambda *args, **kwargs: True
    cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.get_rng_state_all = lambda: [torch.get_rng_state()]
    cuda.memory_summary = lambda *args, **kwargs: ""
    cuda.Stream, cuda.Event = NoStream, Moment
    cuda.current_stream = cuda.default_stream = lambda device=None: NoStream()
    cuda.stream = lambda stream: on_device()
    cuda.device = on_device
    cuda.nvtx = SimpleNamespace(
        range_push=print_nothing, range_pop=print_nothing, range=on_device, mark=print_nothing
    )
    patch_accelerator(cuda)
    patch_amp()


def patch_accelerator(cuda: Any) -> None:
    """`torch.accelerator`, for scripts: torch itself, as its data loader, must see that there is
    none.
    """
    accelerator: Any = torch.accelerator
    same = (
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
    instead = {name: getattr(cuda, name) for name in same}
    instead |= {
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "set_device_index": cuda.set_device,
        "set_device_idx": cuda.set_device,
        "current_device_index": cuda.current_device,
        "current_device_idx": cuda.current_device,
        "device_index": on_device,
        "get_memory_info": cuda.mem_get_info,
    }
    for name, function in instead.items():
        if name == "current_accelerator" and not cuda.is_available.answer:
            continue
        setattr(accelerator, name, unless_torch(getattr(accelerator, name), function))


def unless_torch(original: Any, function: Any) -> Any:
    def called(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.startswith("torch."):
            return original(*args, **kwargs)
        return function(*args, **kwargs)

    return called


class Asked:
    """torch.cuda.is_available. That the script has asked is written down: it may have a way without
    a GPU.
    """

    def __init__(self, answer: bool) -> None:
        self.answer = answer

    def __call__(self) -> bool:
        from stepladder.tools.check.probe import recorder

        if recorder.recorder is not None and recorder.recorder.direct():
            recorder.recorder.at("asked", answer=self.answer)
        return self.answer


def print_nothing(*args: Any, **kwargs: Any) -> None: ...


def patch_amp() -> None:
    """Mixed precision: autocast becomes the CPU's, with bfloat16; a loss is not scaled."""
    original_cast = torch.amp.autocast.__init__
    original_scaler = torch.amp.GradScaler.__init__

    def cast_init(self: Any, device_type: str = "cuda", dtype: Any = None, **kwargs: Any) -> None:
        dtype = torch.bfloat16 if dtype == torch.float16 else dtype
        original_cast(self, "cpu" if device_type == "cuda" else device_type, dtype=dtype, **kwargs)

    def scaler_init(self: Any, *args: Any, **kwargs: Any) -> None:
        original_scaler(self, "cpu", enabled=False)

    torch.amp.autocast.__init__ = cast_init  # type: ignore[method-assign, assignment]
    torch.amp.GradScaler.__init__ = scaler_init  # type: ignore[method-assign]

    class CudaAutocast(torch.amp.autocast):
        def __init__(
            self, enabled: bool = True, dtype: Any = None, cache_enabled: bool = True
        ) -> None:
            super().__init__("cpu", dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)

    class CudaGradScaler(torch.amp.GradScaler):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__("cpu", enabled=False)

    torch.cuda.amp.autocast, torch.cuda.amp.GradScaler = CudaAutocast, CudaGradScaler  # type: ignore[misc, assignment]
