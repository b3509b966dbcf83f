"""A check that a step changes nothing of an optimizer or a schedule that no snapshot would have.

torch's own classes keep their state where `state_dict` finds it. A class of the user's may keep a
counter or its moments in attributes: its own, or those of weights and layers. Its methods, the
function of a LambdaLR, or a hook may change a variable, or an attribute of an object that they
reach. What lies in memory twice, a snapshot makes two of.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from stepladder.core.errors import InputError
from stepladder.rank.torch_fixes import BareStep
from stepladder.train.fingerprints import count_writes
from stepladder.train.job import Job
from stepladder.train.optimizers import is_from_torch, list_optimizers
from stepladder.train.reached_values import (
    CONTAINERS,
    Reached,
    find_saved,
    find_torch_attributes,
    is_of_user,
    outline,
    read_own_attributes,
)
from stepladder.train.step_listener import LoopListener
from stepladder.train.sync.base import StepResult

FUNCTIONS = (FunctionType, MethodType, partial)
# By which a hook writes to tensors without a count of torch's.
UNCOUNTED_WRITES = ("data", "numpy")


class UnsavedState(LoopListener):
    """Compares, before and after each step, what `state_dict` leaves out.

    Args:
        job: The job, as it is laid out on the ranks.
        covers_hooks: Whether to compare also what its hooks reach.
    """

    def __init__(self, job: Job, covers_hooks: bool) -> None:
        self.job = job
        self.saved = find_saved(job)
        self.hooks: list[_WatchedHook] = []
        if covers_hooks:
            self.hooks += _watch_hooks(job, self.saved)
        rates = [
            (rate, part.last_epoch)
            for schedule in job.schedules
            for part in (schedule, *getattr(schedule, "_schedulers", ()))
            for rate in getattr(part, "lr_lambdas", ())
        ]
        # Not callable objects, whose attributes a schedule saves.
        self.functions = [pair for pair in rates if isinstance(pair[0], FUNCTIONS)]
        users = (*list_optimizers(job.optimizer), *job.schedules)
        methods = [
            method
            for each in users
            for class_ in type(each).__mro__
            for method in vars(class_).values()
        ]
        owners = [each for each in list_optimizers(job.optimizer) if not _saves_its_state(each)]
        for function, _ in self.functions:
            owner = getattr(function, "__self__", function)
            if id(owner) not in self.saved and not isinstance(owner, FunctionType):
                owners.append(owner)
        methods += [vars(each).get("step") for each in users]  # a function in its place
        self.reached = Reached((*methods, *(rate for rate, _ in rates)), owners)
        self.saving = [
            (each, {name: _copy_container(value) for name, value in vars(each).items()})
            for each in job.schedules
            if not is_from_torch(each) and type(each).state_dict is not LRScheduler.state_dict
        ]
        modules = dict(job.model.named_modules())
        attributes = {name for each in modules.values() for name in read_own_attributes(each)}
        # What torch steps by itself, without a hook or a function that names an attribute of a
        # layer, changes none of a weight or a layer.
        runs_own_code = (
            not all(map(is_from_torch, users))
            or any(BareStep(each).is_observed for each in list_optimizers(job.optimizer))
            or not self.reached.list_names().isdisjoint(attributes | {"setattr"})
        )
        self.params = dict(job.model.named_parameters()) if runs_own_code else {}
        self.modules = modules if runs_own_code else {}
        self.of_modules = self._read_modules()  # before the update
        self.calls_functions = True  # until the first step is done
        self.values = self._read_values(self.hooks)

    @property
    def can_exist(self) -> bool:
        """Whether an object is there whose state could be left out."""
        return bool(self.reached.objects or self.functions or self.reached.readers or self.hooks)

    def _read_values(self, hooks: Iterable[_WatchedHook]) -> dict[str, Any]:
        values = self.reached.read()
        for hook in hooks:
            values |= hook.reached.read()
        for weight, param in self.params.items():
            for name, value in param.__dict__.items():
                if not name.startswith("_") and value is not None:
                    values[f"attribute {name} of the weight {weight}"] = value
        if self.calls_functions:  # one that reads the time has another result
            for function, epoch in self.functions:
                called = getattr(function, "__qualname__", type(function).__name__)
                name = f"result of {called} for the same argument"
                values[name] = float(function(epoch))
        groups = self.job.optimizer.param_groups
        saved = self.saved | set(map(id, (self.job.optimizer.state, groups, *groups)))
        return {name: outline(value, saved) for name, value in values.items()}

    def after_reduce(self, step: int, result: StepResult) -> None:
        """Note the attributes of layers, which forward may change: those of the user alone.

        What a step reads is compared here too: passes may fill a list that the step empties.
        """
        self._validate(self._list_changed())
        self.of_modules = self._read_modules()

    def _read_modules(self) -> dict[tuple[str, str], Any]:
        """Return the attributes of all layers; takes 1.5 us for each layer."""
        return {
            (path, name): (value, count_writes(value) if isinstance(value, torch.Tensor) else 0)
            for path, module in self.modules.items()
            for name, value in read_own_attributes(module).items()
        }

    def _list_changed(self) -> list[str]:
        values = self._read_values(hook for hook in self.hooks if hook.has_effect)
        return [name for name, value in values.items() if value != self.values.get(name)]

    def after_gather(self) -> None:
        """Compare the values of each step, since a class may change them in some steps only.

        Raises:
            InputError: A value has changed, or lies in memory twice.
        """
        changed = self._list_changed()
        for (path, name), (value, writes) in self._read_modules().items():
            before, writes_before = self.of_modules.get((path, name), (None, 0))
            if value is not before or writes != writes_before:
                changed.append(f"attribute {name} of the layer {path or 'that is the model'}")
        states = self.job.optimizer.state
        changed += [f"state {key!r} of no weight" for key in states if isinstance(key, str)]
        self._validate(changed + self._list_forgotten())
        _validate_separate(self.params, states)
        if self.calls_functions:
            self.calls_functions = False

    def _list_forgotten(self) -> list[str]:
        """Return what a schedule with a state_dict of its own would lack after a resume."""
        forgotten = []
        for schedule, attributes in self.saving:
            resumed = copy.copy(schedule)
            vars(resumed).update(attributes)
            resumed.load_state_dict(copy.copy(schedule.state_dict()))
            forgotten += [
                f"attribute {name} of {type(schedule).__name__}"
                for name in vars(schedule).keys() - find_torch_attributes()
                if self._outline_of(schedule, name) != self._outline_of(resumed, name)
            ]
        return forgotten

    def _outline_of(self, schedule: LRScheduler, name: str) -> tuple[Any, ...]:
        return outline(getattr(schedule, name), self.saved)

    def _validate(self, changed: list[str]) -> None:
        if changed:
            raise InputError(
                f"a step changes the {changed[0]}, which no snapshot would have",
                "keep it in state[param] or param_groups of the optimizer, or in an attribute"
                " of the schedule; a rate is a function of the step alone",
            )


def _copy_container(value: Any) -> Any:
    return copy.copy(value) if isinstance(value, CONTAINERS) else value


def _validate_separate(params: dict[str, nn.Parameter], states: dict[Any, Any]) -> None:
    """Raise InputError if a state tensor of the optimizer lies in the memory of another tensor."""
    users = {param.data_ptr(): ("", name) for name, param in params.items()}
    for weight, param in params.items():
        for key, value in states.get(param, {}).items():
            # One count of steps may serve all weights: torch adds to it, whatever it is.
            if isinstance(value, torch.Tensor) and key != "step":
                other_key, other = users.setdefault(value.data_ptr(), (key, weight))
                # A sharded tensor may have no memory now.
                if value.data_ptr() and (other_key, other) != (key, weight):
                    what = f"state {other_key!r} of {other}" if other_key else f"the weight {other}"
                    raise InputError(
                        f"state {key!r} of {weight} lies in the memory of {what}, and a snapshot"
                        " makes two of it",
                        "a copy by .clone(); or find it anew from the weight in each step",
                    )


class _WatchedHook:
    """A hook of the job, and whether it has ever changed what a step computes.

    One that has not may keep what it likes, such as a log: what the loss or a metric reads of it,
    a resume compares.
    """

    def __init__(
        self, hook: Callable[..., Any], saved: set[int], tensors: Sequence[torch.Tensor]
    ) -> None:
        self.hook = hook
        self.tensors = tensors  # of the model, which a hook of a step may write, also frozen ones
        owner = getattr(hook, "__self__", hook)
        is_kept = isinstance(owner, partial) or is_of_user(type(owner).__module__)
        self.reached = Reached([hook], [owner] * (is_kept and id(owner) not in saved))
        self.has_effect = not self.reached.list_names().isdisjoint(UNCOUNTED_WRITES)

    def __call__(self, *args: Any, **options: Any) -> Any:
        if self.has_effect:
            return self.hook(*args, **options)
        before = self._read_effects(args)
        result = self.hook(*args, **options)
        self.has_effect = result is not None or self._read_effects(args) != before
        return result

    def _read_effects(self, args: tuple[Any, ...]) -> list[Any]:
        is_of_step = isinstance(args[0], torch.optim.Optimizer)
        return _read_effects((*args, *self.tensors) if is_of_step else args)


def _list_hook_tables(job: Job) -> list[dict[int, Any]]:
    """Return where torch keeps the hooks of an optimizer's step and of a backward pass."""
    tables: list[Any] = []
    for each in {job.optimizer, *list_optimizers(job.optimizer)}:
        own = vars(each)  # one that wraps another may lack what torch's own __init__ sets
        if not own.get("_optimizer_state_dict_post_hooks"):  # by which hooks save what they keep
            tables += map(own.get, ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"))
    for param in job.model.parameters():
        tables += [param._backward_hooks, param._post_accumulate_grad_hooks]
    for module in job.model.modules():
        tables += [module._backward_hooks, module._backward_pre_hooks]
    return list(filter(None, tables))


def _watch_hooks(job: Job, saved: set[int]) -> Iterator[_WatchedHook]:
    """Put a _WatchedHook in the place of each hook that is the user's."""
    tensors = [*job.model.parameters(), *job.model.buffers()]
    for table in _list_hook_tables(job):
        for key, hook in table.items():
            watched = hook
            if not isinstance(hook, _WatchedHook):
                watched = _WatchedHook(hook, saved, tensors)
            if watched.reached.readers:
                table[key] = watched
                yield watched


def _read_effects(args: Iterable[Any]) -> list[Any]:
    """Return what a hook may change of its arguments: tensors, and an optimizer's settings."""
    effects: list[Any] = []
    for value in args:
        if isinstance(value, torch.Tensor):
            effects.append((id(value), count_writes(value)))
            if value.is_leaf and value.grad is not None:
                effects += _read_effects([value.grad])
        elif isinstance(value, (tuple, list)):
            effects += _read_effects(value)
        elif isinstance(value, torch.optim.Optimizer):
            for state in value.state.values():
                effects += _read_effects(state.values())
            for group in value.param_groups:
                effects += _read_effects(group["params"])
                effects += [repr(each) for name, each in group.items() if name != "params"]
    return effects


def _saves_its_state(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether an optimizer is torch's, or has a state_dict of its own."""
    kind = type(optimizer)
    return is_from_torch(optimizer) or kind.state_dict is not torch.optim.Optimizer.state_dict
