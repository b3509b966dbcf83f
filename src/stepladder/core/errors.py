"""Errors and exit codes that mean the same everywhere."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stepladder.core.console import make_printable

DONE = 0
FAILED = 1
BAD_INPUT = 2
STOPPED = 75  # stopped with a snapshot, to be started again: EX_TEMPFAIL of sysexits.h
INTERRUPTED = 130  # Ctrl-C, and there is nothing to resume
# In the record of a launch (rank/exit_record.py) only:
KILLED = 137  # by SIGKILL, so that the ranks could leave no record
TERMINATED = 143  # the same, at SIGTERM
STORAGE_FAILED = 74  # StorageFault, whose exit code is 1; EX_IOERR of sysexits.h

# How a file system fails: it is full; its device does not work; a network file system's server is
# gone, or has forgotten the file, for a while.
FULL_ERRNOS = errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS
DEVICE_ERRNOS = errno.EIO, errno.ENXIO, errno.ENODEV
TRANSIENT_ERRNOS = errno.ESTALE, errno.ETIMEDOUT
DISK_HINT = "dmesg | tail, and the same command when the disk works; or another folder"

MAX_LINE_LETTERS = 200


class InputError(Exception):
    """Bad input: what was set, what was found, and a HINT with the text to type.

    One line, exit code 2.

    Raise it at the boundary, before anything is written. Programming errors stay ordinary
    exceptions and keep their traceback.

    Args:
        problem: What is wrong, without a period.
        hint: What to type instead.
    """

    def __init__(self, problem: str, hint: str) -> None:
        super().__init__(problem, hint)
        self.problem = problem
        self.hint = hint
        # Whether this rank shows the error, or None if ranks have not agreed on one.
        self.is_reporter: bool | None = None

    def __str__(self) -> str:
        # A library's reason, which the problem may end with, often has a period of its own.
        return make_readable(f"{self.problem.removesuffix('.')}. HINT: {self.hint}")

    def set_reporter(self, is_reporter: bool) -> None:
        """Note whether this rank is the one that shows the error."""
        self.is_reporter = is_reporter


class StorageFault(RuntimeError):
    """A file could not be used for a transient reason, as when its network file system is down.

    One line, exit code 1. A batch job is requeued.
    """


class PeerLost(RuntimeError):
    """A collective failed because another rank has ended: a consequence, not the cause."""


class StateLost(PeerLost):
    """No living rank has the training state, or a slice of it: the ranks need a snapshot."""


class RanksDiffer(RuntimeError):
    """Values that must be equal on all ranks differ, and nobody can tell which rank is wrong."""


class Corrupt(RanksDiffer):
    """This rank has computed a wrong result: other ranks have recomputed it."""


def is_failure(code: int) -> bool:
    """Tell whether a process with this exit code neither finished nor stopped with a snapshot."""
    return code not in (DONE, STOPPED)


@contextmanager
def as_input_error(
    failed: str, hint: str, kinds: tuple[type[Exception], ...] = (OSError,)
) -> Iterator[None]:
    """Raise errors in the block as InputError, with their reason.

    Args:
        failed: What failed, before the colon.
        hint: What to type instead.
        kinds: The classes of errors, by default the operating system's.

    Raises:
        InputError: The block raised one of these errors.
        StorageFault: It did, and the reason is transient.
    """
    try:
        yield
    except kinds as error:
        if isinstance(error, OSError) and error.errno in TRANSIENT_ERRNOS:
            raise StorageFault(f"{failed}: {get_reason(error)}") from error
        raise InputError(f"{failed}: {get_reason(error)}", hint) from error


@contextmanager
def name_file_in_errors(path: Path) -> Iterator[None]:
    """Add the file to the operating system's errors in the block that name none, as of writes."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def get_reason(error: Exception) -> str:
    """Return the reason of an error in one line: the operating system's, else its text or class."""
    return to_one_line(getattr(error, "strerror", None) or get_text(error) or type(error).__name__)


def get_text(error: BaseException) -> str:
    """Return an exception's message, also if its own __str__ raises."""
    try:
        return str(error)
    except Exception:
        return "<exception str() failed>"


def make_readable(text: str) -> str:
    """Return the text with control characters escaped, and very long words shortened."""
    return re.sub(
        r"\S{200,}",
        lambda match: f"{match[0][:80]}...{match[0][-20:]}",
        make_printable(text, allowed=""),
    )


def to_one_line(error: Exception | str) -> str:
    """Return the beginning of a text or of an error's message, without line breaks."""
    text = error if isinstance(error, str) else get_text(error)
    return " ".join(text.split())[:MAX_LINE_LETTERS]
