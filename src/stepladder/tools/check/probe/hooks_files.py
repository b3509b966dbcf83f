"""Hooks that record which files the script reads, looks for and renames."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

from stepladder.tools.check.events import (
    FileAppend,
    FileMove,
    FileRemoval,
    FileWrite,
    FolderMade,
    PathSearch,
)
from stepladder.tools.check.probe import pause
from stepladder.tools.check.probe.patching import WrappedCall, record_calls, record_user_calls, wrap
from stepladder.tools.check.probe.probe_log import current_log
from stepladder.tools.probe.events import CodeLine

REMOVAL_EVENTS = ("os.remove", "os.rmdir", "shutil.rmtree")
LOCK_EVENTS = ("fcntl.flock", "fcntl.lockf")
START_ATTRIBUTE = "_stepladder_start"  # of a thread


FileChange = FileWrite | FileAppend | FileRemoval | FolderMade
changes: set[FileChange] = set()
searches: set[tuple[str, CodeLine | None]] = set()


def attach() -> None:
    sys.addaudithook(audit)
    wrap(threading.Thread, "start", remember_start)
    record_calls(os, "replace", move_event)
    record_calls(os, "rename", move_event)
    record_user_calls(os.path, "exists", search_event)
    record_user_calls(os.path, "isfile", search_event)
    record_user_calls(Path, "exists", search_event)
    record_user_calls(Path, "is_file", search_event)


def search_event(call: WrappedCall) -> PathSearch | None:
    """Return the event of the first look: a rank that polls for a file looks again and again."""
    search = (path_in_copy(call.argument(0, "path")), current_log().user_line())
    if search in searches:
        return None
    searches.add(search)
    return PathSearch(path=search[0])


def move_event(call: WrappedCall) -> FileMove:
    pause.pause_at("rename")
    source, target = call.argument(0, "src"), call.argument(1, "dst")
    return FileMove(source=path_in_copy(source), target=path_in_copy(target))


def absolute_path(path: Any) -> str:
    """Return the absolute path of a path of any type; empty where it is none."""
    try:
        return str(os.path.abspath(os.fspath(path))) if path else ""  # noqa: PTH100  # for any kind of path
    except TypeError:
        return ""


def path_in_copy(path: Any) -> str:
    """Return the absolute path of a file, which is that in the copy for one of the user's folder.

    A script that runs at the path of its own folder sees the copy there.
    """
    absolute = absolute_path(path)
    settings = current_log().settings
    is_in_copy = absolute.startswith(settings.copy + os.sep)
    if is_in_copy or not absolute.startswith(settings.original + os.sep):
        return absolute
    return settings.copy + absolute.removeprefix(settings.original)


def audit(event: str, args: tuple[Any, ...]) -> None:
    """Record which files are written and locked. Called by Python at each audit event."""
    if event in LOCK_EVENTS:
        path = os.readlink(f"/proc/self/fd/{args[0]}")  # noqa: PTH115
        record_change(FileWrite(path=path_in_copy(path), locked=True))
    if event in REMOVAL_EVENTS and isinstance(args[0], str | bytes | Path):
        record_change(FileRemoval(path=path_in_copy(os.fsdecode(args[0]))))
    if event == "os.mkdir" and isinstance(args[0], str | bytes | Path):
        record_change(FolderMade(path=path_in_copy(os.fsdecode(args[0]))))
    if event == "open" and isinstance(args[0], str | bytes):
        for mode, kind in (("w", FileWrite), ("x", FileWrite), ("a", FileAppend)):
            if mode in str(args[1]):
                record_change(kind(path=path_in_copy(os.fsdecode(args[0]))))


def remember_start(call: WrappedCall) -> Any:
    """Make a thread remember the user's line that started it."""
    vars(call.args[0])[START_ATTRIBUTE] = current_log().user_line()
    return call.run()


def record_change(event: FileChange) -> None:
    """Record a change of the script's folder, once, where the script or its libraries make it.

    A thread of a library, such as that of a SummaryWriter, writes for the line that started it.
    """
    log = current_log()
    is_of_script = event.path.startswith(f"{log.settings.copy}{os.sep}")
    line = log.user_line() or getattr(threading.current_thread(), START_ATTRIBUTE, None)
    if is_of_script and event not in changes and line is not None:
        changes.add(event)
        log.write(event, line)
