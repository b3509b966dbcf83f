"""The partitions of a cluster, and checks that a job can run there."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path

from stepladder.core.errors import InputError
from stepladder.core.folders import get_file_system
from stepladder.core.numbers import format_count
from stepladder.slurm.batch_job import BatchJob, parse_time_limit
from stepladder.slurm.client import lab_conf, run_slurm, slurm_environment

SINFO_HINT = "sinfo; another --partition"
SINFO_FORMAT = "%P|%a|%l|%s|%D|%c|%G|%L"
LOCAL_FILE_SYSTEMS = {
    "ext2", "ext3", "ext4", "xfs", "btrfs", "tmpfs", "ramfs", "overlay", "f2fs",
}  # fmt: skip


@dataclass(frozen=True)
class _NodeGroup:
    """Nodes of one kind in a partition.

    Args:
        count: Number of nodes.
        cpus: Processors of each.
        gpus: GPUs of each, as Slurm writes them: gpu:a100:4.
    """

    count: int
    cpus: int
    gpus: str

    def has_gpus(self, requested: str) -> bool:
        """Return whether each node has as many GPUs as --gpus-per-node requests: N or TYPE:N."""
        kind, _, number = requested.rpartition(":")
        available = 0
        for gpu_type, gpu_count in re.findall(r"gpu(?::([^:(,]+))?:(\d+)", self.gpus):
            if not kind or gpu_type == kind:
                available += int(gpu_count)
        return available >= int(number)


@dataclass(frozen=True)
class _Partition:
    """A partition of the cluster.

    Args:
        name: Its name.
        is_default: Whether jobs run there that name no partition.
        is_up: Whether it accepts jobs.
        time_limit_s: The longest time limit of a job, math.inf if there is none.
        max_nodes: The most nodes of a job, math.inf if there is no limit.
        nodes: Its nodes, by kind.
        default_time: Time limit of a job that requests none, as Slurm writes it.
    """

    name: str
    is_default: bool
    is_up: bool
    time_limit_s: float
    max_nodes: float
    nodes: tuple[_NodeGroup, ...]
    default_time: str = ""

    @property
    def count(self) -> int:
        """The number of nodes."""
        return sum(group.count for group in self.nodes)


def list_partitions() -> dict[str, _Partition]:
    """Return the partitions of this cluster by name. Raises InputError without Slurm."""
    return parse_partitions(run_slurm("sinfo", "--noheader", "--format", SINFO_FORMAT))


def parse_partitions(text: str) -> dict[str, _Partition]:
    """Return the partitions by name.

    Args:
        text: Lines of sinfo in SINFO_FORMAT: name, availability, time limit, job size, number of
            nodes, processors, generic resources, and the default time limit, "n/a" if that is the
            time limit. There is a line per kind of nodes.
    """
    partitions: dict[str, _Partition] = {}
    for line in text.splitlines():
        label, available, limit, size, count, cpus, gpus, default = line.split("|")
        name = label.rstrip("*")
        if default == "n/a":
            default = limit
        group = _NodeGroup(int(count), int(cpus.rstrip("+")), gpus)
        max_nodes = size.rpartition("-")[2]
        groups = partitions[name].nodes if name in partitions else ()
        partitions[name] = _Partition(
            name,
            is_default=label.endswith("*"),
            is_up=available == "up",
            time_limit_s=parse_time_limit(limit),
            max_nodes=math.inf if max_nodes == "infinite" else int(max_nodes),
            nodes=(*groups, group),
            default_time=default,
        )
    return partitions


# -- checks before a job is submitted --------------------------------------------------------------


def validate_job_fits(job: BatchJob, cluster: Mapping[str, _Partition]) -> None:
    """Raise InputError if the cluster cannot run the job: Slurm would refuse it or never start it.

    Raises:
        InputError: If so.
    """
    partition = _find_partition(job, cluster)
    name = partition.name
    num_nodes, _ = job.requested_nodes
    if not partition.is_up:
        raise InputError(f"partition {name} is down", SINFO_HINT)
    if num_nodes > min(partition.max_nodes, partition.count):
        available = int(min(partition.max_nodes, partition.count))
        raise InputError(
            f"--nodes {num_nodes}, but partition {name} gives a job at most {available}",
            f"--nodes {available}",
        )
    if job.time and parse_time_limit(job.time) > partition.time_limit_s:
        minutes = int(partition.time_limit_s // 60)
        raise InputError(
            f"--time {job.time} is more than partition {name} gives, {minutes} minutes",
            f"--time {minutes}",
        )
    gpus = job.gpus_per_node
    if gpus:
        suitable = [group for group in partition.nodes if group.has_gpus(gpus)]
        _validate_node_count(f"--gpus-per-node {gpus}", num_nodes, partition, suitable)
    cpus = job.cpus_per_task
    if job.per_rank:
        cpus *= int(job.nproc)
    suitable = [group for group in partition.nodes if group.cpus >= cpus]
    _validate_node_count(f"--cpus-per-task {cpus}", num_nodes, partition, suitable)


def _find_partition(job: BatchJob, cluster: Mapping[str, _Partition]) -> _Partition:
    """Return the partition that the job names, or the cluster's default.

    Raises:
        InputError: If there is none.
    """
    defaults = [name for name, partition in cluster.items() if partition.is_default]
    name = job.partition or next(iter(defaults), "")
    names = ", ".join(sorted(cluster))
    if not name:
        raise InputError(
            "--partition is not given, and this cluster has no default",
            f"--partition, one of {names}",
        )
    if name not in cluster:
        first = min(cluster, default="")
        raise InputError(f"partition {name} is unknown; there are {names}", f"--partition {first}")
    return cluster[name]


def _validate_node_count(
    requested: str, num_nodes: int, partition: _Partition, suitable: list[_NodeGroup]
) -> None:
    """Raise InputError if fewer than `num_nodes` nodes are suitable for the requested flag."""
    count = sum(group.count for group in suitable)
    if count < num_nodes:
        kinds = set()
        for group in partition.nodes:
            gpus = ", ".join(re.findall(r"gpu[^,(]*", group.gpus)) or "no GPU"
            kinds.add(f"{group.count} with {group.cpus} processors and {gpus}")
        raise InputError(
            f"{requested} on {format_count(num_nodes, 'node')}, but partition {partition.name} has"
            f" {format_count(count, 'such node')} ({', '.join(sorted(kinds))})",
            SINFO_HINT,
        )


def validate_node_names(job: BatchJob) -> None:
    """Raise InputError if --sbatch-arg names nodes that the cluster does not have."""
    for option in job.sbatch_args:
        match = re.fullmatch(r"(?:--nodelist|--exclude)=(.*)|-[wx]\s*(.*)", option)
        if match is None:
            continue
        existing = set(run_slurm("sinfo", "--noheader", "--Node", "--format", "%N").split())
        for name in expand_node_list(match[1] or match[2]):
            if name not in existing:
                raise InputError(f"{option}: there is no node {name}", "sinfo --Node")


def expand_node_list(text: str) -> list[str]:
    """Return the node names of a Slurm node list, as in gpu[1-4,7],login.

    Raises:
        InputError: If it is not a node list; scontrol returns names for almost any text.
    """
    numbers = r"\d+(?:-\d+)?"
    name = rf"(?:[^,\[\]\s]|\[{numbers}(?:,{numbers})*\])+"
    if not re.fullmatch(f"{name}(?:,{name})*", text):
        raise InputError(f"{text!r} is not a node list", "names as in gpu[1-4,7],login")
    return run_slurm("scontrol", "show", "hostnames", text).split()


# -- what to tell the user about a job that fits ---------------------------------------------------


def describe_cluster_defaults(
    job: BatchJob, cluster: Mapping[str, _Partition], typed_fields: Container[str]
) -> list[str]:
    """Return a sentence for each limit of the job that no flag sets and that is often too low.

    Args:
        job: The job.
        cluster: The partitions.
        typed_fields: The fields of the job that flags have set.
    """
    partition = _find_partition(job, cluster)
    sentences = []
    if not job.time and partition.default_time not in ("", "infinite", "UNLIMITED"):
        sentences.append(
            f"no --time: partition {partition.name} ends the job after {partition.default_time},"
            " its default"
        )
    if job.gpus_per_node and "cpus_per_task" not in typed_fields:
        cores = format_count(job.cpus_per_task, "CPU core")
        unit = "process" if job.per_rank else "node"
        available = max(group.cpus for group in partition.nodes)
        sentences.append(
            f"no --cpus-per-task: {cores} per {unit}, 1 for each GPU and its data loading;"
            f" nodes have {available}"
        )
    return sentences


def find_job_warnings(job: BatchJob) -> list[str]:
    """Return a warning if other nodes probably cannot see the run directory."""
    conf = os.environ.get("SLURM_CONF") or slurm_environment().get("SLURM_CONF")
    if conf == str(lab_conf()):
        return []  # the nodes of a lab are this machine
    path = Path(job.job_dir).absolute()
    kind = get_file_system(path)
    if path.is_relative_to("/tmp") or kind in LOCAL_FILE_SYSTEMS:
        return [
            f"run directory {path} is on {kind or 'a disk'} of this machine:"
            " other nodes may not see it"
        ]
    return []
