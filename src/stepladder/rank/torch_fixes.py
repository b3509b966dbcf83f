"""Changes to torch that a training needs, and every private name of torch that this package uses.

torch is imported inside the functions, so that a process without torch can import this module. Each
entry says why it is needed, with which versions of torch it was seen, and when it can be removed.
The patches of `check`'s probe and its simulated CUDA are in tools/check.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from inspect import unwrap
from types import ModuleType
from typing import TYPE_CHECKING, Any

from stepladder_exchange.after_import import call_after_import
from stepladder_exchange.torch_fixes_gloo import wait_for_gloo

if TYPE_CHECKING:
    import torch
    from torch._dynamo.exc import FailOnRecompileLimitHit as FailOnRecompileLimitHit
    from torch._dynamo.exc import TorchDynamoException as TorchDynamoException
    from torch._inductor.cpp_builder import get_cpp_compiler as get_cpp_compiler
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore as FakeStore
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
    from torch.utils._pytree import tree_leaves as tree_leaves
    from torch.utils._pytree import tree_map as tree_map
    from torch.utils._pytree import tree_map_only as tree_map_only

DYNAMO = "torch._dynamo"
# Modules by which ranks exchange tensors without torch.distributed.
OTHER_EXCHANGES = {"mpi4py.MPI", "horovod.torch", "byteps.torch"}

# Names that other modules import from here, each with the private module of torch that defines it.
# All exist in torch 2.11 to 2.15. An entry can go when torch has a public name for it.
PRIVATE_NAMES = {
    # --compile: what torch.compile raises, and the C++ compiler that it starts.
    "FailOnRecompileLimitHit": "torch._dynamo.exc",
    "TorchDynamoException": "torch._dynamo.exc",
    "get_cpp_compiler": "torch._inductor.cpp_builder",
    # --dry-run: tensors without storage, a process group whose other ranks do not exist, and a
    # callback for every operation, which counts the bytes of its results.
    "FakeTensor": "torch._subclasses.fake_tensor",
    "FakeTensorMode": "torch._subclasses.fake_tensor",
    "FakeStore": "torch.testing._internal.distributed.fake_pg",
    "TorchDispatchMode": "torch.utils._python_dispatch",
    # A batch is any nest of lists, tuples and dicts of tensors.
    "tree_leaves": "torch.utils._pytree",
    "tree_map": "torch.utils._pytree",
    "tree_map_only": "torch.utils._pytree",
}


def __getattr__(name: str) -> Any:
    """Import one of PRIVATE_NAMES when another module asks for it."""
    if name not in PRIVATE_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(PRIVATE_NAMES[name]), name)


# Training without torch._dynamo.
#
# torch imports torch._dynamo, the tracer of torch.compile, when an optimizer is built or steps, and
# in DistributedDataParallel, to tell the tracer what not to trace. The import takes 70 MB and as
# long as importing torch itself, in a process that compiles nothing. Seen in the source of torch
# 2.11 to 2.15. This can go when torch no longer does so.


class _ModuleStandIn(ModuleType):
    """A module of which a program needs a few names; any other name imports the real ones."""

    def __getattr__(self, name: str) -> object:
        _remove_stand_in()
        return getattr(import_module(self.__name__), name)


class _DynamoStandIn(_ModuleStandIn):
    """The part of torch._dynamo that a training calls while nothing is traced."""

    def __init__(self) -> None:
        super().__init__(DYNAMO)
        self.__spec__ = find_spec(DYNAMO)
        # Python's inspect asks every module for it.
        self.__file__ = None
        # The functions that torch takes for untraced ones, and does not ask for again.
        self.untraced: list[Callable[..., object]] = []
        self.utils = _ModuleStandIn(f"{DYNAMO}.utils")
        vars(self.utils)["get_optimize_ddp_mode"] = lambda: "ddp_optimizer"
        self.trace_rules = _ModuleStandIn(f"{DYNAMO}.trace_rules")
        vars(self.trace_rules)["clear_lru_cache"] = lambda: None

    @staticmethod
    def graph_break() -> None:
        """Do nothing: no graph is being traced."""

    def disable(self, *args: Any, **options: Any) -> object:
        """Return a function of torch's own as it is. A script that asks gets the real answer."""
        if options != {"wrapping": False}:
            return self.__getattr__("disable")(*args, **options)  # type: ignore[operator]
        self.untraced.append(args[0])
        return args[0]


