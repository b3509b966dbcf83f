"""Errors and exit codes that mean the same everywhere."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stepladder.core.console import printable

DONE, FAILED, BAD_INPUT = 0, 1, 2
STOPPED = 75  # stopped with a snapshot, to be started again: sysexits' EX_TEMPFAIL
INTERRUPTED = 130  # Ctrl-C before there was anything to stop well
KILLED, TERMINATED = (
    137,
    143,
)  # a launcher's word for ranks that had none: SIGKILL, or they ended at SIGTERM
NO_FILE = 74  # a word too: StorageFault, where the exit code is 1; sysexits' EX_IOERR


class InputError(Exception):
    """Bad input: what was set, what was found, and a HINT with the text to type. One line, exit
    code 2.

    Raise it at the boundary, before anything is written. Programming errors stay ordinary
    exceptions and keep their traceback.
    """

    def __init__(self, found: str, hint: str) -> None:
        super().__init__(found, hint)
        self.found = found
        self.hint = hint
        self.speaks: bool | None = (
            None  # whether this rank shows it, where ranks have agreed on one
        )

    def __str__(self) -> str:
        return readable(f"{self.found}. HINT: {self.hint}")


class StorageFault(RuntimeError):
    """A file could not be used, for a reason that may pass, such as a network file system without
    its server.

    One line, exit code 1. A batch job is requeued.
    """


# What a file system answers: it takes no more; its device does not work, or a network file system
# has given up; a network file system's server is gone, or has forgotten the file, for a while.
FULL = errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS
BROKEN = errno.EIO, errno.ENXIO, errno.ENODEV
TRANSIENT = errno.ESTALE, errno.ETIMEDOUT
ASK_DISK = "dmesg | tail, and the same command when the disk works; or another folder"


@contextmanager
def naming(
    failed: str, hint: str, kinds: tuple[type[Exception], ...] = (OSError,)
) -> Iterator[None]:
    """Errors in the block, by default the operating system's, as InputError: what failed, and their
    reason.

    As StorageFault where the reason may pass.
    """
    try:
        yield
    except kinds as error:
        if isinstance(error, OSError) and error.errno in TRANSIENT:
            raise StorageFault(f"{failed}: {reason_of(error)}") from error
        raise InputError(f"{failed}: {reason_of(error)}", hint) from error


@contextmanager
def placing(path: Path) -> Iterator[None]:
    """Have the operating system's errors in the block name this file, where they name none: those
    of writes.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def reason_of(error: Exception) -> str:
    """The operating system's word, else the error's own, else its kind; in one line."""
    return one_line(getattr(error, "strerror", None) or text_of(error) or type(error).__name__)


def text_of(error: BaseException) -> str:
    """Return the exception's message; of one whose __str__ raises, the words that Python has for
    it.
    """
    try:
        return str(error)
    except Exception:
        return "<exception str() failed>"


def readable(text: str) -> str:
    """In one line, and in characters that a terminal shows and does not obey; a long word without
    its middle.
    """
    return re.sub(
        r"\S{200,}", lambda word: f"{word[0][:80]}...{word[0][-20:]}", printable(text, kept="")
    )


def one_line(error: Exception | str) -> str:
    return " ".join((error if isinstance(error, str) else text_of(error)).split())[:200]


class PeerLost(RuntimeError):
    """A collective failed because another rank has gone: a consequence, not the cause."""


class StateLost(PeerLost):
    """The ranks that had the state, or a slice of it, have gone: the others cannot go on from what
    they have.
    """


class RanksDiffer(RuntimeError):
    """Ranks that must have the same have not, and nobody can tell which of them is wrong."""


class Corrupt(RanksDiffer):
    """What this rank has computed is wrong: others have computed the same again."""


def is_failure(code: int) -> bool:
    """Whether it is that of a process that neither finished nor stopped well."""
    return code not in (DONE, STOPPED)
