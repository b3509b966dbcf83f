"""Tracebacks of a job's error: the user's own frames, without those of this package and of torch
around them.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType

SHOW_ALL = "STEPLADDER_TRACEBACK"  # set by --traceback, and inherited by the ranks
PACKAGE = str(Path(__file__).parents[1]) + os.sep
RECIPES = str(Path(__file__).parents[1] / "recipes") + os.sep  # job files, as the user's own are
STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"] + os.sep
FROZEN = "<frozen "


def own_frames(trace: TracebackType | None) -> TracebackType | None:
    """The part of a traceback that is not the launcher's, nor of `runpy`, which runs a script for
    it.
    """
    house = tuple(PACKAGE + room for room in ("rank", "launcher"))
    while trace is not None and (
        trace.tb_frame.f_code.co_filename.startswith(house)
        or trace.tb_frame.f_globals.get("__name__") == "runpy"
    ):
        trace = trace.tb_next
    return trace


class RemoteTrace(Exception):
    """The traceback of another process, as text: the cause of the exception that it raised there."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def fold(error: BaseException, with_note: bool = True) -> None:
    """Take the frames of stepladder and torch out of the tracebacks of an error and of its causes.

    Nothing is changed where the user asked for all frames, or where no frame is the user's: such an
    error is ours, or torch's.

    Args:
        error: The error.
        with_note: Whether a note on the error says how many frames were taken out.
    """
    if os.environ.get(SHOW_ALL):
        return
    chain = list(causes(error))
    folded = [user_frames(each.__traceback__) for each in chain]
    if not any(folded) and not any(isinstance(each, RemoteTrace) for each in chain):
        return
    count = 0
    for each, frames in zip(chain, folded, strict=True):
        count += len(list(frames_of(each.__traceback__))) - len(frames)
        with suppress(Exception):  # an exception of the job's own may not let itself be changed
            each.__traceback__ = joined(frames)
    if count and with_note:
        with suppress(Exception):
            error.add_note(
                f"{count} frames of torch and stepladder are folded: --traceback shows all"
            )


def causes(error: BaseException) -> Iterator[BaseException]:
    """The error, and those that a traceback shows above it."""
    shown: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in shown:
        shown.add(id(current))
        yield current
        hidden = current.__suppress_context__ or current.__cause__ is not None
        current = current.__cause__ if hidden else current.__context__


def user_frames(trace: TracebackType | None) -> list[TracebackType]:
    """The frames from the first one of the user's on, without those of stepladder and torch."""
    libraries = (PACKAGE, FROZEN, *folder_of("torch"))
    before_user = (*libraries, *folder_of("click"), STANDARD_LIBRARY)
    frames: list[TracebackType] = []
    for item in frames_of(trace):
        file = item.tb_frame.f_code.co_filename
        foreign = libraries if frames else before_user
        is_user = file.startswith(RECIPES) or not file.startswith(foreign)
        if is_user and not (not frames and is_command(file)):
            frames.append(item)
    return frames


def frames_of(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def joined(frames: list[TracebackType]) -> TracebackType | None:
    """A traceback of these frames alone."""
    trace: TracebackType | None = None
    for item in reversed(frames):
        trace = TracebackType(trace, item.tb_frame, item.tb_lasti, item.tb_lineno)
    return trace


def is_command(file: str) -> bool:
    """Whether a file is the small script that pip writes for the command `stepladder`."""
    return file == sys.argv[0] or file == "<string>"


def folder_of(module: str) -> tuple[str, ...]:
    """Return the folder of a package, if it is loaded."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return (str(Path(file).parent) + os.sep,) if file else ()


def user_line(error: BaseException) -> str:
    """Return the file and the line of the user's innermost frame, as "job.py, line 7", or ""
    without one.
    """
    frames = [
        (item.tb_frame.f_code.co_filename, item.tb_lineno)
        for item in user_frames(error.__traceback__)
    ]
    own = [(file, line) for file, line in frames if not file.startswith(STANDARD_LIBRARY)]
    return f"{Path(own[-1][0]).name}, line {own[-1][1]}" if own else ""


def files_of(error: BaseException) -> list[str]:
    """Return the file of each frame of an error's traceback, the innermost last."""
    return [item.tb_frame.f_code.co_filename for item in frames_of(error.__traceback__)]
