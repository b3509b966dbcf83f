"""How the ranks of a batch job ended: a file that the batch script names, and reads.

The script ignores exit codes: srun returns the largest one of all tasks, which may be that of a
task which srun itself has killed, and torchrun returns 1 even if every rank has stopped with a
snapshot.
"""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stepladder.core import typed_file
from stepladder.core.console import print_message
from stepladder.core.errors import (
    BAD_INPUT,
    FAILED,
    KILLED,
    STORAGE_FAILED,
    InputError,
    PeerLost,
    StorageFault,
)
from stepladder.core.numbers import read_env_number
from stepladder.core.output_file import write_output
from stepladder.core.waiting import retry

END_FILE_VARIABLE = "STEPLADDER_END_FILE"  # JOB:FILE, set by the batch script
END_FILE_NAME = "ended.json"
RECORD_TIMEOUT_S = 10.0  # Slurm kills 30 seconds after it has sent SIGTERM, by its default
RECORD_RETRY_INTERVAL_S = 0.2


@dataclass(frozen=True)
class _EndRecord:
    """The contents of the file.

    Args:
        code: An exit code of core/errors.py.
        job: The Slurm job.
        restart: How often Slurm had restarted it.
        step: The optimizer steps of the snapshot, if known.
        late: Whether the ranks stopped by themselves, before the job's time limit.
    """

    code: int
    job: str | None
    restart: int
    step: int | None = None
    late: bool = False


def identify_start() -> dict[str, Any]:
    """Return the job and its restart count; records of other starts do not count."""
    restart = 0
    if os.environ.get("SLURM_RESTART_COUNT"):
        restart = read_env_number(os.environ, "SLURM_RESTART_COUNT")
    return {"job": os.environ.get("SLURM_JOB_ID"), "restart": restart}


def find_end_file() -> Path | None:
    """Return the file that this job's batch script has named; another job's variable is ignored."""
    job, _, path = os.environ.get(END_FILE_VARIABLE, "").partition(":")
    return Path(path) if path and job == os.environ.get("SLURM_JOB_ID") else None


def make_end_file_absolute(folder: Path) -> None:
    """Make the file's path absolute, so that it stays valid if this process changes its folder."""
    path = find_end_file()
    if path is not None:
        os.environ[END_FILE_VARIABLE] = f"{os.environ['SLURM_JOB_ID']}:{folder / path}"


def write_end(code: int, step: int | None = None, late: bool = False) -> None:
    """Write the record, if a batch script has named a file for it.

    The first record of a start stays, unless the new one knows the step, or why the ranks of
    another node were killed.

    Args:
        code: An exit code of core/errors.py.
        step: The optimizer steps of the snapshot, if known.
        late: Whether the ranks stopped by themselves, before the job's time limit.
    """
    path = find_end_file()
    if path is None:
        return
    earlier = read_end()
    explains_kill = earlier is not None and (code, earlier["code"]) == (KILLED, FAILED)
    if earlier is not None and step is None and not explains_kill:
        return
    record = json.dumps({"code": code, "step": step, "late": late, **identify_start()})
    try:
        _write_record(path, f"{record}\n")
    except (InputError, StorageFault) as error:  # the run has ended all the same
        problem = error.problem if isinstance(error, InputError) else str(error)
        print_message(f"{problem}; the batch script takes the ranks' exit code instead")


def _write_record(path: Path, record: str) -> None:
    """Write the file, and try again for some seconds if its network file system is down.

    Args:
        path: The file.
        record: Its contents.

    Raises:
        InputError: The file cannot be written.
        StorageFault: The file system did not come back in time.
    """

    def write() -> None:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_output(path, record, END_FILE_VARIABLE)

    retry(write, StorageFault, RECORD_TIMEOUT_S, RECORD_RETRY_INTERVAL_S)


def choose_end_code(error: BaseException) -> int:
    """Return the code in the record of a process that an exception has ended."""
    if isinstance(error, InputError):
        return BAD_INPUT
    if isinstance(error, StorageFault):
        return STORAGE_FAILED
    return FAILED


class EndWriter:
    """Writes the record of this process at the end of a block: what it raised, or its exit code."""

    def __init__(self) -> None:
        # The exit code, which the block sets.
        self.code = 0

    def __enter__(self) -> EndWriter:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        # srun ends its tasks with the first one that fails. This process ends by itself.
        if "SLURM_STEP_ID" in os.environ:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if error is None:
            write_end(self.code)
        # After PeerLost the lost rank's record names the cause.
        elif isinstance(error, Exception) and not isinstance(error, PeerLost):
            write_end(choose_end_code(error))


def read_end(path: Path | None = None) -> dict[str, Any] | None:
    """Return this start's record, or None.

    Args:
        path: The file, by default the one that the batch script has named.
    """
    path = path or find_end_file()
    if path is None:
        return None
    try:
        record = asdict(typed_file.parse_json(typed_file.read_file(path), _EndRecord))
    except (OSError, ValueError):
        return None
    is_this_start = identify_start().items() <= record.items()
    return record if is_this_start else None


def remove_end() -> None:
    """Remove this start's record, since the ranks have been started again."""
    path = find_end_file()
    if path is not None and read_end() is not None:
        path.unlink(missing_ok=True)
