"""starts.jsonl: when and where each attempt of a run began, with which command, and when it ended.

It is for people: no run reads it. A start without an end was killed, or is under way.
"""

from __future__ import annotations

import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from stepladder.core.jsonl import JsonlReader, Line, append_record, is_count
from stepladder.core.masking import mask_command
from stepladder.core.typed_file import convert
from stepladder.storage.run_files import STARTS_FILE


@dataclass(frozen=True)
class StartRecord:
    """One attempt.

    Args:
        begun: Unix time in seconds.
        host: Where the first rank began.
        command: As it was typed, without secrets.
        ended: Unix time in seconds; None if it was killed, or is under way.
        failed: Whether an error ended it.
    """

    begun: float
    host: str
    command: str
    ended: float | None = None
    failed: bool = False


def record_begin(run_dir: Path, attempt: int) -> None:
    """Append that an attempt begins. A file that cannot be written is no reason to end a run."""
    line = {
        "attempt": attempt,
        "begun": round(time.time(), 3),
        "host": socket.gethostname(),
        "command": describe_command(sys.argv),
    }
    with suppress(OSError):
        append_record(run_dir / STARTS_FILE, line)


def record_end(run_dir: Path, attempt: int, failed: bool) -> None:
    """Append that an attempt ends."""
    line = {"attempt": attempt, "ended": round(time.time(), 3), "failed": failed}
    with suppress(OSError):
        append_record(run_dir / STARTS_FILE, line)


def describe_command(argv: list[str]) -> str:
    """Return the command of this process as it is typed in a shell, without secrets."""
    program, *args = argv or [""]
    path = Path(program)
    if path.stem in ("stepladder", "__main__"):
        return mask_command(["stepladder", *args])
    return mask_command(["python", program, *args])


def read_start_records(run_dir: Path) -> dict[int, StartRecord]:
    """Return the start of each attempt. Damaged lines are left out."""
    reader = JsonlReader(run_dir / STARTS_FILE, _has_attempt)
    records = {}
    for attempt, values in reader.read_joined("attempt").items():
        with suppress(ValueError):
            records[attempt] = convert(values, StartRecord)
    return records


def _has_attempt(line: Line) -> bool:
    return is_count(line.get("attempt"))
