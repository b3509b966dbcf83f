"""What the cluster has, and whether it has a place for a job."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path

from stepladder.core.errors import InputError
from stepladder.core.folders import get_file_system
from stepladder.slurm.job import BatchJob, seconds_of
from stepladder.slurm.query import ask, lab_conf, look_up, slurm_environment

HINT = "sinfo; another --partition"
ON_ONE_MACHINE = {"ext2", "ext3", "ext4", "xfs", "btrfs", "tmpfs", "ramfs", "overlay", "f2fs"}


@dataclass(frozen=True)
class Nodes:
    """Nodes of one kind in a partition. gpus: Slurm's word for them, as in gpu:a100:4."""

    count: int
    cpus: int
    gpus: str

    def has_gpus(self, asked: str) -> bool:
        """Whether each has that many, as --gpus-per-node says it: N or TYPE:N."""
        kind, _, number = asked.rpartition(":")
        found = re.findall(r"gpu(?::([^:(,]+))?:(\d+)", self.gpus)
        return sum(int(n) for k, n in found if not kind or k == kind) >= int(number)


@dataclass(frozen=True)
class Partition:
    """A partition of the cluster.

    seconds, most: its limits of time and of nodes per job; math.inf where there is none.
    default_time: the time limit of a job that asks for none, as Slurm writes it.
    """

    name: str
    is_default: bool
    is_up: bool
    seconds: float
    most: float
    nodes: tuple[Nodes, ...]
    default_time: str = ""

    @property
    def count(self) -> int:
        return sum(group.count for group in self.nodes)


def partitions() -> dict[str, Partition]:
    """Of this cluster, as sinfo knows them. Raises InputError without Slurm."""
    return read_partitions(ask("sinfo", "--noheader", "--format", "%P|%a|%l|%s|%D|%c|%G|%L"))


def read_partitions(text: str) -> dict[str, Partition]:
    """Return the partitions by name.

    Args:
        text: Lines of sinfo: name, availability, time limit, job size, nodes, processors, generic
        resources, and
            the time limit of jobs that ask for none, "n/a" where that is the first one."""
    found: dict[str, Partition] = {}
    for line in text.splitlines():
        name, available, limit, size, count, cpus, gpus, default = line.split("|")
        most = size.rpartition("-")[2]
        group = Nodes(int(count), int(cpus.rstrip("+")), gpus)
        known = found.get(name.rstrip("*"))
        found[name.rstrip("*")] = Partition(
            name.rstrip("*"),
            name.endswith("*"),
            available == "up",
            seconds_of(limit),
            math.inf if most == "infinite" else int(most),
            (*known.nodes, group) if known else (group,),
            limit if default == "n/a" else default,
        )
    return found


# -- a place for a job -----------------------------------------------------------------------------


