"""Handing jobs to Slurm, and asking after them.

Every question has a time limit: on a broken cluster some commands wait for ever.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepladder.core.console import print_message
from stepladder.core.errors import InputError
from stepladder.core.folders import get_state_folder
from stepladder.core.jsonl import JsonlReader, append_record, fits_dataclass
from stepladder.core.numbers import parse_whole_number
from stepladder.core.paths import parse_path
from stepladder.slurm.job import BatchJob, render, secrets_of

SECONDS_TO_ANSWER = 30.0
SECONDS_WHILE_BUSY, SECONDS_BETWEEN_TRIES = 120.0, 1.0
SECONDS_BETWEEN_READS = 0.5
SECONDS_BETWEEN_QUESTIONS = 3.0  # to Slurm's controller, which serves everybody
PIECE_BYTES = 1 << 20  # of a job's output
SYSTEM_CONF = Path("/etc/slurm/slurm.conf")
NO_SLURM = "go to a login node of the cluster, or practise here: stepladder lab up --nodes 2"


class NotKnown(InputError):
    """Slurm answered, and said no."""


class Busy(InputError):
    """Slurm's controller is there, and had no time to answer: that says nothing of what was asked."""


def lab_conf() -> Path:
    """The configuration of the user's `stepladder lab`, while it is up."""
    return get_state_folder() / "lab" / "slurm.conf"


def slurm_environment() -> dict[str, str]:
    """SLURM_CONF for Slurm's commands: the user's, else the system's, else that of `stepladder
    lab`.
    """
    if os.environ.get("SLURM_CONF") or SYSTEM_CONF.exists() or not lab_conf().exists():
        return {}
    return {"SLURM_CONF": str(lab_conf())}


def ask(
    *command: str,
    text: str = "",
    seconds: float = SECONDS_TO_ANSWER,
    env: Mapping[str, str] | None = None,
) -> str:
    """A Slurm command's answer. Raises InputError where there is no Slurm, no answer (Busy: not in
    time), or a refusal (NotKnown).

    text: its standard input.  env: further variables of its environment.
    """
    conf = os.environ.get("SLURM_CONF")
    if (
        conf and not parse_path("SLURM_CONF", conf).exists()
    ):  # Slurm's commands would wait for a minute
        raise InputError(
            f"SLURM_CONF={conf} is not there", "unset SLURM_CONF, or stepladder lab up --nodes 2"
        )
    try:
        done = subprocess.run(
            command,
            input=text,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
            env={**os.environ, **slurm_environment(), **(env or {})},
        )
    except FileNotFoundError as error:
        raise InputError(
            f"there is no Slurm on this machine ({command[0]} is not found)", NO_SLURM
        ) from error
    except subprocess.TimeoutExpired as error:
        raise Busy(
            f"Slurm has not answered {command[0]} within {seconds:g} s", "scontrol ping"
        ) from error
    if done.returncode == 0:
        return done.stdout
    lines = (re.sub(r"(^\w+: )?(error|fatal): ", "", line) for line in done.stderr.splitlines())
    said = (
        "; ".join(line for line in lines if line and not line.startswith("Try "))
        or f"exit code {done.returncode}"
    )
    if re.search(r"configuration source|resolve_ctls|Could not open|slurm\.conf", done.stderr):
        raise InputError(f"Slurm's commands are here, but no cluster ({said})", NO_SLURM)
    if re.search(r"[Uu]nable to contact|Connection refused|connect failure", done.stderr):
        raise InputError(f"Slurm's controller does not answer ({said})", "scontrol ping")
    if re.search(r"timed out|Zero Bytes were transmitted", done.stderr):
        raise Busy(f"Slurm's controller has not answered in time ({said})", "scontrol ping")
    raise NotKnown(said, f"{command[0]} --help")


# -- the jobs of this user -------------------------------------------------------------------------


def show_job(job: str) -> str:
    """`scontrol show job`: known while it waits or runs, and some minutes after. Raises NotKnown.

    Asks again for a while where the controller is busy.
    """
    if parse_whole_number(job) is None:
        raise InputError(f"{job!r} is not a job's number", "stepladder status")
    deadline = time.monotonic() + SECONDS_WHILE_BUSY
    while True:
        try:
            return ask("scontrol", "show", "job", job)
        except Busy:
            if time.monotonic() > deadline:
                raise
        time.sleep(SECONDS_BETWEEN_TRIES)


def field(shown: str, name: str) -> str:
    """A field of `scontrol show`, "" where it is not there. Fields named by users stand alone on
    their lines.
    """
    lines = [
        line
        for line in shown.splitlines()
        if not re.match(r"\s*(JobId|Command|WorkDir|Comment)=", line)
    ]
    whole = (
        rf"^\s*{name}=(.*)$"
        if name in ("StdOut", "Command", "WorkDir")
        else rf"(?:^|\s){name}=(\S*)"
    )
    found = re.search(
        whole, shown if name in ("Command", "WorkDir") else "\n".join(lines), re.MULTILINE
    )
    return (
        ""
        if found is None or found.group(1) in ("(null)", "None", "Unknown", "N/A")
        else found.group(1)
    )


def notes_file() -> Path:
    """What Slurm forgets some minutes after a job's end: a line per job that was handed in from
    here.
    """
    return get_state_folder() / "jobs.jsonl"


