"""Files that the script writes, reads, looks for and moves; and the lines that it prints."""

from __future__ import annotations

import builtins
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from stepladder.tools.check.probe.patching import wrap
from stepladder.tools.check.probe.recorder import here


def attach() -> None:
    sys.addaudithook(audit)
    wrap(os, "replace", moved)
    wrap(os, "rename", moved)
    for owner, name in [
        (os.path, "exists"),
        (os.path, "isfile"),
        (Path, "exists"),
        (Path, "is_file"),
    ]:
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
            "print",
            numbers=sum(
                any(c.isdigit() for c in str(a)) for a in args if isinstance(a, (str, float))
            ),
        )
    return original(*args, **kwargs)


def absolute(path: Any) -> str:
    try:
        return str(os.path.abspath(os.fspath(path))) if path else ""  # noqa: PTH100  # for any kind of path
    except TypeError:
        return ""


class Auditing:
    inside = False
    read: set[str] = set()  # noqa: RUF012
    patterns: set[str] = set()  # noqa: RUF012


def audit(event: str, args: tuple[Any, ...]) -> None:
    """Note which files are opened to be read."""
    if event != "open" or Auditing.inside or not isinstance(args[0], str):
        return
    mode, flags = args[1], args[2] or 0
    writes = (
        flags & (os.O_WRONLY | os.O_RDWR | os.O_TRUNC)
        if mode is None
        else set(str(mode)) & set("wax+")
    )
    if writes:
        return
    Auditing.inside = True
    try:
        path = os.path.abspath(args[0])  # noqa: PTH100
        if path not in Auditing.read:
            note_read(path)
    finally:
        Auditing.inside = False


NO_DATA = (
    ".py",
    ".pyc",
    ".so",
    ".pyi",
    ".json",
    ".toml",
    ".txt",
    ".cfg",
    ".dat",
    ".pth",
    ".pt",
    ".jsonl",
    ".word",
)


def note_read(path: str) -> None:
    """A file of a data set in parts, with all that lie beside it and are named alike."""
    folder, name = os.path.split(path)
    settings = here().settings
    if (
        not any(c.isdigit() for c in name)
        or name.endswith(NO_DATA)
        or folder.startswith(settings.folder)
    ):
        return
    if not folder.startswith((tempfile.gettempdir(), settings.copy, settings.original)):
        return
    Auditing.read.add(path)
    pattern = re.sub(r"\d+", "*", name)
    fields: dict[str, Any] = {"path": path, "pattern": pattern}
    if (folder + pattern) not in Auditing.patterns:
        Auditing.patterns.add(folder + pattern)
        names = os.listdir(folder)[:5000]  # noqa: PTH208
        alike = [other for other in names if re.sub(r"\d+", "*", other) == pattern]
        fields["beside"] = [os.path.join(folder, other) for other in alike]  # noqa: PTH118
    here().write("read", **fields)