def defer_dynamo() -> None:
    """Keep torch from importing torch._dynamo until something needs its tracer."""
    if DYNAMO not in sys.modules:
        sys.modules[DYNAMO] = sys.modules["torch"]._dynamo = _DynamoStandIn()  # type: ignore[attr-defined]


def _remove_stand_in() -> None:
    stand_in = sys.modules.get(DYNAMO)
    if isinstance(stand_in, _DynamoStandIn):
        del sys.modules[DYNAMO]
        del sys.modules["torch"]._dynamo
        for function in stand_in.untraced:
            vars(function).pop("__dynamo_disable", None)


# Backward and the optimizer's step without torch's wrappers.
#
# For a small model on a CPU the wrappers take longer than the arithmetic. They are used all the
# same when another program has wrapped or hooked the function, to observe it. Seen with torch 2.11
# to 2.15. These can go when the wrappers cost below a microsecond.


def make_backward() -> Callable[..., None]:
    """Return `backward(loss, gradient)`, which does what `(loss * gradient).backward()` does.

    Both are tensors of shape (); the gradient is 1 by default. On a CPU the function calls the
    autograd engine directly, which saves 13 us and the multiplication.
    """
    import torch

    engine = torch.autograd.Variable._execution_engine
    public_backward = torch.autograd.backward
    is_unwrapped = _is_defined_in(torch.autograd.__file__, public_backward)
    unit_gradient = torch.ones(())

    def backward(loss: torch.Tensor, gradient: torch.Tensor = unit_gradient) -> None:
        if is_unwrapped and loss.is_cpu and torch.autograd.backward is public_backward:
            engine.run_backward(
                (loss,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True
            )
        elif gradient is unit_gradient:
            loss.backward()
        else:  # not loss.backward(gradient): that imports sympy, which takes 0.3 s
            (loss * gradient).backward()

    return backward


class BareStep:
    """The step of a torch optimizer without its wrapper, for as long as nothing observes the step.

    The wrapper opens a range for torch's profiler, calls hooks and switches gradients off. Without
    it a step takes 12 us less. The caller must switch gradients off.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        from torch.optim import optimizer as defining_module

        self._optimizer: Any = optimizer
        self._step: Callable[[Any], object] = unwrap(type(optimizer).step)
        self._file = defining_module.__file__
        self._global_pre_hooks = defining_module._global_optimizer_pre_hooks
        self._global_post_hooks = defining_module._global_optimizer_post_hooks

    @property
    def is_observed(self) -> bool:
        """Whether a hook, or a function in place of `step`, wants to see this optimizer's steps."""
        optimizer = self._optimizer
        has_hooks = (
            optimizer._optimizer_step_pre_hooks
            or optimizer._optimizer_step_post_hooks
            or self._global_pre_hooks
            or self._global_post_hooks
        )
        if has_hooks or not _is_defined_in(self._file, type(optimizer).step):
            return True
        replacement = vars(optimizer).get("step")
        # A learning-rate schedule replaces `step` too, but only to count the steps.
        return replacement is not None and not hasattr(replacement, "_wrapped_by_lr_sched")

    def __call__(self) -> None:
        """Step the optimizer, without hooks, and with gradients as the caller has set them."""
        # Without this mark a learning-rate schedule warns that it is stepped before the optimizer.
        self._optimizer._opt_called = True
        self._step(self._optimizer)


def _is_defined_in(file: str | None, function: object) -> bool:
    """Tell whether a function is torch's own, and no wrapper from another file."""
    return getattr(getattr(function, "__code__", None), "co_filename", "") == file


# The first step of an optimizer.


def call_at_separate_step(
    may_form_group: Callable[[], bool], callback: Callable[[], object]
) -> None:
    """Call a function before the first optimizer step, if this process is in no process group then.

    torch's hook of all optimizers tells of the step. A process that communicates by MPI or Horovod,
    or that calls functions of other processes by RPC, needs no group.

    Args:
        may_form_group: Whether the process may yet form a group; then its second step counts.
        callback: The function, which ends the process.
    """
    steps = 0

    def add_hook(optimizers: Any) -> None:
        def before_step(*_: object) -> None:
            nonlocal steps
            steps += 1
            if _is_alone():
                if steps > 1 or not may_form_group():
                    callback()
            # torch iterates over the hooks meanwhile, so that only the last one may go.
            elif next(reversed(hooks)) == handle.id:
                handle.remove()

        hooks = optimizers._global_optimizer_pre_hooks
        handle = optimizers.register_optimizer_step_pre_hook(before_step)

    call_after_import("torch.optim.optimizer", add_hook)


def _is_alone() -> bool:
    import torch.distributed as dist

    if sys.modules.keys() & OTHER_EXCHANGES:
        return False
    rpc: Any = sys.modules.get("torch.distributed.rpc")
    has_rpc = rpc is not None and dist.is_available() and rpc._is_current_rpc_agent_set()
    has_group = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return not has_rpc and not has_group


# The end of a group of gloo; see stepladder_exchange/torch_fixes_gloo.py.


def wait_for_gloo_before_destroy() -> None:
    """Make `destroy_process_group` wait until gloo's threads are idle, in this process from now on.

    A process that frees the last model of a destroyed group joins the group's threads with the GIL
    held.
    """
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    destroy = getattr(c10d, "destroy_process_group", None)
    if destroy is None or hasattr(destroy, "__wrapped__"):
        return  # torch is not loaded, or is patched already

    @wraps(destroy)
    def wait_and_destroy(*args: Any, **options: Any) -> None:
        wait_for_gloo()
        destroy(*args, **options)

    for module in (c10d, sys.modules["torch.distributed"]):
        vars(module)["destroy_process_group"] = wait_and_destroy


# Functions and settings that torch does not make public. Seen with torch 2.11 to 2.15; each can go
# when torch has a public name for it.


def set_group_timeout(timeout: timedelta) -> None:
    """Set the timeout of later collectives of the default process group."""
    import torch.distributed as dist

    dist.distributed_c10d._set_pg_timeout(timeout)


def abort_process_group() -> None:
    """Abort the default process group, also if its NCCL kernels wait for a lost rank for ever."""
    import torch.distributed as dist

    dist.distributed_c10d._abort_process_group()


def get_host_backend() -> Any:
    """Return the back end of the default group for tensors in the host's memory."""
    import torch
    import torch.distributed as dist

    return dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))


