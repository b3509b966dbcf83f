"""The record of job files that this user has trained: `verify` and `diff` run no others unasked.

A run directory may come from somebody else, with a job file in it, and running that file runs
their code. The record is a file in the user's state folder, with the path and the SHA-256 of each
job file. The path is part of it because a job file imports modules from its own folder. If the
record cannot be written, nothing is recorded, and the user is asked.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from stepladder.core import durable
from stepladder.core.errors import InputError
from stepladder.core.folders import get_state_folder, validate_ownership
from stepladder.core.jsonl import append_record, format_line, read_last_lines
from stepladder.core.typed_file import hash_file

MAX_RECORDED_JOBS = 1000
OWN_PACKAGE = Path(__file__).parents[1]  # the recipes in it are trusted


def record_trained_job(job_file: Path) -> None:
    """Record that this user trains a job file."""
    if job_file.resolve().is_relative_to(OWN_PACKAGE):
        return
    with suppress(OSError, InputError):  # no home folder, or one that cannot be written
        entry = _make_entry(job_file)
        entries = read_entries()
        if entry["sha256"] is None or entry in entries:
            return
        record = record_path()
        durable.make_folder(record.parent)
        if len(entries) < MAX_RECORDED_JOBS:
            append_record(record, entry)
        else:
            newest = [*entries[-MAX_RECORDED_JOBS // 2 :], entry]
            durable.write(record, "".join(map(format_line, newest)))


def was_trained_before(job_file: Path) -> bool:
    """Return whether this user has trained this job file, with this content and at this path."""
    with suppress(OSError, InputError):
        return _make_entry(job_file) in read_entries()
    return False


def record_path() -> Path:
    """Return the path of the record."""
    return get_state_folder() / "trained.jsonl"


def _make_entry(job_file: Path) -> dict[str, str | None]:
    """Return the line of a job file."""
    return {"path": str(job_file.resolve()), "sha256": hash_file(job_file)}


def read_entries() -> list[dict[str, str | None]]:
    """Return the lines of the record. Raises InputError if another user may have written it."""
    record = record_path()
    if not record.exists():
        return []
    validate_ownership(record)
    return [line for line in read_last_lines(record) if line.keys() == {"path", "sha256"}]