def refuse_impossible(job: BatchJob, cluster: Mapping[str, Partition]) -> None:
    """Raises InputError where the cluster has no place for the job: Slurm refuses, or lets it wait
    for ever.
    """
    partition, least = partition_for(job, cluster), job.own_nodes[0]
    name = partition.name
    if not partition.is_up:
        raise InputError(f"partition {name} is down", HINT)
    if least > min(partition.most, partition.count):
        most = int(min(partition.most, partition.count))
        raise InputError(
            f"--nodes {least}, but partition {name} gives a job at most {most}", f"--nodes {most}"
        )
    if job.time and seconds_of(job.time) > partition.seconds:
        minutes = int(partition.seconds // 60)
        raise InputError(
            f"--time {job.time} is more than partition {name} gives, {minutes} minutes",
            f"--time {minutes}",
        )
    asked, cpus = job.gpus_per_node, job.cpus_per_task * (int(job.nproc) if job.per_rank else 1)
    if asked:
        refuse_few(
            f"--gpus-per-node {asked}",
            least,
            partition,
            [n for n in partition.nodes if n.has_gpus(asked)],
        )
    refuse_few(
        f"--cpus-per-task {cpus}", least, partition, [n for n in partition.nodes if n.cpus >= cpus]
    )


def partition_for(job: BatchJob, cluster: Mapping[str, Partition]) -> Partition:
    """The one that the job asks for, or the cluster's default. Raises InputError where there is
    none.
    """
    name = job.partition or next(
        (name for name, partition in cluster.items() if partition.is_default), ""
    )
    names = ", ".join(sorted(cluster))
    if not name:
        found = "--partition is not given, and this cluster has no default"
        raise InputError(found, f"--partition, one of {names}")
    if name not in cluster:
        first = min(cluster, default="")
        raise InputError(f"partition {name} is unknown; there are {names}", f"--partition {first}")
    return cluster[name]


def refuse_few(asked: str, least: int, partition: Partition, fitting: list[Nodes]) -> None:
    """Raises InputError where fewer than `least` nodes are fitting."""
    count = sum(nodes.count for nodes in fitting)
    if count < least:
        kinds = set()
        for nodes in partition.nodes:
            gpus = ", ".join(re.findall(r"gpu[^,(]*", nodes.gpus)) or "no GPU"
            kinds.add(f"{nodes.count} with {nodes.cpus} processors and {gpus}")
        found = f"partition {partition.name} has {count} such nodes ({', '.join(sorted(kinds))})"
        raise InputError(f"{asked} on {least} nodes, but {found}", HINT)


def refuse_unknown_nodes(job: BatchJob) -> None:
    """Raises InputError where --sbatch-arg names nodes that the cluster does not have."""
    for word in job.sbatch_args:
        asked = re.fullmatch(r"(?:--nodelist|--exclude)=(.*)|-[wx]\s*(.*)", word)
        if asked:
            known = set(ask("sinfo", "--noheader", "--Node", "--format", "%N").split())
            for name in hostnames(asked.group(1) or asked.group(2)):
                if name not in known:
                    raise InputError(f"{word}: there is no node {name}", "sinfo --Node")


def refuse_unjoinable(job: BatchJob) -> None:
    """Raises InputError where the job whose lost node this one replaces does not run, or in another
    folder.
    """
    if not job.join:
        return
    known, job_dir = look_up(job.join), str(Path(job.job_dir).absolute())
    if known.state != "RUNNING":
        raise InputError(
            f"--join {job.join}, but {known.describe()}", "stepladder status: one that runs"
        )
    if known.job_dir != job_dir:
        where = known.job_dir or "a folder that is not known here"
        raise InputError(
            f"--join {job.join}, whose run directory is {where}, not {job_dir}",
            f"the command that submitted job {job.join}, with --join {job.join}",
        )


def hostnames(text: str) -> list[str]:
    """The nodes of a Slurm node list, as in gpu[1-4,7],login. Raises InputError."""
    numbers = r"\d+(?:-\d+)?"
    name = rf"(?:[^,\[\]\s]|\[{numbers}(?:,{numbers})*\])+"
    if not re.fullmatch(
        f"{name}(?:,{name})*", text
    ):  # of most that is none, scontrol makes something
        raise InputError(f"{text!r} is not a node list", "names as in gpu[1-4,7],login")
    return ask("scontrol", "show", "hostnames", text).split()


def defaults_in_force(
    job: BatchJob, cluster: Mapping[str, Partition], asked: Container[str]
) -> list[str]:
    """Return a sentence for each limit of the job that no flag gave, and that is often too low.

    Args:
        asked: The fields of the job that flags gave.
    """
    partition = partition_for(job, cluster)
    sentences = []
    if not job.time and partition.default_time not in ("", "infinite", "UNLIMITED"):
        sentences.append(
            f"no --time: partition {partition.name} ends the job after {partition.default_time}, its default"
        )
    if job.gpus_per_node and "cpus_per_task" not in asked:
        cores = f"{job.cpus_per_task} CPU core{'s' * (job.cpus_per_task > 1)}"
        per = "process" if job.per_rank else "node"
        most = max(nodes.cpus for nodes in partition.nodes)
        sentences.append(
            f"no --cpus-per-task: {cores} per {per}, 1 for each GPU and its data loading; nodes have {most}"
        )
    return sentences


def doubts(job: BatchJob) -> list[str]:
    """What is possible, but seldom meant."""
    conf = os.environ.get("SLURM_CONF") or slurm_environment().get("SLURM_CONF")
    if conf == str(lab_conf()):
        return []  # its nodes are this machine
    path = Path(job.job_dir).absolute()
    kind = get_file_system(path)
    if path.is_relative_to("/tmp") or kind in ON_ONE_MACHINE:
        return [
            f"run directory {path} is on {kind or 'a disk'} of this machine: other nodes may not see it"
        ]
    return []
