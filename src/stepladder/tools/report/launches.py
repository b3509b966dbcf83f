"""The launches of a script in its run directory: what was typed, where, and how it ended.

launches.jsonl  two lines per launcher, at its begin and its end      steps/  times of steps, per rank
log/            what each rank printed
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepladder.core.errors import BAD_INPUT, FAILED, InputError, as_input_error
from stepladder.core.jsonl import JsonlReader, Line, open_for_append
from stepladder.core.masking import mask_command
from stepladder.core.typed_file import convert, open_to_read
from stepladder.storage.run_dir_access import validate_run_dir_writable
from stepladder.storage.run_files import CONFIG_FILE
from stepladder.tools.steps.clock import StepRecorder
from stepladder.tools.steps.hook import environment, variables

LAUNCHES_FILE, STEPS_FOLDER = "launches.jsonl", "steps"


@dataclass(frozen=True)
class LaunchRecord:
    """One launcher. begun, ended: Unix time in seconds; ended and code: None as long as it has not
    ended.
    """

    script: str
    command: str
    host: str
    python: str
    begun: float
    ended: float | None = None
    code: int | None = None


def validate_script_run_dir(run_dir: Path) -> None:
    """Raises InputError where a script's launches cannot be kept."""
    if os.path.lexists(run_dir / CONFIG_FILE):
        raise InputError(
            f"{run_dir} is the run directory of a job: it has a {CONFIG_FILE}", "another --run-dir"
        )
    validate_run_dir_writable(run_dir)


def run_recorded(run_dir: Path, script: str, work: Callable[[], int]) -> int:
    """The exit code of `work()`, in whose ranks the times of steps are kept. Raises InputError
    without a place.
    """
    with as_input_error(
        f"run directory {run_dir} cannot be written", "--run-dir DIR in a place you can write to"
    ):
        (run_dir / STEPS_FOLDER).mkdir(parents=True, exist_ok=True)
        file = open_for_append(run_dir / LAUNCHES_FILE)
    with suppress(OSError):  # a file system without locks
        fcntl.flock(file, fcntl.LOCK_SH)  # of several nodes, each holds one
    os.set_inheritable(file, True)  # where this process becomes the script, that holds it
    begun, host = time.time(), socket.gethostname()
    key = f"{host} {os.getpid()} {begun:.3f}"
    command, python = mask_command(["stepladder", *sys.argv[1:]]), platform.python_version()
    about = {
        "script": script,
        "command": command,
        "host": host,
        "python": python,
        "begun": round(begun, 3),
    }
    write_line(file, {"launch": key, **about})
    code = FAILED
    try:
        with environment(**variables(StepRecorder, folder=(run_dir / STEPS_FOLDER).absolute())):
            code = work()
    except InputError:
        code = BAD_INPUT
        raise
    finally:
        write_line(file, {"launch": key, "ended": round(time.time(), 3), "code": code})
        os.close(file)
    return code


def write_line(file: int, line: dict[str, Any]) -> None:
    os.write(file, f"{json.dumps(line)}\n".encode())


def read_launches(run_dir: Path) -> tuple[list[LaunchRecord], list[str]]:
    """In the order of their begin, and what was left out. Raises InputError where there is none."""
    lines = JsonlReader(run_dir / LAUNCHES_FILE, lambda line: isinstance(line.get("launch"), str))
    found: dict[str, Line] = {}
    for said in lines.read_new():
        found.setdefault(said.pop("launch"), {}).update(said)
    launches, damage = [], ""
    for said in found.values():
        try:
            launches.append(convert(said, LaunchRecord))
        except ValueError as error:
            damage = f": {error}"
    if not launches:
        raise InputError(
            f"{run_dir} is damaged: {LAUNCHES_FILE} names no launch{damage}",
            f"mv {run_dir} {run_dir}.damaged",
        )
    return launches, [
        *lines.describe_damage(is_growing=True),
        *([f"a launch in {lines.path} is damaged{damage}"] if damage else []),
    ]


def is_running(run_dir: Path) -> bool:
    """Whether a launcher holds the file; a killed one's lock is gone with its process."""
    with open_to_read(run_dir / LAUNCHES_FILE) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return isinstance(error, BlockingIOError)
    return False


def describe_state(run_dir: Path, launches: list[LaunchRecord]) -> str:
    """In a word or two: of the last launch, and of those beside it on other nodes."""
    if is_running(run_dir):
        return "running"
    last = launches[-1]
    codes = [one.code for one in launches if (one.ended or last.begun) >= last.begun]
    if last.code is None:
        return "not running: its launcher ended without a record"
    code = max(code for code in codes if code is not None)
    return "finished" if code == 0 else f"ended with exit code {code}"
