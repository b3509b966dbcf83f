"""The simulated `torch.cuda`, by the names of its functions and classes."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from stepladder.tools.check.simulated_gpu.devices import DEVICE_CLASS
from stepladder.tools.check.simulated_gpu.refusal import (
    Function,
    SimulatedObject,
    make_unsupported_class,
    make_unsupported_function,
)
from stepladder.tools.check.simulated_gpu.streams import (
    DeviceContext,
    SimulatedEvent,
    SimulatedStream,
    StreamContext,
    current_device,
    streams,
)
from stepladder.tools.probe.events import ProbeEvent

GPU_NAME = "simulated GPU"
GPU_MEMORY_BYTES = 16 << 30
COMPUTE_CAPABILITY = (8, 0)
NCCL_VERSION = (2, 28, 9)
CHOOSES_THE_DEVICE = (
    "accelerate",
    "lightning",
    "lightning_fabric",
    "pytorch_lightning",
    "transformers",
)

# Functions of torch.cuda and torch.cuda.memory by what they return, whatever their arguments are.
WITHOUT_EFFECT = (
    "synchronize",
    "empty_cache",
    "reset_peak_memory_stats",
    "reset_max_memory_allocated",
    "reset_max_memory_cached",
    "reset_accumulated_memory_stats",
    "reset_peak_host_memory_stats",
    "reset_accumulated_host_memory_stats",
    "init",
    "ipc_collect",
    "manual_seed",
    "manual_seed_all",
    "seed",
    "seed_all",
    "set_per_process_memory_fraction",
    "set_rng_state",
    "set_rng_state_all",
    "set_sync_debug_mode",
    "_record_memory_history",
    "_set_allocator_settings",
    "_sleep",
)
RETURN_ZERO = (
    "memory_allocated",
    "max_memory_allocated",
    "memory_reserved",
    "max_memory_reserved",
    "memory_cached",
    "max_memory_cached",
    "memory_usage",
    "device_memory_used",
    "utilization",
    "temperature",
    "power_draw",
    "clock_rate",
    "get_sync_debug_mode",
    "initial_seed",
)
CONSTANTS: dict[str, Any] = {
    "is_initialized": True,
    "is_bf16_supported": True,
    "is_tf32_supported": True,
    "can_device_access_peer": True,
    "is_current_stream_capturing": False,
    "get_device_name": GPU_NAME,
    "get_device_capability": COMPUTE_CAPABILITY,
    "get_allocator_backend": "native",
    "get_gencode_flags": "",
    "get_per_process_memory_fraction": 1.0,
    "mem_get_info": (GPU_MEMORY_BYTES, GPU_MEMORY_BYTES),
    "memory_summary": "",
    "list_gpu_processes": "",
}
# Figures of memory_stats. Each of the first has a value for each pool and each way of counting.
POOL_FIGURES = (
    "allocation",
    "segment",
    "active",
    "inactive_split",
    "allocated_bytes",
    "reserved_bytes",
    "active_bytes",
    "inactive_split_bytes",
    "requested_bytes",
)
POOLS = ("all", "small_pool", "large_pool")
WAYS_OF_COUNTING = ("current", "peak", "allocated", "freed")
OVERSIZE_FIGURES = ("oversize_allocations", "oversize_segments")
SINGLE_FIGURES = (
    "num_alloc_retries",
    "num_ooms",
    "num_sync_all_streams",
    "num_device_alloc",
    "num_device_free",
    "max_split_size",
)
# What torch.cuda offers beside functions and classes that need a GPU.
KEPT_CLASSES = ("CudaError", "DeferredCudaCallError", "cudaStatus")
KEPT_CLASS_SUFFIXES = ("Storage", "Tensor")
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
    "memory_stats",
    "reset_peak_memory_stats",
    "reset_accumulated_memory_stats",
    "get_device_capability",
)


class DeviceProperties(SimulatedObject):
    """The properties of a simulated GPU."""

    def __init__(self) -> None:
        self.name = GPU_NAME
        self.total_memory = GPU_MEMORY_BYTES
        self.major = COMPUTE_CAPABILITY[0]
        self.minor = COMPUTE_CAPABILITY[1]
        self.multi_processor_count = 1
        self.warp_size = 32
        self.is_integrated = 0
        self.is_multi_gpu_board = 0


class IsAvailable:
    """Stands in for torch.cuda.is_available.

    It records that the script has asked: the script may be able to run without a GPU.

    Args:
        answer: The answer; None where the first question decides: there are GPUs, unless a library
            is imported that chooses the device itself. It works with either answer, but with GPUs
            it chooses a backend that is not simulated.
        on_gpus: Called when the answer is known to be that there are GPUs.
    """

    def __init__(self, answer: bool | None, on_gpus: Function) -> None:
        self.known = answer
        self.on_gpus = on_gpus
        if answer:
            on_gpus()

    @property
    def answer(self) -> bool:
        if self.known is None:
            self.known = sys.modules.keys().isdisjoint(CHOOSES_THE_DEVICE)
            if self.known:
                self.on_gpus()
        return self.known

    def __call__(self) -> bool:
        from stepladder.tools.check.events import GpuQuery

        record_question(GpuQuery(answer=self.answer))
        return self.answer


def record_question(event: ProbeEvent) -> None:
    """Record a question of the user's code where a check runs it."""
    from stepladder.tools.check.probe import probe_log

    log = probe_log.active_log
    if log is not None and log.is_called_by_user():
        log.write_with_line(event)


