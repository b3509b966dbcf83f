"""Submitting jobs, and what is known of submitted jobs: from the cluster, and from our own notes.

A cluster forgets a job some minutes after its end. A line per job in the user's state folder
(jobs.jsonl) remembers its name, output and run directory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from stepladder.core.errors import InputError
from stepladder.core.folders import get_state_folder
from stepladder.launcher.batch.cluster import Cluster
from stepladder.slurm.batch_job import BatchJob
from stepladder.slurm.submitted_jobs import JobInfo, add_record, read_job_records, read_records

OUTPUT_POLL_INTERVAL_S = 0.5
CLUSTER_POLL_INTERVAL_S = 3.0  # the controller serves all users
OUTPUT_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class JobNote:
    """The entries of a line of jobs.jsonl that are read."""

    name: str
    output: str
    job_dir: str


def _notes_path() -> Path:
    """Return the path of the notes, one line per job that was submitted from here."""
    return get_state_folder() / "jobs.jsonl"


def submit(cluster: Cluster, job: BatchJob) -> str:
    """Submit a job, and note it.

    Returns:
        Its id.

    Raises:
        InputError: If the cluster refuses it.
    """
    job_id = cluster.submit(job)
    info = cluster.state(job_id)
    note = {
        "job": job_id,
        "name": job.name,
        "output": info.output if info else "",
        "job_dir": str(Path(job.job_dir).absolute()),
        "time": round(time.time(), 1),
    }
    add_record(_notes_path(), note)
    return job_id


def find_job(cluster: Cluster, job: str) -> JobInfo:
    """Return what is known of a job.

    Raises:
        InputError: If neither the cluster nor our notes know it.
    """
    info = cluster.state(job) or JobInfo(job, "", "")
    notes = read_job_records(_notes_path(), job, JobNote)
    if not notes:
        if not info.name:
            raise InputError(f"there is no job {job}", "stepladder status")
        return info
    # The newest one: a cluster that was set up again counts its jobs from 1 again.
    note = notes[-1]
    if not info.name:
        info = replace(info, name=note["name"], output=note["output"])
    if info.output != note["output"]:  # a job of another cluster
        return info
    return replace(info, job_dir=note["job_dir"])


def find_last_job() -> str | None:
    """Return the id of the job that was submitted last from here, None without one."""
    return next((note["job"] for note in reversed(read_records(_notes_path(), JobNote))), None)


def list_user_jobs(cluster: Cluster) -> Sequence[JobInfo]:
    """Return this user's jobs that wait or run."""
    jobs = cluster.list_jobs()
    if jobs is None:
        noted = dict.fromkeys(note["job"] for note in read_records(_notes_path(), JobNote))
        jobs = [info for info in (find_job(cluster, job) for job in noted) if not info.is_over]
    return jobs


def find_jobs_in(cluster: Cluster, folder: Path) -> list[str]:
    """Return the ids of this user's jobs that wait or run and have that run directory."""
    folders = {note["job"]: note["job_dir"] for note in read_records(_notes_path(), JobNote)}
    return [
        info.job
        for info in list_user_jobs(cluster)
        if folders.get(info.job) == str(folder.absolute())
    ]


def validate_joinable(cluster: Cluster, job: BatchJob) -> None:
    """Raise InputError if the job to join does not run, or has another run directory."""
    if not job.join:
        return
    target = find_job(cluster, job.join)
    if target.state != "RUNNING":
        raise InputError(
            f"--join {job.join}, but {target.describe()}", "stepladder status: one that runs"
        )
    job_dir = str(Path(job.job_dir).absolute())
    if target.job_dir != job_dir:
        target_dir = target.job_dir or "a folder that is not known here"
        raise InputError(
            f"--join {job.join}, whose run directory is {target_dir}, not {job_dir}",
            f"the command that submitted job {job.join}, with --join {job.join}",
        )


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
        elif time.monotonic() - last_poll > CLUSTER_POLL_INTERVAL_S:
            last_poll = time.monotonic()
            has_ended = is_over()  # once more then, for what was written since the last read
        else:
            time.sleep(OUTPUT_POLL_INTERVAL_S)
