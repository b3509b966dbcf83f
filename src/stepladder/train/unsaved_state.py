"""A check that a step changes nothing of an optimizer or a schedule that no snapshot would have.

torch's own classes keep their state where `state_dict` finds it. A class of the user's may keep a
counter or its moments in attributes: its own, or those of weights and layers. Its methods, the
function of a LambdaLR, or a hook may change a variable, or an attribute of an object that they
reach. What lies in memory twice, a snapshot makes two of.
"""

from __future__ import annotations

import copy
import pickle
import random
import sys
import warnings
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache, partial
from itertools import islice
from types import CodeType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from stepladder.core.console import print_message
from stepladder.core.errors import InputError
from stepladder.rank.torch_fixes import BareStep
from stepladder.train.fingerprints import count_writes
from stepladder.train.job import Job
from stepladder.train.optimizers import is_from_torch, list_optimizers
from stepladder.train.step_listener import LoopListener
from stepladder.train.sync.base import StepResult

COMPARED_TYPES = (int, float, complex, str, bytes, type(None))
FUNCTIONS = (FunctionType, MethodType, partial)
CONTAINERS = (dict, list, tuple, set, deque)
# Of whose other objects, such as iterators, queues and namespaces, pickle tells what they hold.
DATA_MODULES = {"array", "builtins", "collections", "itertools", "queue", "types", "weakref"}
# Whose subclasses of the user's hold more than their attributes tell.
PICKLED_TYPES = (np.ndarray, np.generic, np.random.Generator, np.random.RandomState, random.Random)
# What is compared of a value in each step has bounds, so that a large one costs little: 4 ms.
MAX_PICKLED_BYTES = 1 << 22
MAX_OBJECT_DEPTH = 8
MAX_ENDS = 32  # the first and the last items of a container
MAX_VALUES = 1000
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
        self.saved = _find_saved(job)
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
        self.reached = _Reached((*methods, *(rate for rate, _ in rates)), owners)
        self.saving = [
            (each, {name: _copy_container(value) for name, value in vars(each).items()})
            for each in job.schedules
            if not is_from_torch(each) and type(each).state_dict is not LRScheduler.state_dict
        ]
        modules = dict(job.model.named_modules())
        attributes = {name for each in modules.values() for name in _read_own_attributes(each)}
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
        return {name: _outline(value, saved) for name, value in values.items()}

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
            for name, value in _read_own_attributes(module).items()
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
                for name in vars(schedule).keys() - _find_torch_attributes()
                if self._outline_of(schedule, name) != self._outline_of(resumed, name)
            ]
        return forgotten

    def _outline_of(self, schedule: LRScheduler, name: str) -> tuple[Any, ...]:
        return _outline(getattr(schedule, name), self.saved)

    def _validate(self, changed: list[str]) -> None:
        if changed:
            raise InputError(
                f"a step changes the {changed[0]}, which no snapshot would have",
                "keep it in state[param] or param_groups of the optimizer, or in an attribute"
                " of the schedule; a rate is a function of the step alone",
            )


class KeptState:
    """What a job's loss keeps between calls: such a count is another one on each number of ranks.

    It may be for a log, or act in a later call, as a penalty in each sixteenth: a message names it.
    """

    def __init__(self, job: Job) -> None:
        self.saved = _find_saved(job)
        self.modules = dict(job.model.named_modules())
        self.reached = _Reached((job.loss, *self.modules.values()), [])
        self.is_told = False

    def read(self) -> dict[str, Any]:
        """Return what changes with each variable and each attribute of a layer, but for tensors.

        A pass makes tensors anew, with the same values.
        """
        values = self.reached.read()
        for path, module in self.modules.items():
            for name, value in _read_own_attributes(module).items():
                values[f"attribute {name} of the layer {path or 'that is the model'}"] = value
        return {
            name: [part for part in _outline(value, self.saved) if not isinstance(part, tuple)]
            for name, value in values.items()
        }

    def tell_changed(self, before: dict[str, Any]) -> None:
        """Print a line, once, if something is not as it was before passes of one microbatch."""
        changed = [name for name, value in self.read().items() if value != before.get(name)]
        if changed and not self.is_told:
            self.is_told = True
            problem = f"--sync exact: each call of the loss changes the {changed[0]}, which is"
            problem = f"{problem} another one on other numbers of ranks and after a resume"
            hint = "make sure that the loss does not depend on it, as a log does not"
            print_message(str(InputError(problem, hint)))


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


def _read_own_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a layer that are not torch's."""
    known = _find_module_attributes()
    return {name: value for name, value in module.__dict__.items() if name not in known}


@cache
def _find_module_attributes() -> set[str]:
    return set(vars(nn.Module()))


