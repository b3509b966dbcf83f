"""The one kind of error a user can mend: shown as one line, exit code 2, no traceback."""

from __future__ import annotations


class InputError(Exception):
    """Bad input: what was set, what was found, and a HINT with the text to type.

    Raise it at the boundary, before anything is written. Programming errors stay ordinary
    exceptions and keep their traceback.
    """

    def __init__(self, found: str, hint: str) -> None:
        super().__init__(found, hint)
        self.found = found
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.found}. HINT: {self.hint}"
