"""torch.optim without torch.compile's tracer, for as long as a job compiles nothing; backward
without questions.

torch (2.11 and 2.13, by their source) imports torch._dynamo where an optimizer is built and where
it steps, to tell the tracer what not to trace. That takes 70 MB and as long as torch itself, in a
process that traces nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import unwrap
from types import ModuleType

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks as POST_HOOKS
from torch.optim.optimizer import _global_optimizer_pre_hooks as PRE_HOOKS

TRACER = "torch._dynamo"


class NoTracer(ModuleType):
    """Stands for torch._dynamo during an optimizer's step, which asks it for nothing else."""

    @staticmethod
    def graph_break() -> None:
        """There is no graph."""

    def __getattr__(self, name: str) -> object:
        """Of another torch, or an optimizer that compiles itself: they get the tracer."""
        _leave(self)
        __import__(TRACER)
        return getattr(sys.modules[TRACER], name)


STAND_IN = NoTracer(TRACER)


def build_untraced() -> None:
    """To be called before an optimizer is built: its methods are then called as they are written.

    torch wraps them in a function that keeps the method to call in this attribute, once the tracer
    has made it."""
    for method in vars(torch.optim.Optimizer).values():
        written = getattr(method, "__wrapped__", None)
        if written is not None:
            vars(written).setdefault("__dynamo_disable", written)


@contextmanager
def step_untraced() -> Iterator[None]:
    """An optimizer's step in here imports no tracer. Costs a microsecond; nothing where the tracer
    is loaded.
    """
    if TRACER in sys.modules:
        yield
        return
    sys.modules[TRACER] = torch._dynamo = STAND_IN
    try:
        yield
    finally:
        _leave(STAND_IN)


WRITTEN_IN = sys.modules["torch.optim.optimizer"].__file__
ENGINE = torch.autograd.Variable._execution_engine
ASKING = torch.autograd.backward
ONE = torch.ones(())


def is_written_in(file: str | None, function: object) -> bool:
    """Whether it is torch's own. Else somebody has wrapped it, to look on."""
    return getattr(getattr(function, "__code__", None), "co_filename", "") == file


IS_TORCHS = is_written_in(torch.autograd.__file__, ASKING)


def backward(loss: torch.Tensor, gradient: torch.Tensor = ONE) -> None:
    """As `(loss * gradient).backward()`, both of shape (): on the CPU 13 us less, and a product
    less.
    """
    if IS_TORCHS and loss.is_cpu and torch.autograd.backward is ASKING:
        ENGINE.run_backward(
            (loss,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True
        )
    else:  # a gradient given to it would load sympy, 0.3 s
        (loss if gradient is ONE else loss * gradient).backward()


def step_of(optimizer: torch.optim.Optimizer) -> Callable[[torch.optim.Optimizer], object]:
    """The class's step as it is written, for an optimizer that nobody looks at. 12 us less.

    torch wraps it in a range for its profiler, hooks, and a switch for gradients, which has to be
    off."""
    step: Callable[[torch.optim.Optimizer], object] = unwrap(type(optimizer).step)
    return step


def is_seen(optimizer: torch.optim.Optimizer) -> bool:
    """Whether somebody looks on while it steps: by a hook, or in the place of its step."""
    hooks = (
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or PRE_HOOKS
        or POST_HOOKS
    )
    if hooks or not is_written_in(WRITTEN_IN, type(optimizer).step):
        return True
    own = vars(optimizer).get("step")  # a schedule's counts steps only
    return own is not None and not hasattr(own, "_wrapped_by_lr_sched")


def _leave(stand_in: NoTracer) -> None:
    if sys.modules.get(TRACER) is stand_in:
        del sys.modules[TRACER], torch._dynamo
