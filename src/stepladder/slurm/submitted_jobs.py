"""Submitting jobs, and what is known of submitted jobs: from Slurm, and from notes of our own.

Slurm forgets a job some minutes after its end. A line per job in the user's state folder
(jobs.jsonl) remembers its name, output and run directory.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepladder.core.console import print_message
from stepladder.core.errors import InputError
from stepladder.core.folders import get_state_folder
from stepladder.core.jsonl import JsonlReader, append_record, fits_dataclass
from stepladder.slurm.batch_job import BatchJob
from stepladder.slurm.batch_script import collect_secrets, render_batch_script
from stepladder.slurm.client import SlurmRefusal, parse_field, run_slurm, show_job

OUTPUT_POLL_INTERVAL_S = 0.5
SLURM_POLL_INTERVAL_S = 3.0  # the controller serves all users
OUTPUT_CHUNK_BYTES = 1 << 20
ACTIVE_STATES = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "REQUEUED")


@dataclass(frozen=True)
class JobNote:
    """The entries of a line of jobs.jsonl that are read."""

    name: str
    output: str
    job_dir: str


@dataclass(frozen=True)
class JobInfo:
    """A job as far as Slurm, its accounting, or our notes know it.

    `state` is "" if none of them knows it.
    """

    job: str
    name: str
    state: str
    reason: str = ""
    nodes: str = ""
    restarts: int = 0
    output: str = ""
    job_dir: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the job as `status --json` prints it."""
        return {
            "job_id": int(self.job) if self.job.isdigit() else self.job,
            "name": self.name,
            "state": self.state,
            "reason": self.reason,
            "nodes": self.nodes,
        }

    @property
    def is_over(self) -> bool:
        """Whether Slurm will do nothing more for the job."""
        return self.state not in ACTIVE_STATES

    def describe(self) -> str:
        """Return the job in one line."""
        state = self.state.lower() or "over, and forgotten by Slurm"
        nodes = f" on {self.nodes}" if self.nodes else ""
        reason = f" ({self.reason})" if self.reason not in ("", "None") else ""
        return f"job {self.job} {self.name}: {state}{nodes}{reason}"


# -- records of jobs -------------------------------------------------------------------------------


def notes_path() -> Path:
    """Return the path of the notes, one line per job that was submitted from here."""
    return get_state_folder() / "jobs.jsonl"


def add_record(path: Path, record: dict[str, Any]) -> None:
    """Append a record to a file of JSON lines, with only a message if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        append_record(path, record)
    except OSError as error:
        print_message(f"{path} cannot be written: {error.strerror}")


def read_job_records(
    path: Path,
    job: str | None,
    kind: type,
) -> list[dict[str, Any]]:
    """Return the records of one job, see `read_records`."""
    return [record for record in read_records(path, kind) if record["job"] == job]


def read_records(path: Path, kind: type) -> list[dict[str, Any]]:
    """Return the records in a file that match the dataclass `kind`; a message reports others."""
    reader = JsonlReader(path, lambda line: "job" in line and fits_dataclass(line, kind))
    try:
        records = list(reader.read_new())
    except InputError as error:
        print_message(str(error))
        return []
    for text in reader.describe_damage():
        print_message(text)
    return records


# -- jobs ------------------------------------------------------------------------------------------


def submit(job: BatchJob) -> str:
    """Submit a job.

    Returns:
        Its number.

    Raises:
        InputError: If Slurm refuses it.
    """
    script = render_batch_script(job)
    try:
        output = run_slurm(
            "sbatch",
            "--parsable",
            text=script,
            env=collect_secrets(job),
        )
    except SlurmRefusal as error:
        raise InputError(
            error.problem, "stepladder submit --help, or sinfo for what this cluster has"
        ) from error
    number = output.strip().partition(";")[0]
    note = {
        "job": number,
        "name": job.name,
        "output": parse_field(show_job(number), "StdOut"),
        "job_dir": str(Path(job.job_dir).absolute()),
        "time": round(time.time(), 1),
    }
    add_record(notes_path(), note)
    return number


def find_job(job: str) -> JobInfo:
    """Return what is known of a job.

    Raises:
        InputError: If neither Slurm nor our notes know it.
    """
    notes = read_job_records(notes_path(), job, JobNote)
    # The newest one: a cluster that was set up again counts its jobs from 1 again.
    note = notes[-1] if notes else None
    try:
        text = show_job(job)
    except SlurmRefusal:
        if note is None:
            raise InputError(f"there is no job {job}", "stepladder status") from None
        state = read_accounted_state(job)
        return JobInfo(
            job,
            note["name"],
            state,
            output=note["output"],
            job_dir=note["job_dir"],
        )
    name = re.match(r"JobId=\S+ JobName=(.*)", text)
    output = parse_field(text, "StdOut")
    is_same_job = note is not None and note["output"] == output  # not one of another cluster
    return JobInfo(
        job,
        name[1] if name else "",
        state=parse_field(text, "JobState"),
        reason=parse_field(text, "Reason"),
        nodes=parse_field(text, "NodeList"),
        restarts=int(parse_field(text, "Restarts") or 0),
        output=output,
        job_dir=note["job_dir"] if note and is_same_job else "",
    )


def read_accounted_state(job: str) -> str:
    """Return a job's state from Slurm's accounting, "" if the cluster has none."""
    try:
        output = run_slurm(
            "sacct",
            "-X",
            "-n",
            "-P",
            "-j",
            job,
            "-o",
            "State",
        )
    except InputError:
        return ""
    states = output.splitlines() or [""]
    return states[-1].partition(" ")[0]


def list_user_jobs() -> list[JobInfo]:
    """Return this user's jobs that wait or run."""
    output = run_slurm(
        "squeue",
        "--noheader",
        "--me",
        "--format",
        "%i|%T|%r|%N|%j",
    )
    jobs = []
    for line in output.splitlines():
        job, state, reason, nodes, name = line.split("|", 4)
        jobs.append(
            JobInfo(
                job,
                name,
                state,
                "" if reason == "None" else reason,
                nodes,
            )
        )
    return jobs


def find_jobs_in(folder: Path) -> list[str]:
    """Return the numbers of this user's jobs that wait or run and have that run directory."""
    folders = {note["job"]: note["job_dir"] for note in read_records(notes_path(), JobNote)}
    return [
        info.job for info in list_user_jobs() if folders.get(info.job) == str(folder.absolute())
    ]


def read_output(path: Path, is_over: Callable[[], bool] | None = None) -> Iterator[bytes]:
    """Yield what a job has printed.

    Args:
        path: The file of its output.
        is_over: Returns whether the job is over; then also what it prints until then is yielded.

    Yields:
        Parts of the output.

    Raises:
        InputError: If the file does not exist and `is_over` is not given.
    """
    if not path.exists() and is_over is None:
        raise InputError(
            f"the job has written nothing yet ({path})",
            "stepladder logs -f JOB, which waits for it",
        )
    last_poll = time.monotonic()
    has_ended = False
    offset = 0
    while True:
        chunk = b""
        # Opened again each time: only then does a network file system look for new data.
        with suppress(FileNotFoundError), path.open("rb") as file:
            file.seek(offset)
            chunk = file.read(OUTPUT_CHUNK_BYTES)
        offset += len(chunk)
        if chunk:
            yield chunk
        elif is_over is None or has_ended:
            return
        elif time.monotonic() - last_poll > SLURM_POLL_INTERVAL_S:
            last_poll = time.monotonic()
            has_ended = is_over()  # once more then, for what was written since the last read
        else:
            time.sleep(OUTPUT_POLL_INTERVAL_S)
