"""The launches of a script in its run directory: the command, the host, and how it ended.

launches.jsonl has two lines per launcher, at its begin and its end. The folder steps/ has the times
of steps by rank, and the folder log/ has what each rank printed.
"""

from __future__ import annotations

import fcntl
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

from stepladder.core.console import print_message
from stepladder.core.errors import BAD_INPUT, FAILED, InputError, as_input_error
from stepladder.core.jsonl import JsonlReader, format_line, open_for_append
from stepladder.core.masking import mask_command
from stepladder.core.typed_file import convert, open_to_read
from stepladder.storage.lock import try_lock
from stepladder.storage.run_dir_access import validate_run_dir_writable
from stepladder.storage.run_files import CONFIG_FILE
from stepladder.tools.probe.attach import make_listener_variables, temporary_environment
from stepladder.tools.report.step_recorder import StepRecorder

LAUNCHES_FILE = "launches.jsonl"
STEPS_FOLDER = "steps"


@dataclass(frozen=True)
class LaunchRecord:
    """One launcher of a script.

    Args:
        begun: Unix time in seconds.
        ended: Unix time in seconds; None as long as the launcher has not ended.
        code: Its exit code; None as long as it has not ended.
    """

    script: str
    command: str
    host: str
    python: str
    begun: float
    ended: float | None = None
    code: int | None = None


def validate_script_run_dir(run_dir: Path) -> None:
    """Raise InputError if the launches of a script cannot be recorded in the folder."""
    if os.path.lexists(run_dir / CONFIG_FILE):
        raise InputError(
            f"{run_dir} is the run directory of a job: it has a {CONFIG_FILE}", "another --run-dir"
        )
    validate_run_dir_writable(run_dir)


def run_recorded(run_dir: Path, script: str, work: Callable[[], int]) -> int:
    """Record the launch, and the times of steps on the ranks that `work()` starts.

    Earlier launches in the folder are kept, as those of a script that resumes by itself.

    Returns the exit code of `work()`. Raises InputError if the folder cannot be written.
    """
    with as_input_error(
        f"run directory {run_dir} cannot be written", "--run-dir DIR in a place you can write to"
    ):
        (run_dir / STEPS_FOLDER).mkdir(parents=True, exist_ok=True)
        _announce_earlier_launches(run_dir)
        file = open_for_append(run_dir / LAUNCHES_FILE)
    with suppress(OSError):  # a file system without locks
        fcntl.flock(file, fcntl.LOCK_SH)  # shared: each node's launcher holds one
    os.set_inheritable(file, True)  # if this process becomes the script, the script holds the lock
    begun = time.time()
    host = socket.gethostname()
    key = f"{host} {os.getpid()} {begun:.3f}"
    first_line = {
        "launch": key,
        "script": script,
        "command": mask_command(["stepladder", *sys.argv[1:]]),
        "host": host,
        "python": platform.python_version(),
        "begun": round(begun, 3),
    }
    _write_line(file, first_line)
    code = FAILED
    try:
        with temporary_environment(
            **make_listener_variables(StepRecorder, folder=(run_dir / STEPS_FOLDER).absolute())
        ):
            code = work()
    except InputError:
        code = BAD_INPUT
        raise
    finally:
        _write_line(file, {"launch": key, "ended": round(time.time(), 3), "code": code})
        os.close(file)
    return code


def _announce_earlier_launches(run_dir: Path) -> None:
    """Say that the folder has launches; those under way, on other nodes, belong to this one."""
    if (run_dir / LAUNCHES_FILE).exists() and not _is_running(run_dir):
        print_message(
            f"{run_dir} has earlier launches: this one is added to them, and `report` shows all."
            " HINT: another --run-dir begins anew"
        )


def _write_line(file: int, line: dict[str, Any]) -> None:
    os.write(file, format_line(line).encode())


def read_launches(run_dir: Path) -> tuple[list[LaunchRecord], list[str]]:
    """Return the launches in the order of their begin, and sentences about damaged lines.

    Raises InputError if there is no launch.
    """
    reader = JsonlReader(run_dir / LAUNCHES_FILE, lambda line: isinstance(line.get("launch"), str))
    launches = []
    damage = ""
    for fields in reader.read_joined("launch").values():
        try:
            launches.append(convert(fields, LaunchRecord))
        except ValueError as error:
            damage = f": {error}"
    if not launches:
        raise InputError(
            f"{run_dir} is damaged: {LAUNCHES_FILE} names no launch{damage}",
            f"mv {run_dir} {run_dir}.damaged",
        )
    warnings = list(reader.describe_damage(is_growing=True))
    if damage:
        warnings.append(f"a launch in {reader.path} is damaged{damage}")
    return launches, warnings


def _is_running(run_dir: Path) -> bool:
    """Return whether a launcher holds the lock; the kernel releases that of a killed process."""
    with open_to_read(run_dir / LAUNCHES_FILE) as file, suppress(OSError):
        return not try_lock(file.fileno())
    return False


def describe_state(run_dir: Path, launches: list[LaunchRecord]) -> str:
    """Return the state of the last launch and of those at the same time on other nodes."""
    if _is_running(run_dir):
        return "running"
    last = launches[-1]
    if last.code is None:
        return "not running: its launcher ended without a record"
    concurrent = [launch for launch in launches if (launch.ended or last.begun) >= last.begun]
    code = max(launch.code for launch in concurrent if launch.code is not None)
    return "finished" if code == 0 else f"ended with exit code {code}"
