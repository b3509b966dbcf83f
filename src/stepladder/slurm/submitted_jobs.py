"""What is known of a job that was submitted, and files with a record per line for jobs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepladder.core.console import print_message
from stepladder.core.errors import InputError
from stepladder.core.jsonl import JsonlReader, append_record, fits_dataclass

ACTIVE_STATES = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "REQUEUED")


@dataclass(frozen=True)
class JobInfo:
    """A job as far as the cluster, its accounting, or our notes know it.

    Args:
        job: Its id.
        name: Its name.
        state: A word such as PENDING, RUNNING or COMPLETED; "" if nobody knows it. A job whose
            state is not one of ACTIVE_STATES is over.
        reason: Why it waits.
        nodes: Where it runs.
        restarts: How often it was restarted.
        output: The file of what it prints.
        job_dir: Its run directory.
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
        """Whether the cluster will do nothing more for the job."""
        return self.state not in ACTIVE_STATES

    def describe(self) -> str:
        """Return the job in one line."""
        state = self.state.lower() or "over, and forgotten by Slurm"
        nodes = f" on {self.nodes}" if self.nodes else ""
        reason = f" ({self.reason})" if self.reason not in ("", "None") else ""
        return f"job {self.job} {self.name}: {state}{nodes}{reason}"


# -- records of jobs -------------------------------------------------------------------------------


def add_record(path: Path, record: dict[str, Any]) -> None:
    """Append a record to a file of JSON lines, with only a message if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        append_record(path, record)
    except OSError as error:
        print_message(f"{path} cannot be written: {error.strerror}")


def read_job_records(path: Path, job: str | None, kind: type) -> list[dict[str, Any]]:
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
