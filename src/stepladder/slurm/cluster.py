"""Slurm as a cluster for batch jobs: it has the methods of `launcher.batch.cluster.Cluster`."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence

from stepladder.core.errors import InputError
from stepladder.slurm.batch_job import BatchJob
from stepladder.slurm.batch_script import collect_secrets, list_options, render_batch_script
from stepladder.slurm.client import SlurmRefusal, parse_field, run_slurm, show_job
from stepladder.slurm.partitions import (
    describe_cluster_defaults,
    find_job_warnings,
    list_partitions,
    validate_job_fits,
    validate_node_names,
)
from stepladder.slurm.submitted_jobs import JobInfo


class SlurmCluster:
    """The cluster whose controller Slurm's commands ask."""

    def submit(self, job: BatchJob) -> str:
        """Submit a job, and return its number."""
        try:
            # Once more as arguments: a variable of the user's, such as SBATCH_NO_REQUEUE, comes
            # before the options in a script.
            output = run_slurm(
                "sbatch",
                "--parsable",
                *list_options(job),
                text=render_batch_script(job),
                env=collect_secrets(job),
            )
        except SlurmRefusal as error:
            raise InputError(
                error.problem, "stepladder submit --help, or sinfo for what this cluster has"
            ) from error
        return output.strip().partition(";")[0]

    def state(self, job_id: str) -> JobInfo | None:
        """Return what the controller knows of a job, or the state that the accounting has."""
        try:
            text = show_job(job_id)
        except SlurmRefusal:
            state = _read_accounted_state(job_id)
            return JobInfo(job_id, "", state) if state else None
        name = re.match(r"JobId=\S+ JobName=(.*)", text)
        return JobInfo(
            job_id,
            name[1] if name else "",
            state=parse_field(text, "JobState"),
            reason=parse_field(text, "Reason"),
            nodes=parse_field(text, "NodeList"),
            restarts=int(parse_field(text, "Restarts") or 0),
            output=parse_field(text, "StdOut"),
        )

    def cancel(self, job_ids: Sequence[str], name: str = "") -> None:
        """Cancel jobs. Slurm first sends SIGTERM, on which a training saves a snapshot."""
        names = [f"--name={name}"] if name else []
        run_slurm("scancel", *names, *job_ids)

    def render(self, job: BatchJob) -> str:
        """Return the batch script."""
        return render_batch_script(job)

    def validate(self, job: BatchJob, typed_fields: Container[str]) -> Sequence[str]:
        """Raise InputError if Slurm would refuse the job or never start it; return advice."""
        partitions = list_partitions()
        validate_job_fits(job, partitions)
        validate_node_names(job)
        advice = describe_cluster_defaults(job, partitions, typed_fields)
        warnings = find_job_warnings(job)
        return [f"stepladder: {line}" for line in advice] + [
            f"warning: {line}" for line in warnings
        ]

    def list_jobs(self) -> Sequence[JobInfo]:
        """Return this user's jobs that wait or run."""
        jobs = []
        for line in run_slurm(
            "squeue", "--noheader", "--me", "--format", "%i|%T|%r|%N|%j"
        ).splitlines():
            job, state, reason, nodes, name = line.split("|", 4)
            jobs.append(JobInfo(job, name, state, "" if reason == "None" else reason, nodes))
        return jobs

    def allocation(self, env: Mapping[str, str]) -> None:
        """Return None: srun starts the ranks of an allocation, see `launcher.allocation`."""


def _read_accounted_state(job: str) -> str:
    """Return a job's state from Slurm's accounting, "" if the cluster has none."""
    try:
        output = run_slurm("sacct", "-X", "-n", "-P", "-j", job, "-o", "State")
    except InputError:
        return ""
    states = output.splitlines() or [""]
    return states[-1].partition(" ")[0]
