"""Backward passes, optimizer steps and schedules: losses, gradients and weights as hashes by name."""

from __future__ import annotations

import sys
import time
import weakref
from types import FrameType
from typing import Any

import torch
from torch.optim import lr_scheduler
from torch.optim import optimizer as optimizers

from stepladder.tools.check.probe import digests
from stepladder.tools.check.probe.hooks_data import Counts, Stopped
from stepladder.tools.check.probe.hooks_model import Roots, name_of
from stepladder.tools.check.probe.loss import activation_of, scale_of
from stepladder.tools.check.probe.patching import careful, wrap
from stepladder.tools.check.probe.recorder import here

ALL, EACH = 24, 16  # the first steps are looked at whole, later ones now and then


class Train:
    """Of this process: optimizers by number, whether their gradients were clean, graphs that are
    alive.
    """

    optimizers: dict[int, Any] = {}  # noqa: RUF012
    clean: dict[int, bool] = {}  # noqa: RUF012
    steps: dict[int, int] = {}  # noqa: RUF012
    graphs: list[Any] = []  # noqa: RUF012
    backed: set[int] = set()  # noqa: RUF012  # optimizers with a backward pass since their last step
    in_schedule = 0
    grades = 0  # calls of torch.autograd.grad
    stop_next = False  # a snapshot is written, and the run is to end before it goes on


STEP_CODE = optimizers.Optimizer.profile_hook_step(
    lambda: None
).__code__  # runs around each optimizer's step


class GraphMark:
    """Lives as long as the graph of one loss."""


def attach() -> None:
    wrap(torch.autograd, "backward", backward)
    wrap(torch.autograd, "grad", graded)
    optimizers.register_optimizer_step_pre_hook(lambda optimizer, *_: before_step(optimizer))
    optimizers.register_optimizer_step_post_hook(lambda optimizer, *_: after_step(optimizer))
    wrap(optimizers.Optimizer, "zero_grad", zeroed)
    wrap(torch.nn.utils, "clip_grad_norm_", clipped)
    for cls in vars(lr_scheduler).copy().values():
        if (
            isinstance(cls, type)
            and issubclass(cls, lr_scheduler.LRScheduler)
            and "step" in vars(cls)
        ):
            wrap(cls, "step", scheduled)
    wrap(lr_scheduler.LRScheduler, "_initial_step", initial)
    wrap(lr_scheduler.ReduceLROnPlateau, "__init__", initial)


