"""`run` and `train` on other machines: on the hosts they name, or on the nodes of their Slurm job.

In a Slurm allocation, but outside a step of several tasks, the command becomes `srun` of itself.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from stepladder.core.address import format_endpoint
from stepladder.core.console import print_message
from stepladder.core.errors import InputError
from stepladder.core.masking import mask_command
from stepladder.core.numbers import parse_whole_number
from stepladder.core.process_count import parse_range
from stepladder.core.signing import SECRET_VARIABLE, make_secret, take_secret_from_env
from stepladder.core.world import FIRST_PORT, NUM_PORTS, find_first_node_address, find_launcher
from stepladder.launcher.stdin import end_with_stdin
from stepladder.launcher.topology import CLUSTER_VARIABLE, Topology

NUMBER_PATTERN = r"(\d+)"
REPEATED_PATTERN = r"(\d+)(?:\(x\d+\))?"  # such as 2(x3)
TYPED_PATTERN = r"(?:.*\D)?(\d+)"  # such as gpu:a100:2
ALIVE_JOB_STATES = {"RUNNING", "CONFIGURING", "SUSPENDED", "RESIZING", "SIGNALING", "STAGE_OUT"}
CPUS_VARIABLE = "SLURM_JOB_CPUS_PER_NODE"


@dataclass(frozen=True)
class Allocation:
    """The nodes of a Slurm job, as a process outside its steps sees them.

    Args:
        job: The job's id.
        nodes: The number of nodes.
        nodelist: Their names, as Slurm writes them.
        cpus: CPUs that each node has at least; 0 if unknown.
        gpus: GPUs per node; 0 if unknown or none.
        is_on_node: This process runs on one of the nodes, not where `salloc` was typed.
        in_step: It is in a step (`srun --pty bash`), which holds the resources that a further step
            needs.
    """

    job: int
    nodes: int
    nodelist: str
    cpus: int = 0
    gpus: int = 0
    is_on_node: bool = False
    in_step: bool = False

    @staticmethod
    def detect(env: Mapping[str, str] | None = None) -> Allocation | None:
        """Return the allocation of this process.

        Args:
            env: The environment, by default that of this process.

        Returns:
            None outside an allocation, and in a rank that srun or another launcher has started.
        """
        env = os.environ if env is None else env
        if not env.get("SLURM_JOB_ID") or find_launcher(env) is not None:
            return None
        job = _parse_variable(env, "SLURM_JOB_ID", NUMBER_PATTERN)
        nodes = _parse_variable(env, "SLURM_JOB_NUM_NODES", NUMBER_PATTERN)
        nodes = nodes or _parse_variable(env, "SLURM_NNODES", NUMBER_PATTERN)
        gpus = _parse_variable(env, "SLURM_GPUS_ON_NODE", TYPED_PATTERN)
        gpus = gpus or _parse_variable(env, "SLURM_GPUS_PER_NODE", TYPED_PATTERN)
        return Allocation(
            job=job,
            nodes=nodes or 1,
            nodelist=env.get("SLURM_JOB_NODELIST", env.get("SLURM_NODELIST", "")),
            cpus=_parse_cpus(env),
            gpus=gpus,
            is_on_node="SLURMD_NODENAME" in env,
            in_step="SLURM_STEP_NUM_TASKS" in env,
        )

    def nodes_to_start(self, topology: Topology) -> tuple[int, int] | None:
        """Return the smallest and the largest number of nodes to start on.

        Args:
            topology: The flags that say where the ranks are.

        Returns:
            None if this process is to do the work itself.

        Raises:
            InputError: The job has fewer nodes.
        """
        min_nodes, max_nodes = parse_range("--nodes", topology.nodes or str(self.nodes))
        if min_nodes > self.nodes:
            raise InputError(
                f"--nodes {topology.nodes} in Slurm job {self.job}, which has {self.nodes}",
                f"--nodes {self.nodes}, or salloc --nodes={min_nodes}",
            )
        max_nodes = min(max_nodes, self.nodes)
        if max_nodes == 1 and self.is_on_node:
            return None
        return min_nodes, max_nodes

    def srun_command(
        self, arguments: Sequence[str], topology: Topology, nodes: tuple[int, int], address: str
    ) -> list[str]:
        """Return the srun command that starts one agent per node.

        Args:
            arguments: `run` or `train`, and its arguments.
            topology: The flags that say where the ranks are.
            nodes: The smallest and the largest number of nodes.
            address: The address of the job's first node, where the agents meet.
        """
        min_nodes, max_nodes = nodes
        name, *command_arguments = arguments
        srun = ["srun", f"--nodes={max_nodes}", f"--ntasks={max_nodes}", "--ntasks-per-node=1"]
        if min_nodes == max_nodes:
            srun += ["--kill-on-bad-exit=1"]
        else:
            srun += ["--no-kill", "--kill-on-bad-exit=0"]
        if self.cpus:
            srun += [f"--cpus-per-task={self.cpus}"]
        if self.in_step:
            srun += ["--overlap"]
        flags = self._make_agent_flags(topology, nodes, address)
        return [*srun, sys.executable, "-m", "stepladder", name, *flags, *command_arguments]

    def _make_agent_flags(
        self, topology: Topology, nodes: tuple[int, int], address: str
    ) -> list[str]:
        """Return the flags that the agents need in addition to what was typed."""
        min_nodes, max_nodes = nodes
        flags = []
        if max_nodes > 1:
            is_fixed = min_nodes == max_nodes
            port = FIRST_PORT + secrets.randbelow(NUM_PORTS)
            flags += ["--nodes", str(max_nodes) if is_fixed else f"{min_nodes}:{max_nodes}"]
            flags += ["--rdzv-endpoint", topology.endpoint or format_endpoint(address, port)]
        elif topology.nodes != "1":
            flags += ["--nodes", "1"]
        if not topology.nproc and self.gpus:
            flags += ["--nproc", str(self.gpus)]
        return flags

    def srun_step_command(self, arguments: Sequence[str], ranks_per_node: int) -> list[str]:
        """Return the srun command that starts ranks on each node.

        Args:
            arguments: The command's name, and its arguments.
            ranks_per_node: 0 for one on each GPU, or one.
        """
        tasks = ranks_per_node or self.gpus or 1
        srun = ["srun", f"--nodes={self.nodes}", f"--ntasks-per-node={tasks}"]
        if tasks > self.cpus:
            srun += ["--overcommit"]
        if self.in_step:
            srun += ["--overlap"]
        return [*srun, sys.executable, "-m", "stepladder", *arguments]


def _parse_cpus(env: Mapping[str, str]) -> int:
    """Return the smallest number of CPUs of a node."""
    parts = env.get(CPUS_VARIABLE, "").split(",")
    return min(
        _parse_variable({CPUS_VARIABLE: part}, CPUS_VARIABLE, REPEATED_PATTERN) for part in parts
    )


def _parse_variable(env: Mapping[str, str], name: str, pattern: str) -> int:
    """Return the number in a variable, 0 where it is not set.

    Raises:
        InputError: The variable does not match the pattern.
    """
    text = env.get(name, "")
    match = re.fullmatch(pattern, text)
    number = parse_whole_number(match.group(1)) if match else None
    if text and number is None:
        raise InputError(
            f"{name} is {text!r}, which is not Slurm's way to write it",
            f"unset {name}, or SLURM_JOB_ID",
        )
    return number or 0


def start_elsewhere(
    arguments: Sequence[str], hosts: str, ssh: str, topology: Topology
) -> int | None:
    """Run the same command on other machines, if the flags or a Slurm job ask for that.

    In a Slurm job this process becomes `srun`.

    Args:
        arguments: The command's name, and its arguments.
        hosts: The value of --hosts.
        ssh: The value of --ssh.
        topology: The flags that say where the ranks are.

    Returns:
        The exit code, or None if this process is to do the work itself.

    Raises:
        InputError: This is a Slurm job, but there is no `srun`, or the job has ended.
    """
    end_with_stdin()
    if not (hosts or topology.nodes):
        topology = _find_nodes_of_cluster() or topology
    if topology.hosts and not hosts:
        return _run_on_cluster_hosts(arguments, ssh, topology)
    if hosts:
        from stepladder.launcher.ssh import run_on_hosts  # late: asyncio, for --hosts alone

        return run_on_hosts(arguments, hosts, ssh, topology)
    allocation = Allocation.detect()
    nodes = allocation.nodes_to_start(topology) if allocation else None
    if allocation is None or nodes is None:
        take_secret_from_env()
        return None
    if shutil.which("srun") is None:
        raise InputError(
            f"SLURM_JOB_ID={allocation.job}, but there is no srun here", "unset SLURM_JOB_ID"
        )
    _validate_job_is_alive(allocation.job)
    address = find_first_node_address(allocation.nodelist) if nodes[1] > 1 else ""
    if arguments[0] == "run" and nodes[1] > 1:
        # srun passes it to the agents of all nodes. `train` has a secret in its run directory.
        os.environ.setdefault(SECRET_VARIABLE, make_secret())
    command = allocation.srun_command(arguments, topology, nodes, address)
    _exec_srun(command, allocation.job)


def _find_nodes_of_cluster() -> Topology | None:
    """Return the nodes of the job of another batch system in which this process runs, if any."""
    if not os.environ.get(CLUSTER_VARIABLE) or find_launcher(os.environ) is not None:
        return None
    from stepladder.launcher.batch.cluster import open_cluster  # late: most runs are in no job

    return open_cluster().allocation(os.environ)


def _run_on_cluster_hosts(arguments: Sequence[str], ssh: str, topology: Topology) -> int:
    """Run the command on the hosts that a cluster has given, and return the exit code."""
    from stepladder.launcher.ssh import run_on_hosts  # late: asyncio

    print_message(topology.note)
    name, *command_arguments = arguments
    flags = []
    for flag, value in (("--nodes", topology.nodes), ("--nproc", topology.nproc)):
        if value:
            flags += [flag, value]
    return run_on_hosts([name, *flags, *command_arguments], topology.hosts, ssh, topology)


def _validate_job_is_alive(job: int) -> None:
    """Raise InputError for a job that has ended or is unknown, for which srun prints many lines."""
    from stepladder.slurm.client import parse_field, run_slurm  # late: most runs are in no job

    try:
        state = parse_field(run_slurm("scontrol", "show", "job", str(job)), "JobState")
    except InputError as error:
        raise InputError(f"SLURM_JOB_ID={job}: {error.problem}", "unset SLURM_JOB_ID") from error
    if state and state not in ALIVE_JOB_STATES:
        raise InputError(
            f"SLURM_JOB_ID={job}, a job that is {state}", "unset SLURM_JOB_ID, or salloc a new one"
        )


def exec_srun_step(arguments: Sequence[str], ranks_per_node: int) -> None:
    """Become `srun` of the same command, in a Slurm job of several nodes outside its steps.

    Elsewhere it does nothing.

    Args:
        arguments: The command's name, and its arguments.
        ranks_per_node: 0 for one on each GPU, or one.
    """
    allocation = Allocation.detect()
    if allocation is not None and allocation.nodes > 1 and shutil.which("srun"):
        _exec_srun(allocation.srun_step_command(arguments, ranks_per_node), allocation.job)


def _exec_srun(command: list[str], job: int) -> NoReturn:
    print_message(f"in Slurm job {job}: {mask_command(command)}")
    os.execvp(command[0], command)
