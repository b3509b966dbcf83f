"""A check that a step changes nothing of an optimizer or a schedule that no snapshot would have.

torch's own classes keep their state where `state_dict` finds it. A class of the user's may keep a
counter or its moments in attributes, and its methods, or the function of a LambdaLR, may change a
variable.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from types import CodeType, FunctionType
from typing import Any

import torch

from stepladder.core.errors import InputError
from stepladder.train.job import Job
from stepladder.train.optimizers import is_from_torch, list_optimizers
from stepladder.train.step_listener import LoopListener

COMPARED_TYPES = (int, float, complex, str, bytes, type(None))


class UnsavedState(LoopListener):
    """Compares, before and after each step, what `state_dict` leaves out."""

    def __init__(self, job: Job) -> None:
        self.objects = [
            each for each in list_optimizers(job.optimizer) if not _saves_its_state(each)
        ]
        # Not of a callable object, whose state a schedule saves.
        self.functions = [
            (function, part.last_epoch)
            for schedule in job.schedules
            for part in (schedule, *getattr(schedule, "_schedulers", ()))
            for function in getattr(part, "lr_lambdas", ())
            if isinstance(function, FunctionType)
        ]
        users = (*list_optimizers(job.optimizer), *job.schedules)
        methods = [
            method
            for each in users
            for class_ in type(each).__mro__
            for method in vars(class_).values()
        ]
        self.readers = _find_readers((*methods, *(function for function, _ in self.functions)))
        self.calls_functions = True  # until the first step is done
        self.values = self._read_values()

    @property
    def can_exist(self) -> bool:
        """Whether an object is there whose state could be left out."""
        return bool(self.objects or self.functions or self.readers)

    def _read_values(self) -> dict[str, Any]:
        values = {
            f"attribute {name} of {type(each).__name__}": value
            for each in self.objects
            for name, value in vars(each).items()
            if name not in _find_torch_attributes()
            and getattr(value, "state", None) is not each.state  # one that it wraps
        }
        for function in self.readers:
            values |= {
                f"variable {name} of {function.__qualname__}": value
                for name, value in _read_variables(function).items()
            }
        if self.calls_functions:  # one that reads the time has another result
            for function, epoch in self.functions:
                name = f"result of {function.__qualname__} for the same argument"
                values[name] = float(function(epoch))
        return {name: tuple(_outline(value)) for name, value in values.items()}

    def after_gather(self) -> None:
        """Compare the values of each step, since a class may change them in some steps only.

        Raises:
            InputError: A value has changed.
        """
        values = self._read_values()
        for name, value in values.items():
            if value != self.values.get(name):
                raise InputError(
                    f"a step changes the {name}, which no snapshot would have",
                    "keep it in self.state[param] or self.param_groups of the optimizer, or in an"
                    " attribute of the schedule; a rate is a function of the step alone",
                )
        if self.calls_functions:
            self.calls_functions = False


@cache
def _find_torch_attributes() -> set[str]:
    """Return the attributes that torch sets, of which `state_dict` has what counts.

    An optimizer is made for it, which at import would load torch._dynamo: 70 MB.
    """
    attributes = vars(torch.optim.Optimizer([torch.zeros(1)], {}))
    return {*attributes, "_opt_called", "_step_count", "step"}


def _find_readers(functions: Iterable[Any]) -> list[FunctionType]:
    """Return the functions among some objects, and those that they call by a variable's name.

    Functions of installed libraries, which note the warnings that they have shown, and those of
    another module than their caller's are left out.
    """
    readers: list[FunctionType] = []
    found = list(functions)
    while found:
        function = found.pop()
        if isinstance(function, FunctionType):
            function = inspect.unwrap(function)  # torch wraps `step`
            if function in readers or "site-packages" in function.__code__.co_filename:
                continue
            readers.append(function)
            found += [
                value
                for value in _read_variables(function).values()
                if getattr(value, "__module__", "") == function.__module__
            ]
    return readers


def _read_variables(function: FunctionType) -> dict[str, Any]:
    """Return the global and enclosed variables that a function reads, also in comprehensions."""
    names = set(_list_names(function.__code__)) & function.__globals__.keys()
    values = {name: function.__globals__[name] for name in names}
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


def _outline(value: Any) -> Iterator[Any]:
    """Yield what changes with a value: plain values, and torch's counts of writes to tensors.

    Weights, and objects of other classes than optimizers, are left out.
    """
    if isinstance(value, torch.nn.Parameter):
        return
    if isinstance(value, torch.Tensor):
        yield value.data_ptr(), value._version
    elif isinstance(value, torch.optim.Optimizer):
        yield from _outline(list(value.state.values()))
    elif isinstance(value, COMPARED_TYPES):
        yield value
    elif isinstance(value, (dict, list, tuple, set)):
        yield len(value)
        for item in value:
            yield from _outline(item)
        if isinstance(value, dict):
            yield from _outline(list(value.values()))
