"""Hooks that record by which names a script knows its models, loaders, optimizers and schedules."""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from types import FrameType
from typing import Any

import torch
from torch import nn, optim
from torch.nn.modules.module import register_module_forward_hook
from torch.optim import optimizer as optimizers

from stepladder.tools.check.events import (
    OBJECT_OF,
    CarriedState,
    CoupledSamples,
    NamesInUse,
    NamesWhereBuilt,
    RowNames,
)
from stepladder.tools.check.probe import digests, hooks_data, hooks_model, hooks_train
from stepladder.tools.check.probe.coupled_samples import find_coupled
from stepladder.tools.check.probe.patching import WrappedCall, default_on_error, wrap
from stepladder.tools.check.probe.probe_log import current_log, record
from stepladder.tools.probe.events import CodeLine

MAX_FRAMES = 8

# By the id of a module, what it has returned: kept, so that no other tensor gets its memory.
returned: dict[int, dict[int, torch.Tensor]] = {}
WATCHED_LOSSES = 8
MAX_OUTPUTS = 16  # that wait for a loss: an evaluation has none
# By the id of a module that is called: the rows of the call, its line, and what records them once.
row_recorders: dict[int, tuple[int, CodeLine, Callable[[], None] | None]] = {}
# What models have returned since the last backward pass, and the line, by the number of samples.
outputs_of_step: dict[int, deque[tuple[torch.Tensor, CodeLine]]] = {}
watched = Counter[str]()
schedules: dict[int, object] = {}  # by their ids
recorded: set[tuple[int, str, int]] = set()  # the id of an object, the file and the line of its use


def attach() -> None:
    """Attach before the hooks whose functions are wrapped here."""
    wrap(hooks_data, "record_pass", partial(record_owner, "loader"))
    wrap(hooks_model, "record_forward", record_model)
    wrap(hooks_train, "record_schedule_step", record_schedule)
    wrap(hooks_train, "record_backward", watch_loss)
    wrap(optim.Optimizer, "__init__", record_models_beside)
    wrap(torch.amp.GradScaler, "update", record_scaler)
    optimizers.register_optimizer_step_pre_hook(record_step)
    register_module_forward_hook(record_carried, always_call=False)
    register_module_forward_hook(watch_output, always_call=False)


def record_owner(what: str, hook: WrappedCall) -> Any:
    """Record the names of the object whose method a hook was called with."""
    record_names(what, hook.args[0].args[0])
    return hook.run()


def record_schedule(hook: WrappedCall) -> Any:
    schedules[id(hook.args[0].args[0])] = hook.args[0].args[0]
    return record_owner("schedule", hook)


def record_step(optimizer: optim.Optimizer, *_: object) -> None:
    """Record the names of an optimizer, and those of schedules, whose next step may be far."""
    record_names("optimizer", optimizer)
    for schedule in schedules.values():
        record_names("schedule", schedule)


def record_scaler(call: WrappedCall) -> Any:
    record_names("scaler", call.args[0])
    return call.run()


def record_model(hook: WrappedCall) -> Any:
    record_names("model", hook.args[0])
    if torch.is_grad_enabled():
        record_rows(hook.args[0], digests.row_count(list(hook.args[1:])))
    return hook.run()


def record_rows(module: nn.Module, count: int) -> None:
    """Keep which variables of a function have as many rows as the input of its model.

    Record the random generators that functions have then, and the objects of the user's classes.
    """
    for frame in islice(user_frames(), 1):
        line = current_log().line_of(frame)
        row_recorders[id(module)] = count, line, None
        if (key := (count, line.file, line.line)) not in recorded:
            recorded.add(key)
            names = [name for name, value in frame.f_locals.items() if has_rows(value, count)]
            event = RowNames(names=names, count=count)
            record_call = partial(current_log().write, event, line)
            row_recorders[id(module)] = count, line, record_call
            for value in (value for each in user_frames() for _, value in named(each)):
                if digests.generator_state(value):
                    record_names("generator", value)
                elif is_of_user(type(value)):
                    record_names(f"{OBJECT_OF}{type(value).__name__}", value)


