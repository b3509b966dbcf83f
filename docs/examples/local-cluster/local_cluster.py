"""A cluster of one machine: a job is a session of processes, and its id that of the first one."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from stepladder.launcher.batch.cluster import BatchJob, Cluster, JobInfo

FOLDER = Path.home() / ".local-cluster"
# Exit code 75: the training has stopped with a snapshot, and is to go on.
SCRIPT = """
until {command}; do
    if [ $? -ne 75 ]; then echo FAILED > {folder}/$$; exit; fi
done
echo COMPLETED > {folder}/$$
"""


class LocalCluster(Cluster):
    def submit(self, job: BatchJob) -> str:
        FOLDER.mkdir(exist_ok=True)
        kind, *arguments = job.command
        command = shlex.join(["stepladder", kind, "--nproc", job.nproc, *arguments])
        script = SCRIPT.format(command=command, folder=shlex.quote(str(FOLDER)))
        output = Path(job.output).absolute()
        with output.open("ab") as file:
            process = subprocess.Popen(
                ["bash", "-c", script],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        (FOLDER / f"{process.pid}.output").write_text(str(output), encoding="utf-8")
        (FOLDER / f"{process.pid}.name").write_text(job.name, encoding="utf-8")
        return str(process.pid)

    def state(self, job_id: str) -> JobInfo | None:
        path = FOLDER / f"{job_id}.output"
        if not path.exists():
            return None
        state = "RUNNING"
        with suppress(FileNotFoundError):
            state = (FOLDER / job_id).read_text(encoding="utf-8").strip()
        name = path.with_suffix(".name").read_text(encoding="utf-8")
        return JobInfo(job_id, name, state, output=path.read_text(encoding="utf-8"))

    def cancel(self, job_ids: Sequence[str], name: str = "") -> None:
        names = {path.stem: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.name")}
        chosen = [*job_ids, *(job_id for job_id in names if name and names[job_id] == name)]
        for job_id in chosen:
            if (FOLDER / job_id).exists():  # it has ended, and its number may be another process's
                continue
            (FOLDER / job_id).write_text("CANCELLED", encoding="utf-8")
            with suppress(ProcessLookupError):
                os.killpg(int(job_id), signal.SIGTERM)  # a training saves a snapshot first
