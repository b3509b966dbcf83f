"""Hooks that record which files the script reads, looks for and renames, and what it prints."""

from __future__ import annotations

import builtins
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from stepladder.tools.check.probe.patching import wrap
from stepladder.tools.check.probe.probe_log import current_log

MOST_LISTED_FILES = 5000
NOT_DATA_SUFFIXES = (
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


class ReadFiles:
    """The files that were recorded, and whether a read is being recorded."""

    def __init__(self) -> None:
        self.is_recording = False
        self.paths: set[str] = set()
        self.patterns: set[str] = set()

    def record(self, path: str) -> None:
        """Record a read once, and none of the files that recording itself opens."""
        self.is_recording = True
        try:
            absolute = absolute_path(path)
            if absolute not in self.paths:
                record_data_file(absolute)
        finally:
            self.is_recording = False


read_files = ReadFiles()


def attach() -> None:
    sys.addaudithook(audit)
    wrap(os, "replace", record_move)
    wrap(os, "rename", record_move)
    wrap(os.path, "exists", record_search)
    wrap(os.path, "isfile", record_search)
    wrap(Path, "exists", record_search)
    wrap(Path, "is_file", record_search)
    wrap(builtins, "print", record_print)


def record_search(original: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
    exists = original(path, *args, **kwargs)
    if current_log().is_called_by_user():
        current_log().write_with_line(
            "looked",
            path=absolute_path(path),
            found=bool(exists),
        )
    return exists


def record_move(original: Any, source: Any, target: Any, **kwargs: Any) -> Any:
    current_log().write_with_line(
        "moved", source=absolute_path(source), target=absolute_path(target)
    )
    return original(source, target, **kwargs)


def record_print(original: Any, *args: Any, **kwargs: Any) -> Any:
    if kwargs.get("file") is None and current_log().is_called_by_user():
        texts = [str(arg) for arg in args if isinstance(arg, (str, float))]
        current_log().write_with_line("print", numbers=sum(map(has_digit, texts)))
    return original(*args, **kwargs)


def has_digit(text: str) -> bool:
    return any(character.isdigit() for character in text)


def absolute_path(path: Any) -> str:
    """Return the absolute path of a path of any type; empty where it is none."""
    try:
        return str(os.path.abspath(os.fspath(path))) if path else ""  # noqa: PTH100  # for any kind of path
    except TypeError:
        return ""


def audit(event: str, args: tuple[Any, ...]) -> None:
    """Record which files are opened to be read. Called by Python at each audit event."""
    if event != "open" or read_files.is_recording or not isinstance(args[0], str):
        return
    mode = args[1]
    flags = args[2] or 0
    if mode is None:
        writes = bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_TRUNC))
    else:
        writes = not set(str(mode)).isdisjoint("wax+")
    if not writes:
        read_files.record(args[0])


def record_data_file(path: str) -> None:
    """Record a file of a data set in several files, and all files that are named alike."""
    folder, name = os.path.split(path)
    settings = current_log().settings
    is_numbered = has_digit(name) and not name.endswith(NOT_DATA_SUFFIXES)
    is_of_script = folder.startswith((tempfile.gettempdir(), settings.copy, settings.original))
    if not is_numbered or not is_of_script or folder.startswith(settings.folder):
        return
    read_files.paths.add(path)
    pattern = re.sub(r"\d+", "*", name)
    fields: dict[str, Any] = {"path": path, "pattern": pattern}
    if (folder + pattern) not in read_files.patterns:
        read_files.patterns.add(folder + pattern)
        names = os.listdir(folder)[:MOST_LISTED_FILES]  # noqa: PTH208
        alike = [sibling for sibling in names if re.sub(r"\d+", "*", sibling) == pattern]
        fields["beside"] = [os.path.join(folder, sibling) for sibling in alike]  # noqa: PTH118
    current_log().write("read", **fields)
