"""A text for a function of the user's: another one when the function does something else."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec, resolve_name
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np

PLAIN_TYPES = (bool, int, float, complex, str, bytes, type(None), type(...))
PACKAGE_FOLDERS = {"site-packages", "dist-packages"}
KnownFunctions = dict[FunctionType, int]  # those that a key has already, with their numbers


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
        return " ".join([version, *describe_value("", function, {})])
    except RecursionError as error:
        raise ValueError("a value that holds itself") from error


def describe_value(name: str, value: Any, known: KnownFunctions) -> Iterator[str]:
    """Yield texts that have a value.

    Args:
        name: How the function calls it, for an error; "" for the function itself.
        value: The value.
        known: The functions that the key has already; those of the value are added.

    Raises:
        ValueError: It may change unseen.
    """
    if isinstance(value, PLAIN_TYPES):
        yield repr(value)
    elif isinstance(value, (tuple, list, set, frozenset, dict)):
        items = list(value.items()) if isinstance(value, dict) else list(value)
        if isinstance(value, (set, frozenset)):  # whose order differs between processes
            texts = sorted(" ".join(describe_value(name, item, dict(known))) for item in items)
        else:
            texts = [" ".join(describe_value(name, item, known)) for item in items]
        yield " ".join([type(value).__name__, *texts])
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        yield f"{value.dtype} {value.shape} {value.tobytes().hex()}"
    elif isinstance(value, CodeType):
        names = [*value.co_names, *value.co_freevars]
        yield f"{value.co_code.hex()} {value.co_exceptiontable.hex()} {names}"
        yield from describe_value(name, value.co_consts, known)
    elif isinstance(value, FunctionType):
        yield from describe_function(value, known)
    elif is_installed(value) or is_builtin(value):
        yield value.__name__
    else:
        raise ValueError(f"{name}, a {type(value).__name__}".removeprefix(", "))


def is_installed(value: Any) -> bool:
    """Return whether a value is a module of Python or of an installed package."""
    if not isinstance(value, ModuleType):
        return False
    return is_installed_at(value.__name__, getattr(value, "__file__", None))


def is_installed_at(name: str, file: str | None) -> bool:
    """Return whether a module is one of Python or of an installed package, by name and file."""
    is_standard = name.partition(".")[0] in sys.stdlib_module_names
    return is_standard or not PACKAGE_FOLDERS.isdisjoint(Path(file or "").parts)


def is_builtin(value: Any) -> bool:
    """Return whether a function or class is part of Python itself."""
    is_callable = isinstance(value, (BuiltinFunctionType, type))
    return is_callable and value.__module__ == "builtins"


def describe_function(function: FunctionType, known: KnownFunctions) -> Iterator[str]:
    """Yield texts that have the code of a function, its defaults, and the variables it uses.

    A function that the key has already is a number: the paths to it may be very many.
    """
    if function in known:
        yield f"function {known[function]}"
        return
    known[function] = len(known)
    code = function.__code__
    values: dict[str, Any] = {"its defaults": function.__defaults__}
    values |= {"its code": code, "its keywords": function.__kwdefaults__}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        values[name] = cell.cell_contents
    names = list(list_names(code))
    variables = function.__globals__
    used = {name: variables[name] for name in names if name in variables}
    used |= find_imports(code, variables.get("__package__"))
    for name, value in used.items():
        if isinstance(value, ModuleType) and not is_installed(value):
            values |= list_attributes(name, value, names, {value})
        else:
            values[name] = value
    for name, value in values.items():
        yield from describe_value(name, value, known)


def list_attributes(
    name: str, module: ModuleType, names: list[str], seen: set[ModuleType]
) -> Iterator[tuple[str, Any]]:
    """Yield what a function uses of a module of the user's, and of modules that it holds.

    Args:
        name: How the function calls the module.
        module: The module.
        names: The names that the function uses.
        seen: Modules that are not to be looked at again; those of this call are added.
    """
    for attribute in names:
        value = getattr(module, attribute, None)
        if not isinstance(value, ModuleType) or is_installed(value):
            if hasattr(module, attribute):
                yield f"{name}.{attribute}", value
        elif value not in seen:
            seen.add(value)
            yield from list_attributes(f"{name}.{attribute}", value, names, seen)


def find_imports(code: CodeType, package: str | None) -> dict[str, Any]:
    """Return what a code imports itself, and the code within it, by the names of the modules.

    Args:
        code: The code.
        package: The package of its module, where relative imports begin.

    Returns:
        The module; None if it cannot be imported. Of an installed one the name, since its import
        may take long.
    """
    found: dict[str, Any] = {}
    # Two constants stand before an import: how many dots it has, and what is imported from it.
    instructions = [one for one in dis.get_instructions(code) if one.opname != "EXTENDED_ARG"]
    for dots, members, one in zip(instructions, instructions[1:], instructions[2:], strict=False):
        if one.opname == "IMPORT_NAME":
            found[one.argval] = None
            with suppress(ImportError):
                name = resolve_name("." * dots.argval + one.argval, package)
                found[one.argval] = import_own(name, members.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= find_imports(constant, package)
    return found


def import_own(name: str, members: tuple[str, ...] | None) -> Any:
    """Return a module of the user's as `import` gives it, or the name of an installed one.

    Args:
        name: The whole name of the module.
        members: What `from NAME import` names; None for `import NAME`.

    Raises:
        ImportError: There is no such module.
    """
    top = name.partition(".")[0]
    if top in sys.modules:
        file = getattr(sys.modules[top], "__file__", None)
    else:
        spec = find_spec(top)
        file = spec.origin if spec is not None else None
    if is_installed_at(top, file):
        return name
    module = import_module(name)
    for member in members or ():
        if not hasattr(module, member):
            import_module(f"{name}.{member}")
    return sys.modules[top] if members is None else module


def list_names(code: CodeType) -> Iterator[str]:
    """Yield the names of the variables outside that a code uses, and the code within it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from list_names(constant)
