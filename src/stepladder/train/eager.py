"""torch.optim without torch.compile's tracer, for as long as a job compiles nothing.

torch (2.11 and 2.13, by their source) imports torch._dynamo where an optimizer is built and where it steps, to
tell the tracer what not to trace. That takes 70 MB and as long as torch itself, in a process that traces nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch

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

    torch wraps them in a function that keeps the method to call in this attribute, once the tracer has made it.
    """
    for method in vars(torch.optim.Optimizer).values():
        written = getattr(method, "__wrapped__", None)
        if written is not None:
            vars(written).setdefault("__dynamo_disable", written)


@contextmanager
def step_untraced() -> Iterator[None]:
    """An optimizer's step in here imports no tracer. Costs a microsecond; nothing where the tracer is loaded."""
    if TRACER in sys.modules:
        yield
        return
    sys.modules[TRACER] = torch._dynamo = STAND_IN
    try:
        yield
    finally:
        _leave(STAND_IN)


def _leave(stand_in: NoTracer) -> None:
    if sys.modules.get(TRACER) is stand_in:
        del sys.modules[TRACER], torch._dynamo
