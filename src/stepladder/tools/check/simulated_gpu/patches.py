"""All that the simulation replaces in torch, in the whole process. No other file changes torch.

Threads of autograd and of a DataLoader have it, and so has each process that is forked. A new
interpreter attaches it again, at its start: the variable STEPLADDER_PRETEND_GPUS asks for it, with
the number of GPUs of the machine.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from functools import partial
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel
from torch.utils._device import DeviceContext, _device_constructors

from stepladder.tools.check.probe_settings import (
    PROBE_SETTINGS,
    SIMULATED_GPUS,
    SIMULATED_GPUS_AVAILABLE,
)
from stepladder.tools.check.simulated_gpu import (
    collectives,
    cuda,
    devices,
    mixed_precision,
    refusal,
)
from stepladder.tools.check.simulated_gpu.collectives import replace_arguments
from stepladder.tools.check.simulated_gpu.refusal import Function
from stepladder_exchange.after_import import AfterImport
from stepladder_exchange.torch_fixes_batch_norm import synchronize_on_cpus

# Those that torch does not count among its factories, since a tensor or a file says where they are.
FURTHER_FACTORIES = (
    "empty_like",
    "from_file",
    "full_like",
    "normal",
    "ones_like",
    "rand_like",
    "randint_like",
    "randn_like",
    "zeros_like",
)
FACTORIES_OF_FFT = ("fftfreq", "rfftfreq")
FACTORIES_OF_NESTED = ("nested_tensor", "as_nested_tensor")
FACTORIES_OF_TENSORS = (
    "new_empty",
    "new_empty_strided",
    "new_full",
    "new_ones",
    "new_tensor",
    "new_zeros",
)
AUTOCAST_QUERIES = ("is_autocast_enabled", "get_autocast_dtype", "is_autocast_available")
FUNCTIONS_OF_ONE_DEVICE = (
    "broadcast",
    "broadcast_coalesced",
    "reduce_add",
    "reduce_add_coalesced",
    "scatter",
    "gather",
)
CUDA_VERSION = "12.8"
CUDNN_VERSION = 91900
SAYS_WHAT_THERE_IS = ("is_available", "device_count", "current_accelerator")
# torch's own code that is to see the simulated accelerator; all other has none.
SEES_ACCELERATOR = ("torch.utils.data.",)


codes_of_patches: list[CodeType] = []


def attach() -> None:
    """Simulate GPUs in this process. Called once, after torch has been imported."""
    gpus = int(os.environ[SIMULATED_GPUS])
    answer = os.environ.get(SIMULATED_GPUS_AVAILABLE, "1")
    is_available = answer == "1" if answer else None
    functions = cuda.simulated_functions(gpus, is_available, name_cuda_version)
    patch_factories()
    patch_tensors()
    patch_devices()
    patch_cuda(functions)
    patch_accelerator(functions)
    patch_mixed_precision()
    if dist.is_available():
        patch_distributed()
    sys.meta_path.insert(0, AfterImport(LOADED_LATER))
    if PROBE_SETTINGS not in os.environ:
        devices.counter.print_at_exit()


def name_cuda_version() -> None:
    if torch.version.cuda is None:
        setattr(torch.version, "cuda", CUDA_VERSION)  # noqa: B010


def leave_uncompiled(eval_frame: ModuleType) -> None:
    """Keep torch.compile from compiling patches that are called between compiled parts."""
    for code in codes_of_patches:
        eval_frame.skip_code(code)


def replace(owner: Any, name: str, value: Any) -> None:
    """Replace what an owner has under a name, if it has something there."""
    if not hasattr(owner, name):
        return
    if isinstance(value, FunctionType):
        codes_of_patches.append(value.__code__)
    setattr(owner, name, value)


def wrap(owner: Any, name: str, around: Function) -> None:
    """Replace a function by a call of `around(original, *args, **kwargs)`, if the owner has it."""
    original = getattr(owner, name, None)
    if original is None:
        return
    if isinstance(around, FunctionType):
        codes_of_patches.append(around.__code__)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    replace(owner, name, wrapper)


def wrap_both(owner: Any, second_owner: Any, name: str, around: Function) -> None:
    """Wrap a function that two modules know. It stays one function: the probe looks for it."""
    wrap(owner, name, around)
    replace(second_owner, name, getattr(owner, name, None))


def wrap_collective(name: str, around: Function) -> None:
    wrap_both(c10d, dist, name, around)


def replace_all(owner: Any, functions: dict[str, Any]) -> None:
    for name, function in functions.items():
        replace(owner, name, function)


def patch_factories() -> None:
    # torch remembers the result, for its own factories are what device contexts look for.
    known = [factory.__name__ for factory in _device_constructors()]
    for name in (*known, *FURTHER_FACTORIES):
        patch_factory(name)
    for name in FACTORIES_OF_FFT:
        wrap(torch.fft, name, devices.make_on_cpu)
    for name in FACTORIES_OF_NESTED:
        wrap(torch.nested, name, devices.make_on_cpu)
    for name in FACTORIES_OF_TENSORS:
        wrap(torch.Tensor, name, devices.make_on_cpu)


def patch_factory(name: str) -> None:
    """Wrap a factory, which pickle and TorchScript still know as torch's own."""
    wrap(torch, name, devices.make_on_cpu)
    factory = getattr(torch, name, None)
    if factory is not None:
        as_torch(factory, name)
        operator = torch.jit._builtins._find_builtin(factory.__wrapped__)
        if operator is not None:
            torch.jit._builtins._register_builtin(factory, operator)