def is_of_user(kind: type) -> bool:
    """Return whether a class is defined in the user's code."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return file is not None and current_log().is_user_file(file)


def watch_output(module: nn.Module, args: Any, output: Any) -> None:
    """Record the rows of a call once a gradient comes to its output: other calls train nothing."""
    if id(module) not in row_recorders:
        return
    count, line, record_call = row_recorders.pop(id(module))
    if not any(item.requires_grad for item in module.parameters()):
        return
    for tensor in by_memory(output).values():
        if tensor.requires_grad and watched["losses"] < WATCHED_LOSSES:
            outputs = outputs_of_step.setdefault(count, deque(maxlen=MAX_OUTPUTS))
            outputs.append((tensor, line))
        if tensor.requires_grad and record_call:
            tensor.register_hook(lambda _, record_call=record_call: record_call())


def watch_loss(call: WrappedCall) -> Any:
    """Record whether a loss compares the samples of a batch with each other."""
    loss = call.args[0].argument(0, "tensors")
    for count, outputs in outputs_of_step.items():
        if isinstance(loss, torch.Tensor):
            indices = find_coupled(loss, [tensor for tensor, _ in outputs], count)
            calls = [[line.file, line.line] for _, line in (outputs[index] for index in indices)]
            if calls:
                record(CoupledSamples(calls=calls))
    outputs_of_step.clear()
    watched["losses"] += 1
    return call.run()


@default_on_error(bool)
def has_rows(value: Any, count: int) -> bool:
    """Return whether a value is, or holds, tensors, arrays and lists of a number of rows.

    What a model has computed is no batch that a script cuts.
    """
    if isinstance(value, dict | list | tuple) and len(value) != count:
        parts = value.values() if isinstance(value, dict) else value
        return bool(value) and all(has_rows(part, count) for part in parts)
    is_array = bool(getattr(value, "shape", ())) and not getattr(value, "grad_fn", None)
    return (is_array or isinstance(value, list)) and len(value) == count


def record_names(what: str, value: object) -> None:
    """Record the names that functions of the user's code have for an object, once for each use."""
    frames = list(user_frames())
    line = current_log().line_of(frames[0]) if frames else None
    key = (id(value), line.file if line else "", line.line if line else 0)
    if key in recorded:
        return
    recorded.add(key)
    uses = [(*current_log().line_of(frame), name_in(frame, value)) for frame in frames]
    current_log().write(NamesInUse(what=what, object=id(value), uses=uses), line)


def record_models_beside(call: WrappedCall) -> Any:
    """Record the names of models in the functions that run where an optimizer is made."""
    places = [(*current_log().line_of(frame), models_in(frame)) for frame in user_frames()]
    current_log().write(NamesWhereBuilt(places=places))
    return call.run()


def models_in(frame: FrameType) -> list[tuple[str, int, list[int]]]:
    """Return the name of each model that a function knows, its id and those of its parts."""
    return [
        (name, id(value), [id(part) for part in value.modules()][1:])
        for name, value in named(frame)
        if isinstance(value, nn.Module)
    ]


def record_carried(module: nn.Module, args: Any, output: Any) -> None:
    """Record that a module gets what it has returned in another step, where gradients end."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return
    inputs = by_memory(args)
    earlier = returned.get(id(module), {})
    if any(key in earlier and not value.requires_grad for key, value in inputs.items()):
        current_log().write(CarriedState(), current_log().user_line())
    outputs = by_memory(output)
    returned[id(module)] = {key: outputs[key].detach() for key in outputs.keys() - inputs.keys()}


def by_memory(value: Any) -> dict[int, torch.Tensor]:
    tensors = [each for each in digests.leaves(value) if isinstance(each, torch.Tensor)]
    return {each.untyped_storage().data_ptr(): each for each in tensors if each.numel()}


def user_frames() -> Iterator[FrameType]:
    """Yield the innermost frames of the user's code, from the innermost one outwards."""
    return islice(current_log().user_frames(), MAX_FRAMES)


def named(frame: FrameType) -> Iterator[tuple[str, object]]:
    """Yield what a function can name: its variables, attributes of `self`, and globals."""
    yield from frame.f_locals.items()
    attributes = getattr(frame.f_locals.get("self"), "__dict__", {})
    for name, value in attributes.items():
        yield f"self.{name}", value
    for name, value in attributes.get("_modules", {}).items():
        yield f"self.{name}", value
    yield from frame.f_globals.items()


def name_in(frame: FrameType, value: object) -> str:
    return next((name for name, matches in named(frame) if matches is value), "")
