"""Tracebacks of a job's error, without the frames of this package and of torch."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from stepladder_exchange.call_frame import EXCHANGE_PREFIX

SHOW_ALL_VARIABLE = "STEPLADDER_TRACEBACK"  # set by --traceback, and inherited by the ranks
PACKAGE_PREFIX = str(Path(__file__).parents[1]) + os.sep
OWN_PREFIXES = (PACKAGE_PREFIX, EXCHANGE_PREFIX)
LAUNCHER_FOLDERS = (PACKAGE_PREFIX + "rank", PACKAGE_PREFIX + "launcher")
RECIPES_PREFIX = str(Path(__file__).parents[1] / "recipes") + os.sep  # job files, as the user's are
STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"] + os.sep
FROZEN_PREFIX = "<frozen "


class RemoteTraceback(Exception):
    """The traceback of another process, as text: the cause of the exception that it raised."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def skip_launcher_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without its outer frames, which are the launcher's and `runpy`'s."""
    while trace is not None:
        frame = trace.tb_frame
        is_launcher = frame.f_code.co_filename.startswith(LAUNCHER_FOLDERS)
        if not is_launcher and frame.f_globals.get("__name__") != "runpy":
            break
        trace = trace.tb_next
    return trace


def fold_traceback(error: BaseException, with_note: bool = True) -> None:
    """Remove the frames of stepladder and torch from the tracebacks of an error and its causes.

    Nothing is changed if the user asked for all frames, or if no frame is the user's: such an error
    is ours, or torch's.

    Args:
        error: The error.
        with_note: Whether a note on the error says how many frames were removed.
    """
    if os.environ.get(SHOW_ALL_VARIABLE):
        return
    causes = list(_list_causes(error))
    user_frames = [_find_user_frames(cause.__traceback__) for cause in causes]
    is_remote = any(isinstance(cause, RemoteTraceback) for cause in causes)
    if not any(user_frames) and not is_remote:
        return
    num_removed = 0
    for cause, frames in zip(causes, user_frames, strict=True):
        num_removed += len(list(_list_frames(cause.__traceback__))) - len(frames)
        with suppress(Exception):  # an exception of the job's own may forbid changes
            cause.with_traceback(_join_frames(frames))
    if num_removed and with_note:
        with suppress(Exception):
            error.add_note(
                f"{num_removed} frames of torch and stepladder are folded: --traceback shows all"
            )


def _list_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, and those that a traceback shows above it."""
    shown_ids: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in shown_ids:
        shown_ids.add(id(current))
        yield current
        if current.__suppress_context__ or current.__cause__ is not None:
            current = current.__cause__
        else:
            current = current.__context__


def _find_user_frames(trace: TracebackType | None) -> list[TracebackType]:
    """Return the user's frames, and those of other libraries that they call.

    Frames of stepladder and torch are left out, and before the user's first frame also those of
    click and of the standard library.
    """
    libraries = (*OWN_PREFIXES, FROZEN_PREFIX, *_find_package_folder("torch"))
    callers = (*libraries, *_find_package_folder("click"), STANDARD_LIBRARY)
    frames: list[TracebackType] = []
    for item in _list_frames(trace):
        file = item.tb_frame.f_code.co_filename
        if not frames and _is_command(file):
            continue
        left_out = libraries if frames else callers
        if file.startswith(RECIPES_PREFIX) or not file.startswith(left_out):
            frames.append(item)
    return frames


def _list_frames(trace: TracebackType | None) -> Iterator[TracebackType]:
    """Yield the entries of a traceback, the innermost last."""
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _join_frames(frames: list[TracebackType]) -> TracebackType | None:
    """Return a traceback of these frames alone."""
    trace: TracebackType | None = None
    for item in reversed(frames):
        trace = TracebackType(trace, item.tb_frame, item.tb_lasti, item.tb_lineno)
    return trace


def _is_command(file: str) -> bool:
    """Tell whether a file is the small script that pip writes for the command `stepladder`."""
    is_stepladder = file == sys.argv[0] and Path(file).stem == "stepladder"
    return is_stepladder or file == "<string>"


def _find_package_folder(module: str) -> tuple[str, ...]:
    """Return the folder of a package if it is imported, else nothing."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return (str(Path(file).parent) + os.sep,) if file else ()


def find_user_line(error: BaseException) -> str:
    """Return the line of the user's innermost frame, as "job.py, line 7", or "" without one."""
    line = ""
    for item in _find_user_frames(error.__traceback__):
        file = item.tb_frame.f_code.co_filename
        if not file.startswith(STANDARD_LIBRARY):
            line = f"{Path(file).name}, line {item.tb_lineno}"
    return line


def list_files(error: BaseException) -> list[str]:
    """Return the file of each frame of an error's traceback, the innermost last."""
    return [item.tb_frame.f_code.co_filename for item in _list_frames(error.__traceback__)]
