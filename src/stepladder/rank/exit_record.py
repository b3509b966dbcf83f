"""How the ranks of a batch job ended, in their own word: a file that the batch script names, and
believes.

It believes no exit code: srun gives the largest of all tasks, which may be that of one which it
killed itself, and torchrun gives 1 where every rank has stopped well."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stepladder.core import stored
from stepladder.core.console import say
from stepladder.core.errors import (
    BAD_INPUT,
    FAILED,
    KILLED,
    NO_FILE,
    InputError,
    PeerLost,
    StorageFault,
)
from stepladder.core.numbers import number_in
from stepladder.core.output_file import write_output

END_FILE = "STEPLADDER_END_FILE"  # JOB:FILE, set by the batch script
NAME = "ended.json"


@dataclass(frozen=True)
class EndWord:
    """The word in a file. job, restart: of the start that it is about."""

    code: int
    job: str | None
    restart: int
    step: int | None = None
    late: bool = False


def this_start() -> dict[str, Any]:
    """Which start of which job this is; the word of another start says nothing about this one."""
    restart = (
        number_in(os.environ, "SLURM_RESTART_COUNT") if os.environ.get("SLURM_RESTART_COUNT") else 0
    )
    return {"job": os.environ.get("SLURM_JOB_ID"), "restart": restart}


def end_file() -> Path | None:
    """The file, where this job's batch script has named it: a variable of another origin is left
    alone.
    """
    job, _, place = os.environ.get(END_FILE, "").partition(":")
    return Path(place) if place and job == os.environ.get("SLURM_JOB_ID") else None


def keep_end_file(folder: Path) -> None:
    """The file is meant from that folder, wherever this process goes."""
    path = end_file()
    if path is not None:
        os.environ[END_FILE] = f"{os.environ['SLURM_JOB_ID']}:{folder / path}"


def note_end(code: int, step: int | None = None, late: bool = False) -> None:
    """Leave the word, where a batch script asks for it. The first one of a start counts, but for a
    better one: one that knows the step, or why the ranks of other nodes have failed.

    code: of core/errors.py.  step: optimizer steps in the snapshot, where that is known.
    late: the ranks stopped by themselves, for the job's time limit.
    """
    path, said = end_file(), read_end()
    if path is None or (
        step is None and said is not None and (code, said["code"]) != (KILLED, FAILED)
    ):
        return
    word = json.dumps({"code": code, "step": step, "late": late, **this_start()})
    try:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_output(path, f"{word}\n", END_FILE)
    except InputError as error:  # the run has ended as it has, whoever hears of it
        say(f"{error.found}; the batch script takes the ranks' exit code instead")


def word_of(error: BaseException) -> int:
    """Return the word of a process that this exception ends."""
    words = {InputError: BAD_INPUT, StorageFault: NO_FILE}
    return next((word for kind, word in words.items() if isinstance(error, kind)), FAILED)


class ProcessEnd:
    """This process's word is the exit `code` that the block sets, or what it raised."""

    code = 0

    def __enter__(self) -> ProcessEnd:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if (
            "SLURM_STEP_ID" in os.environ
        ):  # srun ends its tasks with the first that fails: our end is our own
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if error is None:
            note_end(self.code)
        elif isinstance(error, Exception) and not isinstance(
            error, PeerLost
        ):  # else a lost rank is the cause
            note_end(word_of(error))


def read_end(path: Path | None = None) -> dict[str, Any] | None:
    """This start's word, or None. path: where to look, by default the batch script's place."""
    path = path or end_file()
    try:
        said = None if path is None else stored.loads(stored.read(path), EndWord)
    except (OSError, ValueError):
        return None
    return (
        asdict(said) if said is not None and this_start().items() <= asdict(said).items() else None
    )


def forget_end() -> None:
    """The ranks have been started again: what was said is no longer the end."""
    path = end_file()
    if path is not None and read_end() is not None:
        path.unlink(missing_ok=True)