@cache
def _find_torch_attributes() -> set[str]:
    """Return the attributes that torch sets, of which `state_dict` has what counts.

    Some are of a schedule, which only warns or reports by them.

    An optimizer is made for it, which at import would load torch._dynamo: 70 MB.
    """
    attributes = vars(torch.optim.Optimizer([torch.zeros(1)], {})).keys() - {"defaults"}
    of_schedules = {"_step_count", "_last_lr", "_is_initial", "_get_lr_called_within_step"}
    return {*attributes, *of_schedules, "_opt_called", "step"}


def _find_saved(job: Job) -> set[int]:
    """Return the ids of what a snapshot has: of the model, the optimizers and the schedules."""
    users = (job.optimizer, *list_optimizers(job.optimizer), *job.schedules)
    rates = (rate for each in job.schedules for rate in getattr(each, "lr_lambdas", ()))
    model = job.model
    return set(map(id, (*users, *rates, *model.modules(), *model.parameters(), *model.buffers())))


class _Reached:
    """The variables that some functions read, and the attributes of some objects."""

    def __init__(self, functions: Iterable[Any], objects: list[Any]) -> None:
        self.readers = _find_readers(functions)
        self.objects = objects

    def list_names(self) -> set[str]:
        """Return the names of globals and attributes in the functions."""
        return {name for each in self.readers for name in _list_names(each.__code__)}

    def read(self) -> dict[str, Any]:
        values = {
            f"attribute {name} of {type(each).__name__}": value
            for each in self.objects
            for name, value in _read_attributes(each).items()
        }
        for function in self.readers:
            for name, value in _read_variables(function).items():
                values[f"variable {name} of {function.__qualname__}"] = value
        return values


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
        is_kept = isinstance(owner, partial) or _is_of_user(type(owner).__module__)
        self.reached = _Reached([hook], [owner] * (is_kept and id(owner) not in saved))
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
        if not each._optimizer_state_dict_post_hooks:  # by which hooks save what they keep
            tables += [each._optimizer_step_pre_hooks, each._optimizer_step_post_hooks]
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


@cache
def _is_of_user(module: str) -> bool:
    """Tell whether a module is part of no library, whose objects may count or log as they like."""
    path = getattr(sys.modules.get(module), "__file__", None) or ""
    library = module.partition(".")[0]
    is_library = library in (*sys.stdlib_module_names, "stepladder", "stepladder_exchange")
    return not is_library and "-packages" not in path


def _find_readers(functions: Iterable[Any]) -> list[FunctionType]:
    """Return the functions of the user among some callables, and those that they reach by a name.

    These are functions in variables, and the methods of objects in variables.
    """
    readers: list[FunctionType] = []
    found = list(functions)
    seen: dict[int, Any] = {}  # by their ids; kept, so that no other object gets one
    while found:
        function = found.pop()
        if not isinstance(function, FunctionType):
            found += () if id(function) in seen else _list_callables(function)
            seen[id(function)] = function
            continue
        found.append(getattr(function, "__wrapped__", None))  # torch wraps `step`
        # Not its __module__, which a wrapper has from what it wraps.
        if function not in readers and _is_of_user(function.__globals__.get("__name__", "")):
            readers.append(function)
            found += _read_variables(function).values()
    return readers


def _list_callables(value: Any) -> Iterable[Any]:
    """Return what may be called by way of a value that is no plain function."""
    if isinstance(value, partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, MethodType):
        return (value.__func__, value.__self__)
    if isinstance(value, CONTAINERS):
        return _list_parts(value, set())
    if _is_of_user(type(value).__module__):
        return [method for each in type(value).__mro__ for method in vars(each).values()]
    return ()


def _read_variables(function: FunctionType) -> dict[str, Any]:
    """Return the global and enclosed variables that a function reads, also in comprehensions.

    Its attributes and the defaults of its parameters, which a call may change, are among them.
    """
    names = set(_list_names(function.__code__))
    values = {name: function.__globals__[name] for name in names & function.__globals__.keys()}
    for module in list(values.values()):
        if isinstance(module, ModuleType) and _is_of_user(module.__name__):
            found = names & vars(module).keys()
            values |= {f"{module.__name__}.{name}": vars(module)[name] for name in found}
    values |= {**vars(function), **(function.__kwdefaults__ or {})}
    values["__defaults__"] = function.__defaults__
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # it has no value yet
            values[name] = cell.cell_contents
    return values


def _list_names(code: CodeType) -> Iterator[str]:
    """Yield the names of globals and attributes in a code object and those within it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _list_names(constant)


def _saves_its_state(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether an optimizer is torch's, or has a state_dict of its own."""
    kind = type(optimizer)
    return is_from_torch(optimizer) or kind.state_dict is not torch.optim.Optimizer.state_dict


