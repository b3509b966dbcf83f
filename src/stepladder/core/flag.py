"""What a flag of the command line needs beside its name, its type and its default."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

from stepladder.core.errors import InputError
from stepladder.core.numbers import MAX_INTEGER, validate_wait_time

# The sections of `train --help`, after the flags to start with.
TRAINING = "Training"
MEMORY = "Memory and speed"
PROCESSES = "Processes and machines"
FAULTS = "Faults and checks"
OUTPUT = "Snapshots and output"


@dataclass(frozen=True)
class Flag:
    """A flag, as the annotation of a field or a parameter: `Annotated[int, Flag("Passes.")]`.

    Args:
        help: What the flag does, for --help.
        group: The section of --help that shows it.
        metavar: What --help shows for the value.
        default: What --help shows as the default, if the field's default does not say it.
        minimum: The smallest value.
        maximum: The largest value.
        is_wait: The value is a time to wait, in seconds.
        is_path: A text that is checked as a path.
        hidden: --help does not show the flag.
        python_only: There is no flag: only Python code sets the field.
        free_on_resume: The value may change when a run is resumed: it says who computes and where,
            not what is computed.
        may_differ: The value may differ between ranks: the first rank's is used, or nothing depends
            on it.
    """

    help: str = ""
    group: str = "Options"
    _: KW_ONLY
    metavar: str | None = None
    default: str = ""
    minimum: float | None = None
    maximum: float | None = None
    is_wait: bool = False
    is_path: bool = False
    hidden: bool = False
    python_only: bool = False
    free_on_resume: bool = False
    may_differ: bool = False

    def validate(self, name: str, value: Any) -> None:
        """Raise InputError if the value of the field `name` is below or above its limits."""
        flag = f"--{name.replace('_', '-')}"
        if self.minimum is None or value is None:
            return
        if self.is_wait:
            validate_wait_time(flag, value, self.minimum)
            return
        maximum = self.maximum or MAX_INTEGER
        if value < self.minimum:
            raise InputError(f"{flag} {value} is too small", f"{flag} {self.minimum} or more")
        if value > maximum:
            raise InputError(f"{flag} {value} is too large", f"{flag} {maximum} or less")