def submit(job: BatchJob) -> str:
    """Hand it to Slurm: its number. Raises InputError where Slurm refuses."""
    try:
        number = (
            ask("sbatch", "--parsable", text=render(job), env=secrets_of(job))
            .strip()
            .partition(";")[0]
        )
    except NotKnown as error:
        raise InputError(
            error.problem, "stepladder submit --help, or sinfo for what this cluster has"
        ) from error
    note = {
        "job": number,
        "name": job.name,
        "output": field(show_job(number), "StdOut"),
        "job_dir": str(Path(job.job_dir).absolute()),
        "time": round(time.time(), 1),
    }
    append_line(notes_file(), note)
    return number


def append_line(path: Path, line: dict[str, Any]) -> None:
    """What is remembered of a job. It goes on where that cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        append_record(path, line)
    except OSError as error:
        print_message(f"{path} cannot be written: {error.strerror}")


def lines_of_job(path: Path, job: str | None, kind: type) -> list[dict[str, Any]]:
    """What `append_line` has written of that job, see `remembered`."""
    return [line for line in remembered(path, kind) if line["job"] == job]


def remembered(path: Path, kind: type) -> list[dict[str, Any]]:
    """What `append_line` has written, as the dataclass `kind` has it. What is damaged is left out."""
    lines = JsonlReader(path, lambda line: "job" in line and fits_dataclass(line, kind))
    try:
        found = list(lines.read_new())
    except InputError as error:
        print_message(str(error))
        return []
    for text in lines.describe_damage():
        print_message(text)
    return found


@dataclass(frozen=True)
class Note:
    """What is read of a line of jobs.jsonl."""

    name: str
    output: str
    job_dir: str


@dataclass(frozen=True)
class Known:
    """A job as far as Slurm, its accounting, or our own notes know it. state: "" where nobody does."""

    job: str
    name: str
    state: str
    reason: str = ""
    nodes: str = ""
    restarts: int = 0
    output: str = ""
    job_dir: str = ""

    def as_json(self) -> dict[str, Any]:
        return {
            "job_id": int(self.job) if self.job.isdigit() else self.job,
            "name": self.name,
            "state": self.state,
            "reason": self.reason,
            "nodes": self.nodes,
        }

    @property
    def is_over(self) -> bool:
        """Whether Slurm will do nothing more for it."""
        return self.state not in (
            "PENDING",
            "RUNNING",
            "COMPLETING",
            "CONFIGURING",
            "SUSPENDED",
            "REQUEUED",
        )

    def describe(self) -> str:
        """In a line."""
        where = f" on {self.nodes}" if self.nodes else ""
        why = f" ({self.reason})" if self.reason not in ("", "None") else ""
        return f"job {self.job} {self.name}: {self.state.lower() or 'over, and forgotten by Slurm'}{where}{why}"


def look_up(job: str) -> Known:
    """Raises InputError where neither Slurm nor our own notes know the job."""
    notes = lines_of_job(notes_file(), job, Note)
    note = notes[-1] if notes else None  # a cluster that is set up anew counts from 1 again
    try:
        shown = show_job(job)
    except NotKnown:
        if note is None:
            raise InputError(f"there is no job {job}", "stepladder status") from None
        return Known(
            job, note["name"], accounted(job), output=note["output"], job_dir=note["job_dir"]
        )
    name = re.match(r"JobId=\S+ JobName=(.*)", shown)
    output = field(shown, "StdOut")
    if note is not None and note["output"] != output:
        note = None  # a job of that number on another cluster
    state, reason, nodes = (field(shown, key) for key in ("JobState", "Reason", "NodeList"))
    return Known(
        job,
        name.group(1) if name else "",
        state,
        reason,
        nodes,
        int(field(shown, "Restarts") or 0),
        output,
        note["job_dir"] if note else "",
    )


def accounted(job: str) -> str:
    """The job's state as sacct has it, "" on a cluster without accounting."""
    try:
        states = ask("sacct", "-X", "-n", "-P", "-j", job, "-o", "State").splitlines()
    except InputError:
        return ""
    return states[-1].partition(" ")[0] if states else ""


def own_jobs() -> list[Known]:
    """This user's jobs that wait or run."""
    listed = ask("squeue", "--noheader", "--me", "--format", "%i|%T|%r|%N|%j")
    found = []
    for line in listed.splitlines():
        job, state, reason, nodes, name = line.split("|", 4)
        found.append(Known(job, name, state, "" if reason == "None" else reason, nodes))
    return found


def jobs_in(folder: Path) -> list[str]:
    """Numbers of this user's jobs that wait or run, and were handed in for that folder."""
    folders = {line["job"]: line["job_dir"] for line in remembered(notes_file(), Note)}
    return [known.job for known in own_jobs() if folders.get(known.job) == str(folder.absolute())]


# -- what a job has printed ------------------------------------------------------------------------


def pieces(path: Path, is_over: Callable[[], bool] | None = None) -> Iterator[bytes]:
    """What the file holds, and with `is_over` what is added until that is true. Raises InputError
    without one.
    """
    if not path.exists() and is_over is None:
        raise InputError(
            f"the job has written nothing yet ({path})",
            "stepladder logs -f JOB, which waits for it",
        )
    asked, over, place = time.monotonic(), False, 0
    while True:
        piece = b""
        with (
            suppress(FileNotFoundError),
            path.open("rb") as opened,
        ):  # anew each time: a network file system looks
            opened.seek(place)
            piece = opened.read(PIECE_BYTES)
        place += len(piece)
        if piece:
            yield piece
        elif is_over is None or over:
            return
        elif time.monotonic() - asked > SECONDS_BETWEEN_QUESTIONS:
            asked, over = (
                time.monotonic(),
                is_over(),
            )  # then once more, for what was written meanwhile
        else:
            time.sleep(SECONDS_BETWEEN_READS)
