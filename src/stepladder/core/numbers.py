"""Numbers and times that people and batch systems write, read in one place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from stepladder.core.errors import InputError

MOST = 2**53  # what a double and JSON hold exactly
MOST_PORT = 65535
SHORTEST_WAIT, LONGEST_WAIT = 1e-3, 1e9  # seconds


def whole(text: str, least: int = 0, most: int = MOST) -> int | None:
    """The number that `text` is, in ASCII digits alone; None where it is none, or not from `least`
    to `most`.

    Neither str.isdigit nor int would do: the one is true of a raised 2, which the other refuses,
    and int takes underscores, spaces and thousands of digits."""
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(MOST))):
        return None
    return int(text) if least <= int(text) <= most else None


def number_in(
    env: Mapping[str, str], name: str, default: int | None = None, most: int = MOST
) -> int:
    """The number that an environment variable is; `default` where it is not set. Raises InputError."""
    text = env.get(name)
    if text is None and default is not None:
        return default
    number = whole(text or "", most=most)
    if number is None:
        found = "is not set" if text is None else f"is {text!r}, not a number"
        by_slurm = name.startswith("SLURM_")
        other = (
            "start the ranks with srun, which sets it"
            if by_slurm
            else "unset RANK to run one process"
        )
        raise InputError(f"{name} {found}", f"set {name} to a number, or {other}")
    return number


def refuse_outside(config: Any, least: float, most: float, *names: str) -> None:
    """Raises InputError where one of these fields of a dataclass is not from `least` to `most`."""
    defaults = {field.name: field.default for field in fields(config)}
    for name in names:
        flag, value = f"--{name.replace('_', '-')}", getattr(config, name)
        if not least <= value <= most:
            raise InputError(
                f"{flag} {value:.12g} is not from {least:.12g} to {most:.12g}",
                f"{flag} {defaults[name]}",
            )


def is_wait(text: str, least: float = SHORTEST_WAIT) -> bool:
    """Whether it is a time to wait, in seconds."""
    try:
        return text.isascii() and "_" not in text and least <= float(text) <= LONGEST_WAIT
    except ValueError:
        return False


def refuse_wait(flag: str, seconds: float, least: float = SHORTEST_WAIT) -> None:
    """Raises InputError for a number of seconds that nobody can wait: nan, infinite, or below
    `least`.
    """
    if not is_wait(str(seconds), least):
        raise InputError(f"{flag} {seconds:g} is not a time to wait", f"{flag} 60")
