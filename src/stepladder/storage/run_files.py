"""The files of a run directory: their names, and functions that list and read them."""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from stepladder.core import typed_file
from stepladder.core.errors import InputError, get_reason
from stepladder.storage.lock import (
    AGENTS_LOCK_FILE,
    LINK_LOCK_FILE,
    LOCK_FILE,
    RENDEZVOUS_LOCK_FILE,
)

LEDGER_FOLDER = "ledger"
SNAPSHOTS_FOLDER = "snapshots"
MANIFEST_FILE = "manifest.json"
CONFIG_FILE = "config.json"
RESULT_FILE = "result.json"
METRICS_FILE = "metrics.jsonl"
TIMING_FILE = "timing.jsonl"
STARTS_FILE = "starts.jsonl"
MAX_SUGGESTED_RUNS = 3
RUN_SCHEMA = 1  # version of config.json and result.json
# The key, and its type, that must be in each of these files.
REQUIRED_KEYS: dict[str, tuple[str, type]] = {
    CONFIG_FILE: ("definition", dict),
    RESULT_FILE: ("steps", int),
}
# All files and folders that any part of stepladder writes in a run directory. They are checked
# before the start, so that days of training do not end at a folder that has a file's name.
RUN_FILES = (
    CONFIG_FILE,
    RESULT_FILE,
    METRICS_FILE,
    TIMING_FILE,
    STARTS_FILE,
    LOCK_FILE,
    LINK_LOCK_FILE,
    RENDEZVOUS_LOCK_FILE,
    AGENTS_LOCK_FILE,
    "rendezvous.json",
    "rendezvous.secret",
    "rendezvous.seats",
    "launches.jsonl",
    "loggers.json",
    "ended.json",
    "requeues.jsonl",
)
RUN_FOLDERS = (LEDGER_FOLDER, SNAPSHOTS_FOLDER, "tensorboard", "log", "steps")
FOLDERS_OF_FILES = ("log", "steps")  # they contain only files, each opened by its name
SNAPSHOT_NAME = re.compile("step_[0-9]{8,18}")
LEDGER_FILE_NAME = re.compile(r"attempt-([0-9]{4,12})\.rank-([0-9]{1,12})\.jsonl")


@contextmanager
def as_damage(path: Path, hint: str = "--fresh") -> Iterator[None]:
    """Raise as InputError what a program meets in the block that reads values of a damaged file."""
    try:
        yield
    except KeyError as error:
        raise InputError(f"{path} is damaged: {error} is missing", hint) from error
    except ValueError as error:
        raise InputError(f"{path} is damaged: {get_reason(error)}", hint) from error
    except (TypeError, AttributeError) as error:  # Python's words explain nothing
        raise InputError(f"{path} is damaged: a value has another type", hint) from error


def read_stored_json(run_dir: Path, name: str) -> dict[str, Any] | None:
    """Return the content of config.json or result.json, None if the file does not exist.

    Raises:
        InputError: If the file is damaged, or was written by a newer version.
    """
    with suppress(FileNotFoundError), as_damage(run_dir / name):
        value: dict[str, Any] = typed_file.parse_json(typed_file.read_file(run_dir / name), dict)
        validate_schema(value, run_dir / name)
        key, kind = REQUIRED_KEYS[name]
        typed_file.convert(value[key], kind, key)
        return value
    return None


def validate_schema(content: dict[str, Any], path: Path) -> None:
    """Raise InputError if a newer stepladder wrote the file: its keys may mean something else."""
    schema = content.get("schema", RUN_SCHEMA)
    if schema > RUN_SCHEMA:
        raise InputError(
            f"{path} was written by a newer stepladder: its schema is {schema},"
            f" this one knows {RUN_SCHEMA}",
            "pip install --upgrade stepladder, or another --run-dir",
        )


def suggest_run_dirs(folder: Path, *file_names: str) -> str:
    """Return the hint for a folder that is no run directory: the newest of those in it.

    Args:
        folder: The folder.
        *file_names: A run directory has one of these files.
    """
    files = [path for name in file_names for path in folder.glob(f"*/{name}")]
    files.sort(key=os.path.getmtime, reverse=True)
    newest = ", ".join(str(path.parent) for path in files[:MAX_SUGGESTED_RUNS])
    if newest:
        return f"its newest runs: {newest}"
    parent = next((parent for parent in folder.parents if parent.is_dir()), "..")
    return f"ls {shlex.quote(str(parent))}"


def list_ledgers(run_dir: Path) -> Iterator[tuple[int, int]]:
    """Yield the attempt and the rank of each ledger file."""
    for path in (run_dir / LEDGER_FOLDER).glob("attempt-*"):
        if match := LEDGER_FILE_NAME.fullmatch(path.name):
            yield int(match[1]), int(match[2])


def list_attempts(run_dir: Path) -> set[int]:
    """Return the numbers of the attempts that have a ledger file."""
    return {attempt for attempt, _ in list_ledgers(run_dir)}


def list_snapshots(folder: Path) -> list[Path]:
    """Return the complete snapshots in a folder, oldest first."""
    complete = [path for path in folder.glob("step_*") if path.is_dir() and not path.suffix]
    # By length first: a step may have more than the eight digits that its number is padded to.
    return sorted(complete, key=lambda path: (len(path.name), path.name))


def find_snapshots(run_dir: Path) -> dict[int, Path]:
    """Return the complete snapshots of a run, by the number of steps that were done."""
    return {
        int(path.name.removeprefix("step_")): path
        for path in list_snapshots(run_dir / SNAPSHOTS_FOLDER)
        if SNAPSHOT_NAME.fullmatch(path.name)
    }


def finite_or_none(value: float) -> float | None:
    """Return the value, None for an infinity or NaN: JSON cannot represent them."""
    return value if math.isfinite(value) else None