def patch_tensors() -> None:
    tensor = torch.Tensor
    wrap(tensor, "to", devices.move_to_cpu)
    wrap(tensor, "type", devices.name_cpu_type)
    replace(tensor, "cuda", devices.stay_on_cpu)
    replace(tensor, "pin_memory", devices.pin_memory)
    replace(tensor, "is_pinned", devices.is_pinned)
    replace(tensor, "record_stream", devices.record_stream)
    replace(torch.UntypedStorage, "cuda", devices.stay_on_cpu)
    replace(torch.TypedStorage, "cuda", devices.stay_on_cpu)
    wrap(torch.nn.Module, "to", devices.move_to_cpu)
    wrap(torch, "set_default_tensor_type", devices.name_cpu_type)
    wrap_both(torch.serialization, torch, "load", devices.load_to_cpu)


def patch_devices() -> None:
    replace(torch, "device", as_torch(devices.SimulatedDevice, "device"))
    replace(torch, "Generator", as_torch(devices.SimulatedGenerator, "Generator"))
    wrap(DeviceContext, "__init__", devices.move_to_cpu)
    # A build for CUDA would answer CUDA, also without a driver.
    replace(torch._C, "_get_accelerator", lambda check=None: devices.CPU_DEVICE)


def as_torch(stand_in: Any, name: str) -> Any:
    """Return a class or a function under the name by which pickle finds it."""
    setattr(stand_in, "__module__", "torch")  # noqa: B010
    setattr(stand_in, "__qualname__", name)  # noqa: B010
    return stand_in


def patch_cuda(functions: dict[str, Any]) -> None:
    simulated = functions | cuda.refused_functions(functions) | {"cudart": cuda.cudart}
    for owner in (torch.cuda, torch.cuda.memory, torch.cuda.random, torch.cuda.streams):
        replace_all(owner, simulated)
    replace(torch.cuda, "_lazy_init", refusal.raise_for_device_in_cpp)
    for name, of_module in cuda.functions_of_modules().items():
        replace_all(getattr(torch.cuda, name), of_module)
    for name in FUNCTIONS_OF_ONE_DEVICE:
        original = getattr(torch.nn.parallel.comm, name)
        refuse = refusal.make_unsupported_function(f"torch.cuda.comm.{name}", original)
        replace(torch.nn.parallel.comm, name, refuse)
    for name in torch.cuda.__all__:
        if name.endswith("Tensor"):
            replace(torch.cuda, name, getattr(torch, name, None))
    replace(torch, "Stream", functions["Stream"])
    replace(torch, "Event", functions["Event"])
    replace(torch.backends.cuda, "is_built", lambda: True)
    replace(torch.backends.cudnn, "is_available", lambda: True)
    replace(torch.backends.cudnn, "version", lambda: CUDNN_VERSION)
    # Such a profile has no figures of GPUs.
    of_cpu = {"use_cpu": True, "use_cuda": False, "use_device": None}
    wrap(torch.autograd.profiler.profile, "__init__", partial(replace_arguments, of_cpu))
    # DataParallel then has one device.
    replace(sys.modules["torch.nn.parallel.data_parallel"], "_get_available_device_type", no_device)


