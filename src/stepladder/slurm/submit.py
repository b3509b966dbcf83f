"""Handing a batch job to Slurm: what is checked before, the one call, and what is remembered of it."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from stepladder.core.errors import InputError
from stepladder.core.mounts import file_system
from stepladder.slurm.query import (
    NotKnown,
    Partition,
    ask,
    field,
    hostnames,
    lab_conf,
    seconds_of,
    show_job,
    slurm_environment,
    state_dir,
)
from stepladder.slurm.render import BatchJob, render

ON_ONE_MACHINE = {"ext2", "ext3", "ext4", "xfs", "btrfs", "tmpfs", "ramfs", "overlay", "f2fs"}


def refuse_impossible(job: BatchJob, cluster: Mapping[str, Partition]) -> None:
    """Raises InputError where the cluster has no place for the job: Slurm refuses, or lets it wait for ever."""
    defaults = [name for name, partition in cluster.items() if partition.is_default]
    name = job.partition or next(iter(defaults), "")
    names = ", ".join(sorted(cluster))
    if not name:
        raise InputError(
            "--partition is not given, and this cluster has no default", f"--partition, one of {names}"
        )
    if name not in cluster:
        raise InputError(
            f"partition {name} is unknown; there are {names}", f"--partition {min(cluster, default='')}"
        )
    partition, hint = cluster[name], "sinfo; another --partition"
    if not partition.is_up:
        raise InputError(f"partition {name} is down", hint)
    least = job.nodes[0]
    if least > min(partition.most, partition.count):
        most = int(min(partition.most, partition.count))
        raise InputError(f"--nodes {least}, but partition {name} gives a job at most {most}", f"--nodes {most}")
    if job.time and seconds_of(job.time) > partition.seconds:
        minutes = int(partition.seconds // 60)
        raise InputError(
            f"--time {job.time} is more than partition {name} gives, {minutes} minutes", f"--time {minutes}"
        )
    tasks = int(job.nproc) if job.per_rank else 1
    for flag, value, fitting in (
        (
            "--gpus-per-node",
            job.gpus_per_node,
            [n for n in partition.nodes if n.has_gpus(job.gpus_per_node or "0")],
        ),
        (
            "--cpus-per-task",
            tasks * job.cpus_per_task,
            [n for n in partition.nodes if n.cpus >= tasks * job.cpus_per_task],
        ),
    ):
        count = sum(nodes.count for nodes in fitting)
        if count < least:
            found = ", ".join(
                sorted({f"{n.count} with {n.cpus} processors and {gpus(n.gpus)}" for n in partition.nodes})
            )
            raise InputError(
                f"{flag} {value} on {least} nodes, but partition {name} has {count} such nodes ({found})", hint
            )


def gpus(resources: str) -> str:
    return ", ".join(re.findall(r"gpu[^,(]*", resources)) or "no GPU"


def refuse_unknown_nodes(job: BatchJob) -> None:
    """Raises InputError where --sbatch-arg names nodes that the cluster does not have."""
    for word in job.sbatch_args:
        asked = re.fullmatch(r"(?:--nodelist|--exclude)=(.*)|-[wx]\s*(.*)", word)
        if asked:
            known = set(ask("sinfo", "--noheader", "--Node", "--format", "%N").split())
            for name in hostnames(asked.group(1) or asked.group(2)):
                if name not in known:
                    raise InputError(f"{word}: there is no node {name}", "sinfo --Node")


def doubts(job: BatchJob) -> list[str]:
    """What is possible, but seldom meant."""
    conf = os.environ.get("SLURM_CONF") or slurm_environment().get("SLURM_CONF")
    if conf == str(lab_conf()):
        return []  # its nodes are this machine
    path = Path(job.job_dir).absolute()
    kind = file_system(path)
    if path.is_relative_to("/tmp") or kind in ON_ONE_MACHINE:
        return [f"run directory {path} is on {kind or 'a disk'} of this machine: other nodes may not see it"]
    return []


# -- the jobs of this user --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Submitted:
    """What Slurm forgets some minutes after a job's end. Paths are absolute."""

    job: str
    name: str
    output: str
    job_dir: str
    time: float


def submit(job: BatchJob) -> Submitted:
    """Hand it to Slurm. Raises InputError where Slurm refuses."""
    try:
        number = ask("sbatch", "--parsable", text=render(job)).strip().partition(";")[0]
    except NotKnown as error:
        raise InputError(error.found, "stepladder submit --help, or sinfo for what this cluster has") from error
    output = field(show_job(number), "StdOut")
    done = Submitted(number, job.name, output, str(Path(job.job_dir).absolute()), round(time.time(), 1))
    jobs = state_dir() / "jobs.jsonl"
    jobs.parent.mkdir(parents=True, exist_ok=True)
    with jobs.open("a") as opened:
        opened.write(json.dumps(asdict(done)) + "\n")
    return done


def submitted(job: str) -> Submitted | None:
    """The newest job of that number: a cluster that is set up anew counts from 1 again."""
    try:
        lines = [json.loads(line) for line in (state_dir() / "jobs.jsonl").read_text().splitlines()]
    except (OSError, ValueError):
        return None
    return next((Submitted(**line) for line in reversed(lines) if line["job"] == job), None)


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

    @property
    def is_over(self) -> bool:
        """Whether Slurm will do nothing more for it."""
        return self.state not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "REQUEUED")

    def describe(self) -> str:
        """In a line."""
        where = f" on {self.nodes}" if self.nodes else ""
        why = f" ({self.reason})" if self.reason not in ("", "None") else ""
        return f"job {self.job} {self.name}: {self.state.lower() or 'over, and forgotten by Slurm'}{where}{why}"


def look_up(job: str) -> Known:
    """Raises InputError where neither Slurm nor our own notes know the job."""
    note = submitted(job)
    try:
        shown = show_job(job)
    except NotKnown:
        if note is None:
            raise InputError(f"there is no job {job}", "stepladder status") from None
        return Known(job, note.name, accounted(job), output=note.output, job_dir=note.job_dir)
    name = re.match(r"JobId=\S+ JobName=(.*)", shown)
    output = field(shown, "StdOut")
    if note is not None and note.output != output:
        note = None  # a job of that number on another cluster
    state, reason, nodes = (field(shown, key) for key in ("JobState", "Reason", "NodeList"))
    return Known(
        job, name.group(1) if name else "", state, reason, nodes,
        int(field(shown, "Restarts") or 0), output, note.job_dir if note else "",
    )  # fmt: skip


def accounted(job: str) -> str:
    """The job's state as sacct has it, "" on a cluster without accounting."""
    try:
        return (ask("sacct", "-X", "-n", "-P", "-j", job, "-o", "State").splitlines() or [""])[-1].partition(" ")[
            0
        ]
    except InputError:
        return ""


def own_jobs() -> list[Known]:
    """This user's jobs that wait or run."""
    listed = ask("squeue", "--noheader", "--me", "--format", "%i|%T|%r|%N|%j")
    found = []
    for line in listed.splitlines():
        job, state, reason, nodes, name = line.split("|", 4)
        found.append(Known(job, name, state, "" if reason == "None" else reason, nodes))
    return found
