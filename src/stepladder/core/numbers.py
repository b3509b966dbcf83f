"""Numbers and times that people and batch systems write, read in one place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from numbers import Integral
from typing import Any

from stepladder.core.errors import InputError

MAX_INTEGER = 2**53  # what a double and JSON hold exactly
MAX_PORT = 65535
MIN_WAIT_S = 1e-3
MAX_WAIT_S = 1e9


def parse_whole_number(text: str, minimum: int = 0, maximum: int = MAX_INTEGER) -> int | None:
    """Return the number that a text is, in ASCII digits alone, or None.

    Neither str.isdigit nor int would do: isdigit accepts a raised 2, which int refuses, and int
    accepts underscores, spaces and thousands of digits.

    Args:
        text: The text.
        minimum: The smallest number.
        maximum: The largest number.

    Returns:
        The number; None if the text is no number, or is out of range.
    """
    if not text.isascii() or not text.isdigit():
        return None
    if len(text) > len(str(MAX_INTEGER)):
        return None
    number = int(text)
    return number if minimum <= number <= maximum else None


def format_count(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless it is 1, such as "2 processes"."""
    if number == 1:
        return f"1 {noun}"
    ending = "es" if noun.endswith("s") else "s"
    return f"{number} {noun}{ending}"


def format_ranks(ranks: Sequence[object]) -> str:
    """Return ranks as part of a sentence, such as "rank 1" or "ranks 1, 2"."""
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"


def validate_count(name: str, value: object, minimum: int = 1) -> None:
    """Raise InputError unless an argument of a Python call is a whole number, or too small."""
    is_whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_whole or value < minimum:  # type: ignore[operator]
        raise InputError(f"{name}={value!r:.60}", f"{name}= {minimum} or more, a whole number")


def read_env_number(
    env: Mapping[str, str], name: str, default: int | None = None, maximum: int = MAX_INTEGER
) -> int:
    """Return the number in an environment variable.

    Args:
        env: The environment.
        name: The variable.
        default: The number if the variable is not set.
        maximum: The largest number.

    Raises:
        InputError: The variable is no number, or is not set and there is no default.
    """
    text = env.get(name)
    if text is None and default is not None:
        return default
    number = parse_whole_number(text or "", maximum=maximum)
    if number is not None:
        return number
    problem = f"is {text!r}, not a number"
    if text is None:
        problem = "is not set"
    if name.startswith("SLURM_"):
        alternative = "start the ranks with srun, which sets it"
    elif name.startswith(("OMPI_", "PMI_", "MPI_")):
        alternative = "start the ranks with mpirun, which sets it"
    else:
        alternative = "unset RANK to run one process"
    raise InputError(f"{name} {problem}", f"set {name} to a number, or {alternative}")


def validate_range(config: Any, minimum: float, maximum: float, *names: str) -> None:
    """Raise InputError if one of these fields of a dataclass is out of range."""
    defaults = {field.name: field.default for field in fields(config)}
    for name in names:
        flag = f"--{name.replace('_', '-')}"
        value = getattr(config, name)
        if not minimum <= value <= maximum:
            raise InputError(
                f"{flag} {value:.12g} is not from {minimum:.12g} to {maximum:.12g}",
                f"{flag} {defaults[name]}",
            )


def is_wait_time(text: str, minimum: float = MIN_WAIT_S) -> bool:
    """Tell whether a text is a number of seconds that a program can wait."""
    try:
        return text.isascii() and "_" not in text and minimum <= float(text) <= MAX_WAIT_S
    except ValueError:
        return False


def validate_wait_time(flag: str, seconds: float, minimum: float = MIN_WAIT_S) -> None:
    """Raise InputError if nobody can wait so many seconds: nan, infinite, or below the minimum."""
    if not is_wait_time(str(seconds), minimum):
        raise InputError(f"{flag} {seconds:g} is not a time to wait", f"{flag} 60")
