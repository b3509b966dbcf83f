"""The error of everything that a user can set right."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

# The command in a hint, but not the same letters within a path or the name of a package.
COMMAND_IN_HINT = re.compile(r"(?<![\w./-])slurm-lab(?= [a-z])")


class LabError(Exception):
    """What was set or found, why it does not work, and a HINT with the text to type.

    It is shown as one line, and the command ends with exit code 2.

    Args:
        problem: What is wrong, without a period.
        hint: What to type instead. It names the command `slurm-lab`.
    """

    def __init__(self, problem: str, hint: str) -> None:
        super().__init__(problem, hint)
        self.problem = problem
        self.hint = hint

    def __str__(self) -> str:
        return _escape_controls(f"{self.problem.removesuffix('.')}. HINT: {self.hint}")

    def make_hint_for(self, command: str) -> str:
        """Return the hint for a program that offers the lab under another command.

        Args:
            command: What a person types there in place of `slurm-lab`.
        """
        return COMMAND_IN_HINT.sub(command, self.hint)


@contextmanager
def as_lab_error(
    failed: str, hint: str, kinds: tuple[type[Exception], ...] = (OSError,)
) -> Iterator[None]:
    """Raise errors in the block as LabError, with their reason.

    Args:
        failed: What failed, before the colon.
        hint: What to type instead.
        kinds: The classes of errors, by default the operating system's.

    Raises:
        LabError: The block raised one of these errors.
    """
    try:
        yield
    except kinds as error:
        raise LabError(f"{failed}: {get_reason(error)}", hint) from error


def get_reason(error: Exception) -> str:
    """Return the reason of an error in one line: the operating system's, else its text or class."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(text.split())


def _escape_controls(text: str) -> str:
    """Return a text with its control characters escaped: a terminal would obey them."""
    characters = []
    for character in text:
        characters.append(character if character.isprintable() else ascii(character)[1:-1])
    return "".join(characters)
