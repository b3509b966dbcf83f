"""Whether a `run` or `train` is to work elsewhere: on the hosts it names, or on the nodes of its Slurm job."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Sequence
from typing import NoReturn

from stepladder.core.console import say
from stepladder.core.errors import InputError
from stepladder.launcher.allocation import Allocation
from stepladder.launcher.ssh import end_with_stdin, run_on_hosts
from stepladder.launcher.topology import Topology


def dispatch(arguments: Sequence[str], hosts: str, ssh: str, topology: Topology) -> int | None:
    """The exit code of the same command on other machines; None if this one is to do the work.

    arguments: the command's name, and what followed it.  In a Slurm job this process becomes `srun`.
    """
    end_with_stdin()
    if hosts:
        return run_on_hosts(arguments, hosts, ssh, topology)
    allocation = Allocation.detect()
    nodes = allocation.wanted(topology) if allocation else None
    if allocation is None or nodes is None:
        return None
    if shutil.which("srun") is None:
        raise InputError(f"SLURM_JOB_ID={allocation.job}, but there is no srun here", "unset SLURM_JOB_ID")
    command = allocation.command(arguments, topology, nodes, allocation.first_node() if nodes[1] > 1 else "")
    _become(command, allocation.job)


def become_step(arguments: Sequence[str], per_node: int) -> None:
    """In a Slurm job of several nodes, outside its steps: `srun` of the same command, `per_node` ranks on each.

    Returns elsewhere.
    """
    allocation = Allocation.detect()
    if allocation is not None and allocation.nodes > 1 and shutil.which("srun"):
        _become(allocation.step(arguments, per_node), allocation.job)


def _become(command: list[str], job: int) -> NoReturn:
    say(f"in Slurm job {job}: {shlex.join(command)}")
    os.execvp(command[0], command)
