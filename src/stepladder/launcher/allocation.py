"""Whether a `run` or `train` is to work elsewhere: on the hosts it names, or on the nodes of its
Slurm job.

Inside a Slurm allocation but outside a step of several tasks they wrap themselves in `srun`.
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
from stepladder.core.world import find_first_node_address
from stepladder.launcher.stdin import end_with_stdin
from stepladder.launcher.topology import Topology

FIRST_PORT, NUM_PORTS = 20000, 12000  # below Linux's ephemeral range
NUMBER, REPEATED, TYPED = (
    r"(\d+)",
    r"(\d+)(?:\(x\d+\))?",
    r"(?:.*\D)?(\d+)",
)  # `2(x3)`; `gpu:a100:2`
ALIVE = {"RUNNING", "CONFIGURING", "SUSPENDED", "RESIZING", "SIGNALING", "STAGE_OUT"}
CPUS = "SLURM_JOB_CPUS_PER_NODE"


@dataclass(frozen=True)
class Allocation:
    """The nodes of a Slurm job, seen from outside its steps.

    job: its id.  nodes: how many.  nodelist: as Slurm writes it.  cpus: that each node gives at
    least, 0 unknown. gpus: per node, 0 unknown or none.  here: this process runs on one of the
    nodes, not where `salloc` was typed. in_step: within a step (`srun --pty bash`), which holds
    what a new one would need."""

    job: int
    nodes: int
    nodelist: str
    cpus: int = 0
    gpus: int = 0
    here: bool = False
    in_step: bool = False

    @staticmethod
    def detect(env: Mapping[str, str] | None = None) -> Allocation | None:
        """None outside an allocation, and in a task of a step of several: srun has started us
        already.
        """
        env = os.environ if env is None else env
        if not env.get("SLURM_JOB_ID") or "RANK" in env:
            return None
        job = _read(env, "SLURM_JOB_ID", NUMBER)
        if _read(env, "SLURM_STEP_NUM_TASKS", NUMBER) > 1:
            return None
        cpus = env.get(CPUS, "").split(",")
        return Allocation(
            job=job,
            nodes=_read(env, "SLURM_JOB_NUM_NODES", NUMBER)
            or _read(env, "SLURM_NNODES", NUMBER)
            or 1,
            nodelist=env.get("SLURM_JOB_NODELIST", env.get("SLURM_NODELIST", "")),
            cpus=min(_read({CPUS: part}, CPUS, REPEATED) for part in cpus),
            gpus=_read(env, "SLURM_GPUS_ON_NODE", TYPED)
            or _read(env, "SLURM_GPUS_PER_NODE", TYPED),
            here="SLURMD_NODENAME" in env,
            in_step="SLURM_STEP_NUM_TASKS" in env,
        )

    def wanted(self, topology: Topology) -> tuple[int, int] | None:
        """The nodes to start on, least and most; None where this process is where the work is to be
        done.

        Raises InputError where more are asked for than the job has.
        """
        least, most = parse_range("--nodes", topology.nodes or str(self.nodes))
        if least > self.nodes:
            raise InputError(
                f"--nodes {topology.nodes} in Slurm job {self.job}, which has {self.nodes}",
                f"--nodes {self.nodes}, or salloc --nodes={least}",
            )
        most = min(most, self.nodes)
        return None if most == 1 and self.here else (least, most)

    def command(
        self, arguments: Sequence[str], topology: Topology, nodes: tuple[int, int], address: str
    ) -> list[str]:
        """`srun ... stepladder ARGUMENTS`, one agent per node. arguments: run or train, and what
        follows.

        address: of the job's first node, where the agents meet.
        """
        least, most = nodes
        loss = ["--kill-on-bad-exit=1"] if least == most else ["--no-kill", "--kill-on-bad-exit=0"]
        name, *rest = arguments
        flags = []
        if most > 1:
            port = FIRST_PORT + secrets.randbelow(NUM_PORTS)
            text = str(most) if least == most else f"{least}:{most}"
            flags = [
                "--nodes",
                text,
                "--rdzv-endpoint",
                topology.endpoint or format_endpoint(address, port),
            ]
        elif topology.nodes != "1":
            flags = ["--nodes", "1"]
        if not topology.nproc and self.gpus:
            flags += ["--nproc", str(self.gpus)]
        return [
            "srun",
            f"--nodes={most}",
            f"--ntasks={most}",
            "--ntasks-per-node=1",
            *loss,
            *([f"--cpus-per-task={self.cpus}"] if self.cpus else []),
            *(["--overlap"] if self.in_step else []),
            sys.executable,
            "-m",
            "stepladder",
            name,
            *flags,
            *rest,
        ]

    def step(self, arguments: Sequence[str], per_node: int) -> list[str]:
        """`srun ... stepladder ARGUMENTS`, so many ranks on each node; 0: one for each GPU, or one."""
        tasks = per_node or self.gpus or 1
        flags = ["--overcommit"] * (tasks > self.cpus) + ["--overlap"] * self.in_step
        srun = ["srun", f"--nodes={self.nodes}", f"--ntasks-per-node={tasks}", *flags]
        return [*srun, sys.executable, "-m", "stepladder", *arguments]


def _read(env: Mapping[str, str], name: str, pattern: str) -> int:
    """The number that the pattern finds in a variable, 0 where it is not set. Raises InputError."""
    text = env.get(name, "")
    found = re.fullmatch(pattern, text)
    number = parse_whole_number(found.group(1)) if found else None
    if text and number is None:
        raise InputError(
            f"{name} is {text!r}, which is not Slurm's way to write it",
            f"unset {name}, or SLURM_JOB_ID",
        )
    return number or 0


def dispatch(arguments: Sequence[str], hosts: str, ssh: str, topology: Topology) -> int | None:
    """The exit code of the same command on other machines; None if this one is to do the work.

    arguments: the command's name, and what followed it.  In a Slurm job this process becomes
    `srun`."""
    end_with_stdin()
    if hosts:
        from stepladder.launcher.ssh import (
            run_on_hosts,
        )  # asyncio, for which other starts need not wait

        return run_on_hosts(arguments, hosts, ssh, topology)
    allocation = Allocation.detect()
    nodes = allocation.wanted(topology) if allocation else None
    if allocation is None or nodes is None:
        take_secret_from_env()
        return None
    if shutil.which("srun") is None:
        raise InputError(
            f"SLURM_JOB_ID={allocation.job}, but there is no srun here", "unset SLURM_JOB_ID"
        )
    refuse_ended(allocation.job)
    address = find_first_node_address(allocation.nodelist) if nodes[1] > 1 else ""
    if arguments[0] == "run" and nodes[1] > 1:
        # srun hands it on to the agents of all nodes. `train` has a secret in its run directory.
        os.environ.setdefault(SECRET_VARIABLE, make_secret())
    _become(allocation.command(arguments, topology, nodes, address), allocation.job)


def refuse_ended(job: int) -> None:
    """Raises InputError for a job that is over, or that Slurm does not know: srun would say so at
    length.
    """
    from stepladder.slurm.client import parse_field, run_slurm  # late: most runs are in no job

    try:
        state = parse_field(run_slurm("scontrol", "show", "job", str(job)), "JobState")
    except InputError as error:
        raise InputError(f"SLURM_JOB_ID={job}: {error.problem}", "unset SLURM_JOB_ID") from error
    if state and state not in ALIVE:
        raise InputError(
            f"SLURM_JOB_ID={job}, a job that is {state}", "unset SLURM_JOB_ID, or salloc a new one"
        )


def become_step(arguments: Sequence[str], per_node: int) -> None:
    """In a Slurm job of several nodes, outside its steps: `srun` of the same command, `per_node`
    ranks on each.

    Returns elsewhere.
    """
    allocation = Allocation.detect()
    if allocation is not None and allocation.nodes > 1 and shutil.which("srun"):
        _become(allocation.step(arguments, per_node), allocation.job)


def _become(command: list[str], job: int) -> NoReturn:
    print_message(f"in Slurm job {job}: {mask_command(command)}")
    os.execvp(command[0], command)
