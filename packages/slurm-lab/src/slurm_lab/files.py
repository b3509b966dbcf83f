"""The folder of a lab, and its record, which must be this user's own and of the expected form."""

from __future__ import annotations

import json
import math
import os
import stat
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from slurm_lab.errors import LabError, as_lab_error

Kind = TypeVar("Kind")
ROOT_USER_ID = 0
MAX_RECORD_BYTES = 2**24
MAX_INTEGER = 2**64
KIND_NAMES = {
    str: "a text",
    Path: "a path",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    tuple: "a list",
    dict: "a table",
}


def get_lab_folder() -> Path:
    """Return `${XDG_STATE_HOME:-~/.local/state}/slurm-lab/lab`, the folder of this user's lab."""
    state = os.environ.get("XDG_STATE_HOME", "").strip()
    if not state:
        message = f"there is no home folder: HOME is not set, and no user has number {os.geteuid()}"
        with as_lab_error(message, "export HOME=DIR that you can write to", (RuntimeError,)):
            state = str(Path.home() / ".local/state")
    return Path(state) / "slurm-lab" / "lab"


def validate_ownership(path: Path) -> None:
    """Raise LabError if other users than root own a file or its folder, or may write to it."""
    resolved = path.resolve()
    for part in dict.fromkeys((path, path.parent, resolved, resolved.parent)):
        status = part.stat()
        if status.st_uid not in (ROOT_USER_ID, os.geteuid()):
            raise LabError(
                f"{path} is not used, because user {status.st_uid} owns {part}",
                f"read it; then cp {path} to a folder of your own, and work there",
            )
        # In a sticky folder, such as /tmp, nobody can replace another user's file.
        is_sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not is_sticky:
            raise LabError(
                f"{path} is not used, because others may write to {part}",
                f"read it; then chmod go-w {part}",
            )


def replace_file(path: Path, text: str, mode: int) -> None:
    """Write a file so that a reader sees the old or the new one, never a part of it.

    Args:
        path: The file.
        text: Its new contents.
        mode: Its permissions.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.chmod(mode)
    temporary.replace(path)


def load_json(path: Path, kind: type[Kind]) -> Kind:
    """Return the value of a JSON file that an earlier command has left.

    Args:
        path: The file. By now anything may be there: half a file, a FIFO, a terabyte.
        kind: The class of the value, see `_convert`.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is no JSON, or no value of this class.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
        raise ValueError("it is not a file")  # to open a FIFO would wait for its writer
    if status.st_size > MAX_RECORD_BYTES:
        raise ValueError(f"it is larger than {MAX_RECORD_BYTES >> 20} MiB")
    try:
        value = json.loads(path.read_bytes())
    except RecursionError as error:
        raise ValueError("its lists or tables are nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"it is not JSON ({error})") from error
    converted: Kind = _convert(value, kind, "it")
    return converted


def _convert(value: Any, kind: Any, name: str) -> Any:
    """Return a value of JSON as a value of a type.

    Args:
        value: The value.
        kind: A dataclass, str, Path, bool, int, float, or a tuple or dict of these.
        name: The value's name in messages.

    Raises:
        ValueError: The value has another type; the message says where and which.
    """
    outer = get_origin(kind) or kind
    inner = get_args(kind)
    if is_dataclass(outer) and isinstance(value, dict):
        return _convert_dataclass(value, outer, name)
    if outer is tuple and isinstance(value, list):
        return tuple(_convert(item, inner[0], f"{name}[{i}]") for i, item in enumerate(value))
    if outer is dict and isinstance(value, dict):
        return {key: _convert(item, inner[1], f"{name}.{key}") for key, item in value.items()}
    if outer is Path and isinstance(value, str) and "\0" not in value:
        return Path(value)
    if _is_scalar(value, outer):
        return value
    expected = KIND_NAMES.get(outer, "a table")
    raise ValueError(f"{name.removeprefix('it.')} is {value!r:.60}, and not {expected}")


def _convert_dataclass(value: dict[str, Any], kind: Any, name: str) -> Any:
    """Return a table of JSON as a dataclass, whose fields without a default must be there."""
    kinds = get_type_hints(kind)
    arguments = {}
    for field in fields(kind):
        path = f"{name}.{field.name}"
        if field.name in value:
            arguments[field.name] = _convert(value[field.name], kinds[field.name], path)
        elif field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{path.removeprefix('it.')} is missing")
    return kind(**arguments)


def _is_scalar(value: Any, kind: Any) -> bool:
    """Return whether a value of JSON is a text, a truth value or a finite number, as expected."""
    if kind is float and type(value) is float:
        return math.isfinite(value)
    if kind in (int, float):
        return type(value) is int and abs(value) < MAX_INTEGER
    return type(value) is kind and kind in (str, bool)
