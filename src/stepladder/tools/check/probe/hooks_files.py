"""Files that the script writes, reads, looks for and moves; and the lines that it prints."""

from __future__ import annotations

import builtins
import os
import sys
from pathlib import Path
from typing import Any

from stepladder.tools.check.probe.patching import wrap
from stepladder.tools.check.probe.recorder import here


def attach() -> None:
    sys.addaudithook(audit)
    wrap(os, "replace", moved)
    wrap(os, "rename", moved)
    for owner, name in [(os.path, "exists"), (os.path, "isfile"), (Path, "exists"), (Path, "is_file")]:
        wrap(owner, name, looked)
    wrap(builtins, "print", printed)


def looked(original: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
    found = original(path, *args, **kwargs)
    if here().direct():
        here().at("looked", path=absolute(path), found=bool(found))
    return found


def moved(original: Any, source: Any, target: Any, **kwargs: Any) -> Any:
    here().at("moved", source=absolute(source), target=absolute(target))
    return original(source, target, **kwargs)


def printed(original: Any, *args: Any, **kwargs: Any) -> Any:
    if kwargs.get("file") is None and here().direct():
        here().at(
            "print", numbers=sum(any(c.isdigit() for c in str(a)) for a in args if isinstance(a, (str, float)))
        )
    return original(*args, **kwargs)


def absolute(path: Any) -> str:
    try:
        return str(os.path.abspath(os.fspath(path)))  # noqa: PTH100  # for any kind of path
    except TypeError:
        return ""


class Busy:
    inside = False


def audit(event: str, args: tuple[Any, ...]) -> None:
    """The user's own files are not written: opening one for that is refused."""
    if event != "open" or Busy.inside or not isinstance(args[0], str):
        return
    mode, flags = args[1], args[2] or 0
    writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_TRUNC) if mode is None else set(str(mode)) & set("wax+")
    if not writes:
        return
    Busy.inside = True
    try:
        settings = here().settings
        path = os.path.abspath(args[0])  # noqa: PTH100
        if path.startswith(settings.original + os.sep) and not path.startswith(settings.copy + os.sep):
            raise PermissionError(
                f"{path} is the user's own file, and `stepladder check` writes none: give the script a relative "
                f"path"
            )
    finally:
        Busy.inside = False
