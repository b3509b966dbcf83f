"""What functions of a job reach by names: variables, attributes, and what is in them."""

from __future__ import annotations

import pickle
import random
import sys
import warnings
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache, partial
from itertools import islice
from types import CodeType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from stepladder.train.fingerprints import count_writes
from stepladder.train.job import Job
from stepladder.train.optimizers import list_optimizers

COMPARED_TYPES = (int, float, complex, str, bytes, type(None))
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


class Reached:
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


def find_saved(job: Job) -> set[int]:
    """Return the ids of what a snapshot has: of the model, the optimizers and the schedules."""
    users = (job.optimizer, *list_optimizers(job.optimizer), *job.schedules)
    rates = (rate for each in job.schedules for rate in getattr(each, "lr_lambdas", ()))
    model = job.model
    return set(map(id, (*users, *rates, *model.modules(), *model.parameters(), *model.buffers())))


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
        if function not in readers and is_of_user(function.__globals__.get("__name__", "")):
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
    if is_of_user(type(value).__module__):
        return [method for each in type(value).__mro__ for method in vars(each).values()]
    return ()


def _read_variables(function: FunctionType) -> dict[str, Any]:
    """Return the global and enclosed variables that a function reads, also in comprehensions.

    Its attributes and the defaults of its parameters, which a call may change, are among them.
    """
    names = set(_list_names(function.__code__))
    values = {name: function.__globals__[name] for name in names & function.__globals__.keys()}
    for module in list(values.values()):
        if isinstance(module, ModuleType) and is_of_user(module.__name__):
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


@cache
def is_of_user(module: str) -> bool:
    """Tell whether a module is part of no library, whose objects may count or log as they like."""
    path = getattr(sys.modules.get(module), "__file__", None) or ""
    library = module.partition(".")[0]
    is_library = library in (*sys.stdlib_module_names, "stepladder", "stepladder_exchange")
    return not is_library and "-packages" not in path


def read_own_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a layer that are not torch's."""
    known = _find_module_attributes()
    return {name: value for name, value in module.__dict__.items() if name not in known}


@cache
def _find_module_attributes() -> set[str]:
    return set(vars(nn.Module()))


@cache
def find_torch_attributes() -> set[str]:
    """Return the attributes that torch sets, of which `state_dict` has what counts.

    Some are of a schedule, which only warns or reports by them.

    An optimizer is made for it, which at import would load torch._dynamo: 70 MB.
    """
    attributes = vars(torch.optim.Optimizer([torch.zeros(1)], {})).keys() - {"defaults"}
    of_schedules = {"_step_count", "_last_lr", "_is_initial", "_get_lr_called_within_step"}
    return {*attributes, *of_schedules, "_opt_called", "step"}


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
        return {name: attributes[name] for name in attributes.keys() - find_torch_attributes()}
    return attributes


def outline(value: Any, saved: set[int]) -> tuple[Any, ...]:
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
        return _try_twice(partial(_digest, value))
    return None


def _try_twice(read: Callable[[], Any]) -> Any:
    """Return what is read; None where that fails, as for a logger, a lock or a file.

    The handler of a signal may raise meanwhile: torch's does, once a worker of a loader has ended.
    """
    for _ in range(2):
        with suppress(Exception):
            return read()
    return None


def _is_of_library(value: Any) -> bool:
    """Tell whether a value is an object of a library's class that may hold data."""
    module = type(value).__module__
    is_data = not isinstance(value, (type, nn.Module)) and not hasattr(value, "state_dict")
    return is_data and module not in DATA_MODULES and not is_of_user(module)


class _DataPickler(pickle.Pickler):
    """Leaves out the weights that an object may hold: a step changes them."""

    def persistent_id(self, value: Any) -> str | None:
        """Return what is written in place of a value; None for the value itself."""
        return "" if isinstance(value, (torch.Tensor, nn.Module, torch.optim.Optimizer)) else None


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


def _digest(value: Any) -> int:
    """Return the checksum of what pickle saves of a value."""
    digest = _Digest()
    with suppress(EOFError):
        _DataPickler(digest).dump(value)
    return digest.checksum


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
        own = read_own_attributes(value) if isinstance(value, nn.Module) else {}
        return (value.state_dict(), own)
    # A class has its own module as an attribute, and its objects have it too.
    is_own = is_of_user(getattr(value, "__module__", "builtins") or "")
    if is_own or isinstance(value, partial):
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
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _try_twice(lambda: tuple(value.__reduce_ex__(2)[1:3])) or ()
    return ()


def _take_ends(items: Any) -> tuple[Any, ...]:
    """Return the first and the last items of a container; a short one may be returned twice."""
    if isinstance(items, set):
        items = list(items)
    return *islice(items, MAX_ENDS), *islice(reversed(items), MAX_ENDS)
