"""The ways in which a group of ranks can end, and how each is reported."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import TypeGuard

from stepladder.core.errors import DONE, InputError
from stepladder.launcher.diagnose.causes import ERROR_CAUSES, KILLED_FOR_MEMORY, SIGNAL_CAUSES
from stepladder.rank.error_record import ErrorKind, RankError

MAX_SUMMARY_CHARACTERS = 300
MAX_NAME_CHARACTERS = 80


@dataclass(frozen=True)
class Success:
    """The ranks have finished, or have stopped after their state was written to a snapshot.

    Args:
        code: The exit code, DONE or STOPPED.
    """

    code: int = DONE


@dataclass(frozen=True)
class BadInput:
    """A rank has found bad input, as all other ranks would."""

    error: RankError

    @property
    def text(self) -> str:
        """What happened, in one sentence."""
        return f"rank {self.error.rank} failed: {self.error.name}: {self.error.text}"

    @property
    def input_error(self) -> InputError:
        """The error for the user, who can correct the input."""
        return InputError(self.error.text, self.error.hint)


@dataclass(frozen=True)
class Raised:
    """A rank has raised an exception."""

    error: RankError

    @property
    def rank(self) -> int:
        """The rank to look at first."""
        return self.error.rank

    @property
    def text(self) -> str:
        """What happened, in one sentence."""
        error = self.error
        if error.kind in (ErrorKind.CORRUPT, ErrorKind.RANKS_DIFFER):
            return error.text
        if error.kind is ErrorKind.STORAGE:
            return f"{self._subject}: {error.text}"
        first_line = error.text.partition("\n")[0][:MAX_SUMMARY_CHARACTERS]
        # The message is empty for a plain `assert`.
        return f"{self._subject}: {error.name}: {first_line}".rstrip(": ")

    @property
    def summary(self) -> str:
        """The text that files may keep, without the exception's message."""
        return f"{self._subject}: {self.error.name[:MAX_NAME_CHARACTERS]}"

    @property
    def cause(self) -> str:
        """The likely cause with a HINT, or ""."""
        cause = ERROR_CAUSES.get(self.error.kind)
        return f"cause: {cause}" if cause else ""

    @property
    def _subject(self) -> str:
        at_step = "" if self.error.step is None else f" at step {self.error.step}"
        return f"rank {self.rank} failed{at_step}"


@dataclass(frozen=True)
class Killed:
    """A signal has ended a rank.

    Args:
        rank: The rank.
        signal_number: The signal.
        is_out_of_memory: Whether the kernel has killed a process for lack of memory meanwhile.
    """

    rank: int
    signal_number: int
    is_out_of_memory: bool = False

    @property
    def text(self) -> str:
        """What happened, in one sentence."""
        return f"rank {self.rank} was killed by {signal_name(self.signal_number)}"

    @property
    def summary(self) -> str:
        """The text that files may keep."""
        return self.text

    @property
    def cause(self) -> str:
        """The likely cause with a HINT, or ""."""
        if self.signal_number == signal.SIGKILL and self.is_out_of_memory:
            return f"cause: {KILLED_FOR_MEMORY}"
        cause = SIGNAL_CAUSES.get(self.signal_number)
        return f"cause: {cause}" if cause else ""


@dataclass(frozen=True)
class Exited:
    """A rank has ended by itself, with an exit code and no exception.

    Args:
        rank: The rank.
        exit_code: Its exit code.
        is_sys_exit: Whether the job has called sys.exit().
    """

    rank: int
    exit_code: int
    is_sys_exit: bool = False
    cause = ""

    @property
    def text(self) -> str:
        """What happened, in one sentence."""
        return f"rank {self.rank} ended with exit code {self.exit_code}"

    @property
    def summary(self) -> str:
        """The text that files may keep."""
        return self.text


@dataclass(frozen=True)
class _GroupFailure:
    """A failure of the ranks together.

    Args:
        rank: The rank to look at first, or None.
        text: What happened, in one sentence.
    """

    rank: int | None
    text: str
    cause = ""

    @property
    def summary(self) -> str:
        """The text that files may keep."""
        return self.text[:MAX_SUMMARY_CHARACTERS]


class Stalled(_GroupFailure):
    """The ranks could not continue together. The text says which rank made the others wait."""


class Mismatched(_GroupFailure):
    """Ranks have called different collectives, as they would after a restart: the code is wrong.

    The text names two calls with their lines, and the usual cause.
    """


class Unrecoverable(_GroupFailure):
    """The remaining ranks need state that only lost ranks had. The losses were reported before."""

    def __init__(self, text: str) -> None:
        super().__init__(None, text)


# Each failure has a `rank` to look at first, or None; a `text`: what happened; a `cause` with a
# HINT, or "" if the text is enough; and a `summary` that files may keep: the message of an
# exception may contain a secret.
Failure = Raised | Killed | Exited | Stalled | Mismatched | Unrecoverable
Outcome = Success | BadInput | Failure


def is_consequence(outcome: Outcome) -> TypeGuard[Unrecoverable | Raised]:
    """Return whether ranks failed because a rank of another node had failed."""
    if isinstance(outcome, Unrecoverable):
        return True
    return isinstance(outcome, Raised) and outcome.error.is_consequence


def signal_name(signal_number: int) -> str:
    """Return the name of a signal; most real-time signals have none."""
    try:
        return signal.Signals(signal_number).name
    except ValueError:
        return f"signal {signal_number}"
