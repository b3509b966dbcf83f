"""The job files that this user has trained, so that `verify` and `diff` run no other one without
being told to.

A run directory may come from somebody else, with a job file beside it. The record is in the user's
state folder: a line per file, with its path and the SHA-256 of its bytes. The path counts too, for
a job file imports what lies beside it. Where the record cannot be written, nothing is remembered,
and the user is asked."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from stepladder.core import durable
from stepladder.core.errors import InputError
from stepladder.core.folders import get_state_folder, validate_ownership
from stepladder.core.jsonl import append_record, read_last_lines
from stepladder.core.typed_file import hash_file

MAX_LINES = 1000
PACKAGE = Path(__file__).parents[1]  # whose recipes need no trust of their own


def remember_job(job_file: Path) -> None:
    """Note that this user trains a job file."""
    if job_file.resolve().is_relative_to(PACKAGE):
        return
    with suppress(OSError, InputError):  # no home folder, or one that cannot be written
        entry = entry_of(job_file)
        known = entries()
        if entry["sha256"] is None or entry in known:
            return
        record = record_file()
        durable.make_folder(record.parent)
        if len(known) < MAX_LINES:
            append_record(record, entry)
        else:
            newest = [*known[-MAX_LINES // 2 :], entry]
            durable.write(record, "".join(f"{json.dumps(line)}\n" for line in newest))


def is_remembered(job_file: Path) -> bool:
    """Return whether this user has trained the job file as it is now, where it lies now."""
    with suppress(OSError, InputError):
        return entry_of(job_file) in entries()
    return False


def record_file() -> Path:
    return get_state_folder() / "trained.jsonl"


def entry_of(job_file: Path) -> dict[str, str | None]:
    return {"path": str(job_file.resolve()), "sha256": hash_file(job_file)}


def entries() -> list[dict[str, str | None]]:
    """Return what is remembered; nothing from a file that others may have written. Raises OSError,
    InputError.
    """
    record = record_file()
    if not record.exists():
        return []
    validate_ownership(record)
    return [line for line in read_last_lines(record) if line.keys() == {"path", "sha256"}]