def clipped(original: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    here().at("clip", ptrs=[p.grad.data_ptr() for p in parameters if p.grad is not None][:8])
    return original(parameters, *args, **kwargs)


def number_of(optimizer: Any) -> int:
    for number, known in Train.optimizers.items():
        if known is optimizer:
            return number
    number = len(Train.optimizers)
    Train.optimizers[number] = optimizer
    return number


def parameters_of(optimizer: Any) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def zeroed(original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    here().at("zero", optimizer=number_of(optimizer))
    return original(optimizer, *args, **kwargs)


def backward(original: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
    loss = tensors[0] if isinstance(tensors, (list, tuple)) else tensors
    for number, optimizer in Train.optimizers.items():
        if not Train.clean.get(number) and all(is_clean(p) for p in parameters_of(optimizer)):
            Train.clean[number] = True
    halt_where_asked()
    Train.backed = set(Train.optimizers)
    fields: dict[str, Any] = {"alive": alive_after(loss), **scale_of(loss)}
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        fields["loss"] = float(loss.detach()) + 0.0
        fields["twice"] = activation_of(loss)
    here().at("backward", **fields)
    done = original(tensors, *args, **kwargs)
    here().write("backed")
    return done


def graded(original: Any, *args: Any, **kwargs: Any) -> Any:
    """A script that takes gradients as values, by torch.autograd.grad or torch.func, and steps by
    hand.
    """
    Train.grades += 1
    if Train.grades <= ALL:
        here().at("graded")
    return original(*args, **kwargs)


def halt_where_asked() -> None:
    """After a snapshot: wait to be ended, before anything more is trained."""
    if Train.stop_next:
        here().write("halt")
        while True:
            time.sleep(1)


def is_clean(parameter: Any) -> bool:
    return parameter.grad is None or not bool(parameter.grad.any())


def alive_after(loss: Any) -> int:
    """How many graphs of losses before this one are still held."""
    Train.graphs = [graph for graph in Train.graphs if graph() is not None]
    count = len(Train.graphs)
    node = getattr(loss, "grad_fn", None)
    if node is not None:
        mark = GraphMark()
        node.metadata["stepladder"] = mark
        Train.graphs.append(weakref.ref(mark))
    return count


def looked_at(step: int) -> bool:
    return step <= ALL or step % EACH == 0


def is_part_of_a_step() -> bool:
    """Return whether this step is a part of another optimizer's, as that of
    ZeroRedundancyOptimizer's local one.

    Only the outer step is recorded: it counts once, and it has all parameters.
    """
    steps = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        steps += frame.f_code is STEP_CODE
        frame = frame.f_back
    return steps > 1


def before_step(optimizer: Any) -> None:
    if is_part_of_a_step():
        return
    recorder, number = here(), number_of(optimizer)
    step = Train.steps[number] = Train.steps.get(number, 0) + 1
    settings = recorder.settings
    parameters = parameters_of(optimizer)
    if settings.steps and not Counts.passes and step > settings.steps * max(settings.epochs, 1):
        raise Stopped(0)
    if not looked_at(step):
        return
    fields: dict[str, Any] = {
        "optimizer": number,
        "step": step,
        "clean": Train.clean.get(number, step == 1) or number not in Train.backed,
    }
    named = {name_of(p) or f"#{place}": p for place, p in enumerate(parameters)}
    fields["grads"] = {
        name: digests.digest(p.grad) for name, p in named.items() if p.grad is not None
    }
    fields["norm"] = norm_of(parameters)
    fields["ptrs"] = [p.grad.data_ptr() for p in parameters if p.grad is not None][:8]
    fields["before"] = {name: digests.digest(p) for name, p in named.items()}
    fields["ids"] = {name: id(p) for name, p in named.items()}
    fields["frozen_names"] = [name for name, p in named.items() if not p.requires_grad]
    recorder.at("prestep", **fields)


def norm_of(parameters: list[Any]) -> float:
    grads = [
        p.grad.detach().float() for p in parameters if p.grad is not None and not p.grad.is_sparse
    ]
    return float(sum(float(g.square().sum()) for g in grads) ** 0.5)


def after_step(optimizer: Any) -> None:
    if is_part_of_a_step():
        return
    recorder, number = here(), number_of(optimizer)
    Train.clean[number] = False
    Train.backed.discard(number)
    step = Train.steps.get(number, 1)
    Counts.steps += 1
    parameters = parameters_of(optimizer)
    fields: dict[str, Any] = {"optimizer": number, "step": step, "class": type(optimizer).__name__}
    fields["lr"] = [float(group.get("lr", 0.0)) for group in optimizer.param_groups]
    fields["numel"] = sum(p.numel() for p in parameters)
    fields["frozen"] = sum(not p.requires_grad for p in parameters)
    if looked_at(step):
        named = {name_of(p) or f"#{place}": p for place, p in enumerate(parameters)}
        fields["after"] = {name: digests.digest(p) for name, p in named.items()}
        fields["state"] = {name: state_of(optimizer.state.get(p)) for name, p in named.items()}
        fields["buffers"] = buffers()
        fields["shapes"] = [list(p.shape) for p in parameters]
        fields |= left_out(parameters)
    recorder.at("step", **fields)


@careful(dict)
def buffers() -> dict[str, str]:
    """Hashes of the buffers of all models that were called."""
    named = (pair for root in list(Roots.seen.values()) for pair in root.named_buffers())
    return {name: digests.digest(buffer) for name, buffer in named}


@careful(lambda: {"unheld": [], "strangers": 0, "held": 0})
def left_out(parameters: list[Any]) -> dict[str, Any]:
    """Parameters with a gradient that this optimizer does not have, and its own that no called
    model has.
    """
    of_models = {id(p): name_of(p) for root in list(Roots.seen.values()) for p in root.parameters()}
    own = {id(p) for p in parameters}
    others = {id(p) for optimizer in Train.optimizers.values() for p in parameters_of(optimizer)}
    graded = [
        of_models[id(p)]
        for root in list(Roots.seen.values())
        for p in root.parameters()
        if p.requires_grad and p.grad is not None and id(p) not in own | others
    ]
    strangers = [
        place for place, p in enumerate(parameters) if id(p) not in of_models and p.grad is None
    ]
    return {"unheld": sorted(set(graded)), "strangers": len(strangers), "held": len(parameters)}


def state_of(state: Any) -> str:
    tensors = [value for value in (state or {}).values() if isinstance(value, torch.Tensor)]
    return "".join(digests.digest(tensor)[:6] for tensor in tensors)


def initial(original: Any, *args: Any, **kwargs: Any) -> Any:
    Train.in_schedule += 1
    try:
        return original(*args, **kwargs)
    finally:
        Train.in_schedule -= 1


def scheduled(original: Any, schedule: Any, *args: Any, **kwargs: Any) -> Any:
    if not Train.in_schedule:
        about = {
            "cls": type(schedule).__name__,
            "horizon": horizon(schedule),
            "direct": here().direct(),
        }
        here().at("sched", schedule=id(schedule), **about)
    Train.in_schedule += 1
    try:
        return original(schedule, *args, **kwargs)
    finally:
        Train.in_schedule -= 1


def horizon(schedule: Any) -> int | None:
    """After how many steps it is at its end."""
    for name in ("T_max", "total_steps", "total_iters"):
        if isinstance(value := getattr(schedule, name, None), int):
            return value
    return None