def find_collective_device() -> str:
    """Return the type of device whose tensors the default group exchanges; the CPU if it can."""
    import torch.distributed as dist

    return dist.distributed_c10d._get_object_coll_device()


def get_default_store() -> Any:
    """Return the store through which the ranks of the default process group have met."""
    import torch.distributed as dist

    return dist.distributed_c10d._get_default_store()


def stop_rendezvous_heartbeats(handler: Any) -> None:
    """Leave torchelastic's rendezvous; `shutdown` would close it for the other nodes."""
    handler._stop_heartbeats()


def get_dynamo_config() -> Any:
    """Return the settings of torch.compile's tracer, such as its limit of shapes per function."""
    return import_module("torch._dynamo.config")


def count_memory_users(tensor: torch.Tensor) -> int:
    """Return how many tensors torch knows in the memory of a tensor, this one among them."""
    import torch

    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def share_storage(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Tell whether two tensors have one storage; fake tensors have one too, but no address."""
    return bool(first.untyped_storage()._cdata == second.untyped_storage()._cdata)


def get_loader_workers(batches: Any) -> Any:
    """Return the list of the worker processes of a DataLoader's iterator."""
    return batches._workers


def shut_down_loader_workers(batches: Any) -> None:
    """End the worker processes of a DataLoader's iterator before the iterator is freed."""
    batches._shutdown_workers()
