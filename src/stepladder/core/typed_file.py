"""Small files that an earlier start has left, read as values of an expected type.

By then anything may lie there: half a file, another program's, a FIFO, a terabyte.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
import tomllib
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, BinaryIO, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from stepladder.core.errors import InputError, get_reason, name_file_in_errors

Kind = TypeVar("Kind")
# O_NONBLOCK: a FIFO would wait for its writer. Windows has O_BINARY alone.
READ_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
NESTED_TOO_DEEPLY = "its lists or tables are nested too deeply"
MAX_FILE_BYTES = 2**24
MIN_READ_BYTES = 2**16  # of the kernel's files, whose size is unknown
MAX_INTEGER_SIZE = 2**64
KIND_NAMES = {
    str: "a text",
    Path: "a path",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    list: "a list",
    tuple: "a list",
    set: "a list",
    dict: "a table",
}


def load_json(path: Path, kind: type[Kind], hint: str, label: str = "") -> Kind:
    """Return the value of a JSON file.

    Args:
        path: The file.
        kind: The type of the value, see `convert`.
        hint: What to type if it cannot be used.
        label: What the message begins with, by default the path.

    Raises:
        InputError: The file cannot be used.
        FileNotFoundError: There is no such file.
    """
    try:
        return parse_json(read_file(path), kind)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        message = f"{label or path} cannot be used: {get_reason(error)}"
        raise InputError(message, hint) from error


def make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the values of a JSON object by name. Raises ValueError if two have the same name."""
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError(f"two values have the same name, of {', '.join(values)}")
    return values


def parse_json(text: str | bytes, kind: type[Kind]) -> Kind:
    """Return the value of a JSON text.

    Args:
        text: The text.
        kind: The type of the value, see `convert`.

    Raises:
        ValueError: It is no JSON, or no value of this type.
    """
    try:
        value = json.loads(text, object_pairs_hook=make_object)
    except RecursionError as error:
        raise ValueError(NESTED_TOO_DEEPLY) from error
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON, from line {error.lineno} on") from error
    except ValueError as error:
        raise ValueError(f"it is not JSON ({error})") from error
    converted: Kind = convert(value, kind)
    return converted


def read_toml(path: Path) -> dict[str, Any]:
    """Return the tables of a TOML file, which `convert` accepts.

    Args:
        path: The file, of at most MAX_FILE_BYTES.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is no TOML.
    """
    try:
        return tomllib.loads(read_file(path).decode())
    except RecursionError as error:
        raise ValueError(NESTED_TOO_DEEPLY) from error


def read_file(path: Path, max_bytes: int = MAX_FILE_BYTES) -> bytes:
    """Return the contents of a regular file.

    Args:
        path: The file.
        max_bytes: The most bytes that it may have.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is no regular file, or it is larger.
    """
    with name_file_in_errors(path), open_to_read(path) as file:
        size = os.fstat(file.fileno()).st_size
        # `read` allocates as much memory as it is asked for, before it reads.
        data = file.read(min(max_bytes, max(size, MIN_READ_BYTES)) + 1)
    if len(data) > max_bytes:
        raise ValueError(f"it is larger than {max_bytes >> 20} MiB")
    return data


def hash_file(path: str | Path | None) -> str | None:
    """Return the SHA-256 of a file, or None without one, as for a job that a script has built."""
    if path is None:
        return None
    try:
        return hashlib.sha256(read_file(Path(path))).hexdigest()
    except (OSError, ValueError):
        return None


def open_to_read(path: Path) -> BinaryIO:
    """Open a regular file to read its bytes.

    Args:
        path: The file.

    Returns:
        The open file, which the caller closes.

    Raises:
        OSError: The file cannot be opened.
        ValueError: The path is not a regular file, but a folder, pipe or device.
    """
    file = os.fdopen(os.open(path, READ_FLAGS), "rb")
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise ValueError("it is not a file")


def convert(value: Any, kind: Any, name: str = "it") -> Any:
    """Return a value of JSON or TOML as a value of a type.

    Args:
        value: The value.
        kind: A dataclass, or what annotations of its fields may be: str, bool, int, float, Path,
            Literal, X | None, and list, tuple, set and dict of these. Fields without a default must
            exist; keys that are no field are left out. Floats are finite, and integers have fewer
            than 65 bits.
        name: The value's name in messages.

    Raises:
        ValueError: The value has another type; the message says where and which.
    """
    outer = get_origin(kind) or kind
    inner = get_args(kind)
    if outer in (Union, UnionType):  # X | None
        if value is None:
            return None
        return convert(value, next(item for item in inner if item is not NoneType), name)
    if outer is Any or (outer is Literal and value in inner):
        return value
    if is_dataclass(outer):
        return _convert_dataclass(value, outer, name)
    if outer in (list, tuple, set) and isinstance(value, list):
        return _convert_items(value, outer, inner, name)
    if outer is dict and isinstance(value, dict):
        item_kind = inner[1] if inner else Any
        return {key: convert(item, item_kind, f"{name}.{key}") for key, item in value.items()}
    if _is_scalar(value, outer):
        return Path(value) if outer is Path else value
    raise ValueError(_describe_mismatch(value, outer, inner, name))


def _describe_mismatch(value: Any, outer: Any, inner: tuple[Any, ...], name: str) -> str:
    """Return the message about a value that is not of the type `outer[inner]`."""
    if outer is Literal:
        expected = " or ".join(map(repr, inner))
    else:
        expected = KIND_NAMES[outer]
    return f"{name.removeprefix('it.')} is {value!r:.60}, and not {expected}"


def _convert_items(values: list[Any], outer: Any, inner: tuple[Any, ...], name: str) -> Any:
    """Return a list of JSON or TOML as a list, tuple or set, each item as its own type."""
    kinds = _find_item_kinds(outer, inner, len(values))
    if len(kinds) != len(values):
        raise ValueError(_describe_mismatch(values, outer, inner, name))
    items = enumerate(zip(values, kinds, strict=True))
    return outer(convert(item, kind, f"{name}[{index}]") for index, (item, kind) in items)


def _find_item_kinds(outer: Any, inner: tuple[Any, ...], count: int) -> list[Any]:
    """Return the type of each item of a list, tuple or set with these type arguments."""
    if not inner:
        return [Any] * count
    has_fixed_length = outer is tuple and inner[-1] is not Ellipsis
    return list(inner) if has_fixed_length else [inner[0]] * count


def _convert_dataclass(value: Any, kind: Any, name: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{name.removeprefix('it.')} is {value!r:.60}, and not a table")
    arguments = {}
    hints = get_type_hints(kind)
    for field in fields(kind):
        field_name = f"{name}.{field.name}"
        if field.name in value:
            arguments[field.name] = convert(value[field.name], hints[field.name], field_name)
        elif field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(field_name.removeprefix("it.") + " is missing")
    return kind(**arguments)


def _is_scalar(value: Any, kind: Any) -> bool:
    """Tell whether a value is a text, a path, a truth value or a number of this type."""
    if kind is Path:
        return isinstance(value, str) and "\0" not in value
    if kind is float and type(value) is float:
        return math.isfinite(value)
    if kind in (int, float):
        return type(value) is int and abs(value) < MAX_INTEGER_SIZE
    return type(value) is kind and kind in (str, bool)
