"""Errors that mean the same everywhere."""

from __future__ import annotations


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


class PeerLost(RuntimeError):
    """A collective failed because another rank has gone: a consequence, not the cause."""