@contextmanager
def empty_context(*args: Any, **kwargs: Any) -> Iterator[None]:
    """Stand in for a context that needs no action."""
    yield


def make_function(result: Any) -> Function:
    """Return a new function that ignores its arguments and returns a constant.

    Each name needs a function of its own: torch._dynamo refuses one function under two names for
    which it has different rules (seen on torch 2.11, 2.13 and 2.15).
    """

    def return_constant(*args: Any, **kwargs: Any) -> Any:
        return result

    return return_constant


def forward_to(function: Function) -> Function:
    """Return a new function that calls another one, for a second name."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


def memory_stats(device: Any = None) -> dict[str, int]:
    """Return zero for each figure that torch documents, and for any other name."""
    names = [f"{figure}.{pool}" for figure in POOL_FIGURES for pool in POOLS]
    counted = [f"{name}.{way}" for name in (*names, *OVERSIZE_FIGURES) for way in WAYS_OF_COUNTING]
    return defaultdict(int, dict.fromkeys([*counted, *SINGLE_FIGURES], 0))


def simulated_functions(gpus: int, is_available: bool | None, on_gpus: Function) -> dict[str, Any]:
    """Return the functions and classes that replace those of torch.cuda, by name."""
    functions: dict[str, Any] = {name: make_function(None) for name in WITHOUT_EFFECT}
    functions |= {name: make_function(0) for name in RETURN_ZERO}
    functions |= {name: make_function(value) for name, value in CONSTANTS.items()}
    functions |= {
        "is_available": IsAvailable(is_available, on_gpus),
        "device_count": lambda: gpus,
        "set_device": current_device.set,
        "current_device": current_device.get,
        "get_device_properties": lambda device=None: DeviceProperties(),
        "get_arch_list": lambda: [],
        "memory_stats": memory_stats,
        "host_memory_stats": lambda: defaultdict(int),
        "memory_snapshot": lambda *args, **kwargs: [],
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "get_rng_state_all": lambda: [torch.get_rng_state()],
        "default_generators": tuple(torch.Generator() for _ in range(gpus)),
        "Stream": SimulatedStream,
        "Event": SimulatedEvent,
        "current_stream": lambda device=None: streams.current,
        "default_stream": lambda device=None: streams.default,
        "set_stream": streams.set,
        "stream": lambda stream: StreamContext(stream),
        "StreamContext": StreamContext,
        "device": DeviceContext,
        "device_of": empty_context,
    }
    return functions


def refused_functions(simulated: dict[str, Any]) -> dict[str, Any]:
    """Return a refusal for each public function and class of torch.cuda that is not simulated."""
    refused = {}
    for name in torch.cuda.__all__:
        value = getattr(torch.cuda, name, None)
        is_kept = name in KEPT_CLASSES or name.endswith(KEPT_CLASS_SUFFIXES)
        if name in simulated or is_kept or not callable(value):
            continue
        refuse = make_unsupported_class if isinstance(value, type) else make_unsupported_function
        refused[name] = refuse(f"torch.cuda.{name}", value)
    return refused


def functions_of_modules() -> dict[str, dict[str, Any]]:
    """Return the functions that replace those of modules of torch.cuda, by module and name."""
    ranges = ("range_push", "range_pop", "range_start", "range_end", "mark")
    refused = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "unique_id")
    nvtx: dict[str, Any] = {name: make_function(0) for name in ranges}
    nccl: dict[str, Any] = {
        name: make_unsupported_function(f"torch.cuda.nccl.{name}", getattr(torch.cuda.nccl, name))
        for name in refused
    }
    return {
        "nvtx": nvtx | {"range": empty_context},
        "nccl": nccl | {"version": lambda: NCCL_VERSION, "is_available": lambda tensors: True},
        "profiler": {
            "start": make_function(None),
            "stop": make_function(None),
            "profile": empty_context,
        },
    }


def cudart() -> Any:
    """Return the functions of CUDA's runtime that start and stop its profiler."""
    return SimpleNamespace(cudaProfilerStart=lambda: 0, cudaProfilerStop=lambda: 0)


def accelerator_functions(cuda: dict[str, Any]) -> dict[str, Any]:
    """Return the functions that replace those of torch.accelerator, by name."""
    functions = {name: cuda[name] for name in SAME_IN_ACCELERATOR}
    functions |= {
        "set_device_index": cuda["set_device"],
        "set_device_idx": cuda["set_device"],
        "current_device_index": cuda["current_device"],
        "current_device_idx": cuda["current_device"],
        "device_index": cuda["device"],
        "get_memory_info": cuda["mem_get_info"],
    }
    without_gpus = torch.accelerator.current_accelerator

    def current_accelerator(check_available: bool = False) -> Any:
        if cuda["is_available"].answer:
            return DEVICE_CLASS("cuda")
        return without_gpus(check_available)

    functions["current_accelerator"] = current_accelerator
    return functions