def no_device() -> None:
    """Stand in for a function that looks for devices, and find none."""


def patch_accelerator(cuda_functions: dict[str, Any]) -> None:
    """Replace torch.accelerator. Most of torch's own code must see that there is none.

    It would use devices that are not simulated.
    """
    for name, function in cuda.accelerator_functions(cuda_functions).items():
        if name in SAYS_WHAT_THERE_IS:
            wrap(torch.accelerator, name, partial(unless_called_by_torch, function))
        else:
            replace(torch.accelerator, name, cuda.forward_to(function))


def unless_called_by_torch(
    function: Function, original: Function, *args: Any, **kwargs: Any
) -> Any:
    """Call the original for torch's own code, and the other function for scripts."""
    caller = sys._getframe(2).f_globals.get("__name__", "")  # around the wrapper
    is_torch = caller.startswith("torch.") and not caller.startswith(SEES_ACCELERATOR)
    return original(*args, **kwargs) if is_torch else function(*args, **kwargs)


def patch_mixed_precision() -> None:
    wrap(torch.amp.autocast, "__init__", mixed_precision.autocast_on_cpu)
    wrap(torch.amp.GradScaler, "__init__", mixed_precision.scale_by_one)
    for name in AUTOCAST_QUERIES:
        wrap(torch, name, mixed_precision.ask_for_cpu)
    wrap(torch.amp, "is_autocast_available", mixed_precision.ask_for_cpu)
    replace(torch, "get_autocast_gpu_dtype", torch.get_autocast_dtype)
    for name in ("custom_fwd", "custom_bwd"):
        wrap(torch.amp, name, devices.with_cpu_type)
    for name in ("set_autocast_enabled", "set_autocast_dtype"):
        wrap(torch, name, devices.with_cpu_type)


def patch_distributed() -> None:
    for name in ("init_process_group", "new_group"):
        wrap_collective(name, collectives.with_gloo)
    for name in collectives.COMPARED_BY_SHAPE:
        wrap_collective(name, collectives.compare_by_count)
    wrap_collective("all_gather", collectives.gather_unequal)
    wrap_collective("all_to_all", collectives.exchange_lists)
    wrap_collective("all_reduce", collectives.reduce_to_mean)
    wrap_collective("barrier", collectives.without_device_ids)
    for owner in (c10d, dist):
        replace(owner, "split_group", collectives.split_group)
    replace(dist, "is_nccl_available", lambda: True)
    for owner in (dist, c10d):
        if not hasattr(owner, "ProcessGroupNCCL"):
            setattr(owner, "ProcessGroupNCCL", collectives.ProcessGroupNCCL)  # noqa: B010
    wrap_both(dist.device_mesh, dist, "init_device_mesh", devices.with_cpu_type)
    wrap(dist.device_mesh.DeviceMesh, "__init__", devices.with_cpu_type)
    synchronize_on_cpus()
    without_devices = {"device_ids": None, "output_device": None}
    wrap(DistributedDataParallel, "__init__", partial(replace_arguments, without_devices))


def patch_fsdp(module: ModuleType) -> None:
    on_cpu = {"device_id": devices.CPU_DEVICE}
    wrap(module.FullyShardedDataParallel, "__init__", partial(replace_arguments, on_cpu))


LOADED_LATER: dict[str, Callable[[Any], None]] = {
    "torch._dynamo.eval_frame": leave_uncompiled,
    "torch.distributed.fsdp.fully_sharded_data_parallel": patch_fsdp,
}
