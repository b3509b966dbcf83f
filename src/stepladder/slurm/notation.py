"""How Slurm writes names of nodes and times."""

from __future__ import annotations

import itertools
import math
import re

from stepladder.core.errors import InputError


def hostnames(text: str) -> list[str]:
    """The nodes of a Slurm node list: `rack[1-2]n[03-04],login` names five. Raises InputError."""
    parts = re.findall(r"(?:[^,\[\]\s]|\[[\d,-]+\])+", text)
    if ",".join(parts) != text or not parts:
        raise InputError(f"{text!r} is not a node list", "names as in gpu[1-4,7],login")
    return [name for part in parts for name in _expand(part)]


def _expand(part: str) -> list[str]:
    pieces = re.split(r"\[([^\]]*)\]", part)  # text, numbers, text, numbers, ..., text
    choices = [_numbers(piece) if place % 2 else [piece] for place, piece in enumerate(pieces)]
    return ["".join(chosen) for chosen in itertools.product(*choices)]


def _numbers(text: str) -> list[str]:
    found = []
    for span in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", span)
        if match is None:
            raise InputError(f"[{text}] in a node list is not a range", "numbers as in gpu[1-4,7]")
        first, last = match.groups()
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1)]
    return found


def seconds_of(text: str) -> float:
    """Slurm's way to write a time: MM, MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS. Raises InputError."""
    if text.lower() in ("infinite", "unlimited", "n/a"):
        return math.inf
    if not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", text):
        raise InputError(
            f"--time {text!r} is not a time as Slurm has it", "--time 30 (minutes), 2:00:00, 1-12:00:00"
        )
    days, _, rest = text.rpartition("-")
    numbers = list(map(int, rest.split(":")))
    if days:
        hours, minutes, seconds = [*numbers, 0, 0][:3]
    else:
        hours, minutes, seconds = {1: [0, *numbers, 0], 2: [0, *numbers]}.get(len(numbers), numbers)
    return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds
