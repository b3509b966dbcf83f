"""What the commands for batch jobs ask of a cluster.

`submit`, `status`, `logs`, `cancel`, `watch JOB` and `scale --nodes` know no cluster but through
the protocol `Cluster`. Slurm is the one cluster here. An installed package may offer another one,
as an entry point of the group `stepladder.clusters`; `cluster = "NAME"` in stepladder.toml, or the
variable STEPLADDER_CLUSTER, chooses it.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Container, Mapping, Sequence
from typing import Protocol, cast

from stepladder.core.errors import InputError
from stepladder.core.plugins import load_plugin
from stepladder.launcher.topology import CLUSTER_VARIABLE, Topology
from stepladder.slurm.batch_job import BatchJob
from stepladder.slurm.cluster import SlurmCluster
from stepladder.slurm.site_defaults import find_site_defaults
from stepladder.slurm.submitted_jobs import JobInfo

CLUSTER_GROUP = "stepladder.clusters"  # of entry points


class Cluster(Protocol):
    """A batch system.

    A subclass needs `submit`, `state` and `cancel`. The other methods have defaults for a cluster
    that cannot do more.
    """

    @abstractmethod
    def submit(self, job: BatchJob) -> str:
        """Submit a job, and return its id. Raise InputError if the cluster refuses it."""

    @abstractmethod
    def state(self, job_id: str) -> JobInfo | None:
        """Return what the cluster knows of a job, None if it does not know the job (any more).

        Entries that are "" are completed from what was noted when the job was submitted from here.
        `output`, the file of what the job prints, is what `logs` shows.
        """

    @abstractmethod
    def cancel(self, job_ids: Sequence[str], name: str = "") -> None:
        """End jobs for good: those of these ids, and all of this user that have this name."""

    def render(self, job: BatchJob) -> str:
        """Return the batch script, for `submit --dry-run`."""
        raise InputError("--dry-run: this cluster shows no batch script", "leave --dry-run out")

    def validate(self, job: BatchJob, typed_fields: Container[str]) -> Sequence[str]:
        """Raise InputError if the cluster cannot run the job.

        Args:
            job: The job.
            typed_fields: The fields of the job that flags have set.

        Returns:
            Lines to print before the job is submitted.
        """
        return ()

    def list_jobs(self) -> Sequence[JobInfo] | None:
        """Return this user's active jobs, None for those that were submitted from here."""
        return None

    def allocation(self, env: Mapping[str, str]) -> Topology | None:
        """Return the nodes of the job in which this process runs, None if it runs in no job.

        `train` and `run` start themselves on the hosts of the topology, over SSH. They ask only
        where STEPLADDER_CLUSTER is set, and no flag and no launcher has named nodes.
        """
        return None


def open_cluster(configured: str | None = None) -> Cluster:
    """Return the cluster of this machine.

    Args:
        configured: The cluster that stepladder.toml names, if that file was read already.

    Raises:
        InputError: stepladder.toml is not valid, or names a cluster that is not installed.
    """
    name = os.environ.get(CLUSTER_VARIABLE) or configured
    if name is None:
        name = find_site_defaults().cluster
    if name in ("", "slurm"):
        return SlurmCluster()
    return cast(Cluster, load_plugin(CLUSTER_GROUP, name, "cluster")())
