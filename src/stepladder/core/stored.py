"""What an earlier start has left in a small file, read again: a value of the expected shape, or one
line.

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

from stepladder.core.errors import InputError, one_line, placing

Kind = TypeVar("Kind")
AS_IT_IS = (
    os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
)  # Windows has the last alone
NESTED = "its lists or tables are nested too deeply"
MOST_BYTES = 2**24
LEAST_BYTES = 2**16  # for files of the kernel, which do not tell their size
CALLED = {
    str: "a text",
    Path: "a path",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
}
CALLED |= {list: "a list", tuple: "a list", set: "a list", dict: "a table"}


def load(path: Path, kind: type[Kind], hint: str, named: str = "") -> Kind:
    """A JSON file as a value of `kind`, see `fit`. Raises InputError, FileNotFoundError.

    named: what the message begins with instead of the path.
    """
    try:
        return loads(read(path), kind)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(
            f"{named or path} cannot be used: {one_line(str(reason))}", hint
        ) from error


def loads(text: str | bytes, kind: type[Kind]) -> Kind:
    """JSON as a value of `kind`. Raises ValueError."""
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError(NESTED) from error
    except ValueError as error:
        raise ValueError(f"it is not JSON ({error})") from error
    fitting: Kind = fit(value, kind)
    return fitting


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file, whose tables `fit` takes. Raises OSError, ValueError."""
    try:
        return tomllib.loads(read(path).decode())
    except RecursionError as error:
        raise ValueError(NESTED) from error


def read(path: Path, most: int = MOST_BYTES) -> bytes:
    """All of a regular file. Raises OSError, and ValueError for another kind of file or a larger
    one.
    """
    with placing(path), opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(
            min(most, max(size, LEAST_BYTES)) + 1
        )  # as much memory is taken before it is read
    if len(data) > most:
        raise ValueError(f"it is larger than {most >> 20} MiB")
    return data


def sha256_of(path: str | Path | None) -> str | None:
    """Return the SHA-256 of a file's bytes; None where there is none, as for a job that a script
    has built.
    """
    try:
        return hashlib.sha256(read(Path(path))).hexdigest() if path is not None else None
    except (OSError, ValueError):
        return None


def opened(path: Path) -> BinaryIO:
    """A regular file, to be read; a FIFO would wait for its writer. Raises OSError, ValueError for
    other kinds.
    """
    file = os.fdopen(os.open(path, AS_IT_IS), "rb")
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise ValueError("it is not a file")


def fit(value: Any, kind: Any, name: str = "it") -> Any:
    """The value, of JSON or TOML, as one of `kind`: a dataclass, or what its fields' annotations
    may be.

    Fields without a default must be there; keys that are no field are left out. Numbers are finite,
    and those that are whole have less than 65 bits. Raises ValueError, which says where and what.
    """
    outer, inner = get_origin(kind) or kind, get_args(kind)
    if outer in (Union, UnionType):  # X | None
        return (
            None
            if value is None
            else fit(value, next(one for one in inner if one is not NoneType), name)
        )
    if (outer is Literal and value in inner) or outer is Any:
        return value
    if is_dataclass(outer):
        return _fit_dataclass(value, outer, name)
    if outer in (list, tuple, set) and isinstance(value, list):
        kinds = (
            inner
            if inner and outer is tuple and inner[-1] is not Ellipsis
            else inner[:1] * len(value)
        )
        if not inner or len(kinds) == len(value):
            items = zip(value, kinds or [Any] * len(value), strict=True)
            return outer(
                fit(item, one, f"{name}[{place}]") for place, (item, one) in enumerate(items)
            )
    if outer is dict and isinstance(value, dict):
        return {
            key: fit(item, inner[1] if inner else Any, f"{name}.{key}")
            for key, item in value.items()
        }
    if _is_scalar(value, outer):
        return Path(value) if outer is Path else value
    asked = " or ".join(map(repr, inner)) if outer is Literal else CALLED[outer]
    raise ValueError(f"{name.removeprefix('it.')} is {value!r:.60}, and not {asked}")


def _fit_dataclass(value: Any, kind: Any, name: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{name.removeprefix('it.')} is {value!r:.60}, and not a table")
    found, hints = {}, get_type_hints(kind)
    for field in fields(kind):
        if field.name in value:
            found[field.name] = fit(value[field.name], hints[field.name], f"{name}.{field.name}")
        elif field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{name}.{field.name}".removeprefix("it.") + " is missing")
    return kind(**found)


def _is_scalar(value: Any, kind: Any) -> bool:
    if kind is Path:
        return isinstance(value, str) and "\0" not in value
    if kind is float and type(value) is float:
        return math.isfinite(value)
    if kind in (int, float):
        return type(value) is int and abs(value) < 2**64
    return type(value) is kind and kind in (str, bool)