def _read_attributes(value: Any) -> dict[str, Any]:
    """Return what pickle would save of an object, but for the attributes that torch sets."""
    if isinstance(value, type):  # to which copyreg adds __slotnames__ once an object is read
        return {name: part for name, part in vars(value).items() if not name.startswith("__")}
    if isinstance(value, partial):
        return {"args": value.args, "keywords": value.keywords}
    state = object.__getstate__(value)
    parts = state if isinstance(state, tuple) else (state,)  # of a class with __slots__
    attributes = {name: part for each in parts for name, part in (each or {}).items()}
    if isinstance(value, torch.optim.Optimizer):
        return {name: attributes[name] for name in attributes.keys() - _find_torch_attributes()}
    return attributes


def _outline(value: Any, saved: set[int]) -> tuple[Any, ...]:
    """Return what changes with a value, within bounds."""
    return tuple(islice(_walk(value, saved, MAX_OBJECT_DEPTH), MAX_VALUES))


def _walk(value: Any, saved: set[int], depth: int) -> Iterator[Any]:
    """Yield what changes with a value and its parts, but for what a snapshot has.

    Args:
        value: Any object.
        saved: The ids of what a snapshot has.
        depth: How many objects deep to look.
    """
    if depth and id(value) not in saved:
        yield _read_plain(value)
        for part in _list_parts(value, saved):
            yield from _walk(part, saved, depth - 1)


def _read_plain(value: Any) -> Any:
    """Return what changes with a value, apart from its parts; of a tensor, torch's write count."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr(), count_writes(value)
    if isinstance(value, COMPARED_TYPES):
        return value
    if isinstance(value, CONTAINERS):
        return len(value)
    if isinstance(value, torch.Generator):
        return bytes(value.get_state().numpy())
    if isinstance(value, GeneratorType):
        return value.gi_frame and value.gi_frame.f_lasti
    if isinstance(value, PICKLED_TYPES) or _is_of_library(value):
        return _Digest().take(value)
    return None


def _is_of_library(value: Any) -> bool:
    """Tell whether a value is an object of a library's class that may hold data."""
    module = type(value).__module__
    is_data = not isinstance(value, (type, nn.Module)) and not hasattr(value, "state_dict")
    return is_data and module not in DATA_MODULES and not _is_of_user(module)


class _Digest:
    """A file that keeps a checksum of what is written to it, up to a number of bytes."""

    def __init__(self) -> None:
        self.checksum = 0
        self.left = MAX_PICKLED_BYTES

    def write(self, data: Any) -> None:
        self.checksum = zlib.crc32(memoryview(data)[: self.left], self.checksum)
        self.left -= len(data)
        if self.left <= 0:
            raise EOFError

    def take(self, value: Any) -> int | None:
        """Return the checksum of what pickle saves of a value; None of a logger, a lock, a file."""
        try:
            pickle.dump(value, self)
        except EOFError:
            return self.checksum
        except Exception:
            return None
        return self.checksum


def _list_parts(value: Any, saved: set[int]) -> Iterable[Any]:
    """Return the parts of a container, or of an object that is the user's or has a state_dict."""
    if isinstance(value, dict):
        return (*_take_ends(value), *_take_ends(value.values()))
    if isinstance(value, CONTAINERS):
        return _take_ends(value)
    if isinstance(value, MethodType):
        return (value.__self__,)
    if hasattr(value, "state_dict") and not isinstance(value, type):
        if id(getattr(value, "state", None)) in saved:  # of an optimizer around the job's own
            return ()
        own = _read_own_attributes(value) if isinstance(value, nn.Module) else {}
        return (value.state_dict(), own)
    # A class has its own module as an attribute, and its objects have it too.
    is_of_user = _is_of_user(getattr(value, "__module__", "builtins") or "")
    if is_of_user or isinstance(value, partial):
        return (_read_attributes(value),)
    return _read_reduced(value)


def _read_reduced(value: Any) -> tuple[Any, ...]:
    """Return what pickle would save of an iterator, a queue or a namespace; of others nothing.

    It saves nothing of a generator, or of a number that processes share.
    """
    if isinstance(value, GeneratorType):
        return (value.gi_frame and value.gi_frame.f_locals,)
    is_plain = isinstance(value, (type, *COMPARED_TYPES))
    if hasattr(value, "get_obj") and not is_plain:
        return (bytes(value.get_obj()),)
    if type(value).__module__ in DATA_MODULES and not is_plain:
        with suppress(Exception), warnings.catch_warnings():  # a lock, an open file, a function
            warnings.simplefilter("ignore")
            return tuple(value.__reduce_ex__(2)[1:3])
    return ()


def _take_ends(items: Any) -> tuple[Any, ...]:
    """Return the first and the last items of a container; a short one may be returned twice."""
    if isinstance(items, set):
        items = list(items)
    return *islice(items, MAX_ENDS), *islice(reversed(items), MAX_ENDS)
