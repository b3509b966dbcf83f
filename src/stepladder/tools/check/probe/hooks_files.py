"""Hooks that record which files the script reads, looks for and renames, and what it shows."""

from __future__ import annotations

import builtins
import logging
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from stepladder.tools.check.events import (
    FileMove,
    FileRemoval,
    FileWrite,
    FolderMade,
    PathSearch,
    Print,
)
from stepladder.tools.check.probe import pause
from stepladder.tools.check.probe.patching import (
    WrappedCall,
    default_on_error,
    record_calls,
    record_user_calls,
    recorder,
    wrap,
    wrap_after_import,
)
from stepladder.tools.check.probe.probe_log import current_log
from stepladder.tools.probe.events import CodeLine

MAX_PRINTED_TEXT = 400
MAX_PRINTED_ITEMS = 32  # of a container
REMOVAL_EVENTS = ("os.remove", "os.rmdir", "shutil.rmtree")
LOCK_EVENTS = ("fcntl.flock", "fcntl.lockf")
START_ATTRIBUTE = "_stepladder_start"  # of a thread
PRINTED_TYPES = (str, int, float)
# By the module that defines it: a function, or a method, that stores numbers.
METRIC_LOGGERS = {
    "torch.utils.tensorboard.writer": "SummaryWriter.add_scalar",
    "tensorboardX.writer": "SummaryWriter.add_scalar",
    "mlflow.tracking.fluent": "log_metric",
    "wandb.sdk.wandb_run": "Run.log",
}


changes: set[FileWrite | FileRemoval | FolderMade] = set()
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
    record_user_calls(builtins, "print", print_event)
    record_calls(logging.Logger, "handle", message_event)
    for module, function in METRIC_LOGGERS.items():
        wrap_after_import(module, function, recorder(metric_event, by_user_only=True))


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


def print_event(call: WrappedCall) -> Print | None:
    if call.kwargs.get("file") is not None:
        return None
    return Print(caller=current_log().user_caller(), text=printed_text(call.args))


@default_on_error(lambda: None)
def metric_event(call: WrappedCall) -> Print:
    return Print(text=printed_text(numbers_and_texts([*call.args, *call.kwargs.values()])))


def numbers_and_texts(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the values, those in dicts with their names, and numbers in place of their tensors."""
    for value in values:
        if isinstance(value, dict):
            yield from numbers_and_texts(chain.from_iterable(value.items()))
        else:
            yield value.item() if has_one_element(value) and hasattr(value, "item") else value


@default_on_error(str)
def printed_text(values: Iterable[Any]) -> str:
    """Return what is printed, without objects other than text, numbers and small containers."""
    return " ".join(map(str, filter(is_printed, values)))[:MAX_PRINTED_TEXT]


def is_printed(value: Any, depth: int = 2) -> bool:
    if isinstance(value, (dict, list, tuple)):
        parts = value.values() if isinstance(value, dict) else value
        is_small = depth > 0 and len(value) <= MAX_PRINTED_ITEMS
        return is_small and all(is_printed(part, depth - 1) for part in parts)
    return isinstance(value, PRINTED_TYPES) or has_one_element(value)


@default_on_error(bool)
def has_one_element(value: Any) -> bool:
    count = getattr(value, "numel", lambda: getattr(value, "size", None))  # torch's, and NumPy's
    return bool(count() == 1)


def message_event(call: WrappedCall) -> Print | None:
    record: logging.LogRecord = call.argument(1, "record")
    if not current_log().is_user_file(record.pathname):
        return None
    return Print(text=record.getMessage()[:MAX_PRINTED_TEXT])


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
    if event == "open" and isinstance(args[0], str | bytes) and "w" in str(args[1]):
        record_change(FileWrite(path=path_in_copy(os.fsdecode(args[0]))))


def remember_start(call: WrappedCall) -> Any:
    """Make a thread remember the user's line that started it."""
    vars(call.args[0])[START_ATTRIBUTE] = current_log().user_line()
    return call.run()


def record_change(event: FileWrite | FileRemoval | FolderMade) -> None:
    """Record a change of the script's folder, once, where the script or its libraries make it.

    A thread of a library, such as that of a SummaryWriter, writes for the line that started it.
    """
    log = current_log()
    is_of_script = event.path.startswith(f"{log.settings.copy}{os.sep}")
    line = log.user_line() or getattr(threading.current_thread(), START_ATTRIBUTE, None)
    if is_of_script and event not in changes and line is not None:
        changes.add(event)
        log.write(event, line)
