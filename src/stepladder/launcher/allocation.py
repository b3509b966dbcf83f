"""Inside a Slurm allocation but outside a step of several tasks: `run` and `train` wrap themselves in `srun`."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stepladder.core.address import show_endpoint
from stepladder.core.cores import read_range
from stepladder.core.errors import InputError
from stepladder.core.world import address_of_first_node
from stepladder.launcher.topology import Topology

FIRST_PORT, NUM_PORTS = 20000, 12000  # below Linux's ephemeral range, one for each job


@dataclass(frozen=True)
class Allocation:
    """The nodes of a Slurm job, seen from outside its steps.

    job: its id.  nodes: how many.  nodelist: as Slurm writes it.  cpus: that each node gives at least, 0 unknown.
    gpus: per node, 0 unknown or none.  here: this process runs on one of the nodes, not where `salloc` was typed.
    in_step: within a step (`srun --pty bash`), which holds what a new one would need.
    """

    job: int
    nodes: int
    nodelist: str
    cpus: int = 0
    gpus: int = 0
    here: bool = False
    in_step: bool = False

    @staticmethod
    def detect(env: Mapping[str, str] | None = None) -> Allocation | None:
        """None outside an allocation, and in a task of a step of several: srun has started us already."""
        env = os.environ if env is None else env
        if not env.get("SLURM_JOB_ID", "").isdigit() or "RANK" in env:
            return None
        if _first_number(env.get("SLURM_STEP_NUM_TASKS", "")) > 1:
            return None
        cpus = [int(n) for n in re.findall(r"(\d+)(?:\(x\d+\))?", env.get("SLURM_JOB_CPUS_PER_NODE", ""))]
        return Allocation(
            job=int(env["SLURM_JOB_ID"]),
            nodes=_first_number(env.get("SLURM_JOB_NUM_NODES", env.get("SLURM_NNODES", ""))) or 1,
            nodelist=env.get("SLURM_JOB_NODELIST", env.get("SLURM_NODELIST", "")),
            cpus=min(cpus, default=0),
            gpus=_last_number(env.get("SLURM_GPUS_ON_NODE", ""))
            or _last_number(env.get("SLURM_GPUS_PER_NODE", "")),
            here="SLURMD_NODENAME" in env,
            in_step="SLURM_STEP_NUM_TASKS" in env,
        )

    def wanted(self, topology: Topology) -> tuple[int, int] | None:
        """The nodes to start on, least and most; None where this process is where the work is to be done.

        Raises InputError where more are asked for than the job has.
        """
        least, most = read_range("--nodes", topology.nodes or str(self.nodes))
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
        """`srun ... stepladder ARGUMENTS`, one agent per node. arguments: run or train, and what follows.

        address: of the job's first node, where the agents meet.
        """
        least, most = nodes
        loss = ["--kill-on-bad-exit=1"] if least == most else ["--no-kill", "--kill-on-bad-exit=0"]
        name, *rest = arguments
        flags = []
        if most > 1:
            port = FIRST_PORT + self.job % NUM_PORTS
            text = str(most) if least == most else f"{least}:{most}"
            flags = ["--nodes", text, "--rdzv-endpoint", topology.endpoint or show_endpoint(address, port)]
        elif topology.nodes != "1":
            flags = ["--nodes", "1"]
        if not topology.nproc and self.gpus:
            flags += ["--nproc", str(self.gpus)]
        return [
            "srun", f"--nodes={most}", f"--ntasks={most}", "--ntasks-per-node=1", *loss,
            *([f"--cpus-per-task={self.cpus}"] if self.cpus else []), *(["--overlap"] if self.in_step else []),
            sys.executable, "-m", "stepladder", name, *flags, *rest,
        ]  # fmt: skip

    def step(self, arguments: Sequence[str], per_node: int) -> list[str]:
        """`srun ... stepladder ARGUMENTS`, so many ranks on each node; 0: one for each GPU, or one."""
        tasks = per_node or self.gpus or 1
        flags = ["--overcommit"] * (tasks > self.cpus) + ["--overlap"] * self.in_step
        srun = ["srun", f"--nodes={self.nodes}", f"--ntasks-per-node={tasks}", *flags]
        return [*srun, sys.executable, "-m", "stepladder", *arguments]

    def first_node(self) -> str:
        """Its address, from scontrol. Raises InputError."""
        return address_of_first_node(self.nodelist)


def _first_number(text: str) -> int:
    found = re.match(r"\d+", text)
    return int(found.group()) if found else 0


def _last_number(text: str) -> int:
    """The count of `2`, `a100:2` or `gpu:a100:2`."""
    found = re.search(r"(\d+)$", text)
    return int(found.group(1)) if found else 0
