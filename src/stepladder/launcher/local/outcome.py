"""How a group of ranks may end, what is said of it, and the exit code."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from stepladder.core.errors import InputError
from stepladder.core.exit_codes import BAD_INPUT, DONE, FAILED
from stepladder.launcher.diagnose.cause import cause_of_error, cause_of_signal
from stepladder.rank.error_record import RankError


@dataclass(frozen=True)
class Success:
    """code: DONE, or STOPPED: all that is to be kept is in a snapshot."""

    code: int = DONE


@dataclass(frozen=True)
class Refused:
    """A rank has found bad input, and so would all others."""

    error: RankError
    code = BAD_INPUT

    @property
    def text(self) -> str:
        return f"rank {self.error.rank} failed: {self.error.name}: {self.error.text}"

    @property
    def input_error(self) -> InputError:
        return InputError(self.error.text, self.error.hint)


class _Failure:
    """What failures have in common. Each has a `rank`, the one to look at, and a `text`: what happened."""

    code = FAILED

    @property
    def cause(self) -> str:
        """The likely cause with a HINT, or "" where the text says enough itself."""
        return ""

    @property
    def is_consequence(self) -> bool:
        """Whether the cause must lie elsewhere: with ranks of another node."""
        return False

    def is_by(self, number: int) -> bool:
        """Whether this signal ended the rank."""
        return False


@dataclass(frozen=True)
class Raised(_Failure):
    """A rank has raised an exception."""

    error: RankError

    @property
    def rank(self) -> int:
        return self.error.rank

    @property
    def text(self) -> str:
        at = "" if self.error.step is None else f" at step {self.error.step}"
        first = self.error.text.partition("\n")[0][:200]  # empty for a plain `assert`
        return f"rank {self.rank} failed{at}: {self.error.name}: {first}".rstrip(": ")

    @property
    def cause(self) -> str:
        return cause_of_error(self.error.kind)

    @property
    def is_consequence(self) -> bool:
        return self.error.is_consequence


@dataclass(frozen=True)
class Killed(_Failure):
    """A signal has ended a rank."""

    rank: int
    number: int
    out_of_memory: bool = False

    @property
    def text(self) -> str:
        return f"rank {self.rank} was killed by {name_of(self.number)}"

    @property
    def cause(self) -> str:
        return cause_of_signal(self.number, self.out_of_memory)

    def is_by(self, number: int) -> bool:
        return self.number == number


@dataclass(frozen=True)
class Exited(_Failure):
    """A rank has ended by itself, with an exit code and nothing more."""

    rank: int
    exit_code: int

    @property
    def text(self) -> str:
        return f"rank {self.rank} ended with exit code {self.exit_code}"


@dataclass(frozen=True)
class Stalled(_Failure):
    """The ranks could not go on together. rank: the one to look at, or None.  text: who kept others waiting."""

    rank: int | None
    text: str


@dataclass(frozen=True)
class Interrupted(_Failure):
    """The launcher was asked to stop, and the ranks, of a script, did not end well."""

    number: int
    rank: int | None = None

    @property
    def text(self) -> str:
        return f"stopped by {name_of(self.number)}"


def name_of(number: int) -> str:
    """A signal's; most real-time signals have none."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


Failure = Raised | Killed | Exited | Stalled | Interrupted
Outcome = Success | Refused | Failure
