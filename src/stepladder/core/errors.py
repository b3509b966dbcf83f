"""Errors and exit codes that mean the same everywhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

DONE, FAILED, BAD_INPUT = 0, 1, 2
STOPPED = 75  # stopped with a snapshot, to be started again: sysexits' EX_TEMPFAIL
INTERRUPTED = 130  # Ctrl-C before there was anything to stop well
KILLED, TERMINATED = 137, 143  # a launcher's word for ranks that had none: SIGKILL, or they ended at SIGTERM


class InputError(Exception):
    """Bad input: what was set, what was found, and a HINT with the text to type. One line, exit code 2.

    Raise it at the boundary, before anything is written. Programming errors stay ordinary
    exceptions and keep their traceback.
    """

    def __init__(self, found: str, hint: str) -> None:
        super().__init__(found, hint)
        self.found = found
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.found}. HINT: {self.hint}"


@contextmanager
def naming(failed: str, hint: str) -> Iterator[None]:
    """The operating system's errors in the block as InputError: what failed, and the system's reason."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{failed}: {error.strerror or error}", hint) from error


class PeerLost(RuntimeError):
    """A collective failed because another rank has gone: a consequence, not the cause."""


def is_failure(code: int) -> bool:
    """Whether it is that of a process that neither finished nor stopped well."""
    return code not in (DONE, STOPPED)
