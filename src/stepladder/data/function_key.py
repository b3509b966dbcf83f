"""A text for a function of the user's: another one when the function does something else."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np

PLAIN_TYPES = (bool, int, float, complex, str, bytes, type(None), type(...))


def make_function_key(function: Callable[..., Any]) -> str:
    """Return a text that has the function's code, and the values outside of it that it uses.

    Not its source: two functions may stand in one line, and a line may be edited that is none of
    the function's. Modules count by their names alone.

    Raises:
        ValueError: It uses something that may change unseen; the message names it.
    """
    version = f"python {sys.version_info.major}.{sys.version_info.minor}"
    return " ".join([version, *describe_value("", function, ())])


def describe_value(
    name: str,
    value: Any,
    callers: tuple[FunctionType, ...],
) -> Iterator[str]:
    """Yield texts that have a value.

    Args:
        name: How the function calls it, for an error; "" for the function itself.
        value: The value.
        callers: The functions that use it.

    Raises:
        ValueError: It may change unseen.
    """
    if isinstance(value, PLAIN_TYPES):
        yield repr(value)
    elif isinstance(value, (tuple, list, set, frozenset, dict)):
        items = list(value.items()) if isinstance(value, dict) else list(value)
        texts = [" ".join(describe_value(name, item, callers)) for item in items]
        if isinstance(value, (set, frozenset)):  # whose order differs between processes
            texts.sort()
        yield " ".join([type(value).__name__, *texts])
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        yield f"{value.dtype} {value.shape} {value.tobytes().hex()}"
    elif isinstance(value, CodeType):
        names = [*value.co_names, *value.co_freevars]
        yield f"{value.co_code.hex()} {value.co_exceptiontable.hex()} {names}"
        yield from describe_value(name, value.co_consts, callers)
    elif isinstance(value, FunctionType):
        yield from describe_function(value, callers)
    elif isinstance(value, ModuleType) or is_builtin(value):
        yield value.__name__
    else:
        raise ValueError(f"{name}, a {type(value).__name__}".removeprefix(", "))


def is_builtin(value: Any) -> bool:
    """Return whether a function or class is part of Python itself."""
    is_callable = isinstance(value, (BuiltinFunctionType, type))
    return is_callable and value.__module__ == "builtins"


def describe_function(function: FunctionType, callers: tuple[FunctionType, ...]) -> Iterator[str]:
    """Yield texts that have the code of a function, its defaults, and the variables it uses."""
    if function in callers:
        return
    code = function.__code__
    values: dict[str, Any] = {"its defaults": function.__defaults__}
    values |= {"its code": code, "its keywords": function.__kwdefaults__}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        values[name] = cell.cell_contents
    for name in list_names(code):
        if name in function.__globals__:
            values[name] = function.__globals__[name]
    for name, value in values.items():
        yield from describe_value(name, value, (*callers, function))


def list_names(code: CodeType) -> Iterator[str]:
    """Yield the names of the variables outside that a code uses, and the code within it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from list_names(constant)
