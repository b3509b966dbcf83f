"""A text for a function of the user's: another one when the function does something else."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np

PLAIN_TYPES = (bool, int, float, complex, str, bytes, type(None), type(...))


def make_function_key(function: Callable[..., Any]) -> str:
    """Return a text that has the function's code, and the values outside of it that it uses.

    Not its source: two functions may stand in one line, and a line may be edited that is none of
    the function's. Modules of Python and of installed packages count by their names alone, and of
    the user's own modules what the function uses.

    Raises:
        ValueError: It uses something that may change unseen; the message names it.
    """
    version = f"python {sys.version_info.major}.{sys.version_info.minor}"
    try:
        return " ".join([version, *describe_value("", function, ())])
    except RecursionError as error:
        raise ValueError("a value that holds itself") from error


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
    elif is_installed(value) or is_builtin(value):
        yield value.__name__
    else:
        raise ValueError(f"{name}, a {type(value).__name__}".removeprefix(", "))


def is_installed(value: Any) -> bool:
    """Return whether a value is a module of Python or of an installed package."""
    if not isinstance(value, ModuleType):
        return False
    is_standard = value.__name__.partition(".")[0] in sys.stdlib_module_names
    parts = Path(getattr(value, "__file__", None) or "").parts
    return is_standard or not {"site-packages", "dist-packages"}.isdisjoint(parts)


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
    names = list(list_names(code))
    for name in names:
        value = function.__globals__.get(name)
        if isinstance(value, ModuleType) and not is_installed(value):
            used = [attribute for attribute in names if hasattr(value, attribute)]
            values |= {f"{name}.{attribute}": getattr(value, attribute) for attribute in used}
        elif name in function.__globals__:
            values[name] = value
    for name, value in values.items():
        yield from describe_value(name, value, (*callers, function))


def list_names(code: CodeType) -> Iterator[str]:
    """Yield the names of the variables outside that a code uses, and the code within it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from list_names(constant)
