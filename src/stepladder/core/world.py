"""Who am I: a frozen value, read once. The only reader of RANK, LOCAL_RANK and SLURM_* variables.

Precedence: torchrun's variables, then a Slurm step of several tasks, then a single process.
Half-set variables are an error, never rank 0. Standard library only.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace

from stepladder.core.errors import InputError, naming
from stepladder.core.numbers import MOST_PORT, number_in

MOST_RANKS = 1 << 16  # a file that says more is damaged


@dataclass(frozen=True)
class World:
    """One process among `world_size`.

    rank: 0 .. world_size-1, over all nodes.  local_rank: 0 .. ranks_per_node-1, on this node.
    init_method: where ranks meet, a URL for `torch.distributed` ("" for one process).
    source: which variables said so, for the start-up text.  note: something ignored on the way.
    restart_count: how often the launcher has restarted the ranks.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    ranks_per_node: int = 1
    init_method: str = ""
    source: str = "single process"
    note: str = ""
    restart_count: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise InputError(
                f"RANK={self.rank} with WORLD_SIZE={self.world_size}",
                "ranks count from 0 to WORLD_SIZE-1",
            )
        if not 0 <= self.local_rank < self.ranks_per_node:
            raise InputError(
                f"LOCAL_RANK={self.local_rank} with LOCAL_WORLD_SIZE={self.ranks_per_node}",
                "local ranks count from 0 to LOCAL_WORLD_SIZE-1",
            )

    @property
    def is_first(self) -> bool:
        """True on global rank 0, the only writer of the run directory."""
        return self.rank == 0

    @property
    def num_nodes(self) -> int:
        """Machines that the ranks are spread over, the last one possibly with fewer."""
        return -(-self.world_size // self.ranks_per_node)

    def describe(self) -> str:
        """One line for the start-up text."""
        ranks = "1 process" if self.world_size == 1 else f"rank {self.rank} of {self.world_size}"
        return f"{ranks} ({self.source}{'; ' + self.note if self.note else ''})"

    @staticmethod
    def detect(env: Mapping[str, str] | None = None) -> World:
        """Read who this process is from `env` (the process environment by default).

        Raises InputError on half-set or non-numeric variables.
        """
        env = os.environ if env is None else env
        if "RANK" in env:
            return World.from_torchrun(env)
        world = World.from_slurm(env) if number_in(env, "SLURM_STEP_NUM_TASKS", 1) > 1 else World()
        if "WORLD_SIZE" in env:
            # Some hosts preset it for every process: alone it says nothing about ranks.
            return replace(world, note=f"WORLD_SIZE={env['WORLD_SIZE']} without RANK ignored")
        return world

    @staticmethod
    def from_torchrun(env: Mapping[str, str]) -> World:
        """The variables that torchrun and `stepladder` set for each rank."""
        world_size = number_in(env, "WORLD_SIZE")
        needed = ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if world_size > 1 else ("LOCAL_RANK",)
        missing = [name for name in needed if name not in env]
        if missing:
            raise InputError(
                f"RANK={env['RANK']} is set without {' and '.join(missing)}",
                f"start with torchrun or `stepladder train --nproc N`, or set {' '.join(missing)}",
            )
        local_rank = number_in(env, "LOCAL_RANK")
        number_in(env, "MASTER_PORT", 0, most=MOST_PORT)
        return World(
            rank=number_in(env, "RANK"),
            world_size=world_size,
            local_rank=local_rank,
            ranks_per_node=number_in(env, "LOCAL_WORLD_SIZE", max(local_rank + 1, 1)),
            init_method="env://" if world_size > 1 else "",
            source="RANK, WORLD_SIZE, LOCAL_RANK",
            restart_count=number_in(env, "TORCHELASTIC_RESTART_COUNT", 0),
        )

    @staticmethod
    def from_slurm(env: Mapping[str, str]) -> World:
        """A task of `srun -n N`: rank by task, meeting on the first node of the step."""
        name = "SLURM_STEP_TASKS_PER_NODE"  # as in 2(x3),1
        number_in(env, "MASTER_PORT", 0, most=MOST_PORT)  # torch reads it too, wherever ranks meet
        tasks_here = number_in({name: re.split(r"[(,]", env.get(name, "1"))[0]}, name)
        local_rank = number_in(env, "SLURM_LOCALID")
        # Job ids grow without bound; the step is added so that two steps of one job do not meet.
        port = (
            20000
            + (number_in(env, "SLURM_JOB_ID") + 97 * number_in(env, "SLURM_STEP_ID", 0)) % 12000
        )
        one_node = number_in(env, "SLURM_STEP_NUM_NODES", 1) == 1
        host = (
            "127.0.0.1" if one_node else address_of_first_node(env.get("SLURM_STEP_NODELIST", ""))
        )
        return World(
            rank=number_in(env, "SLURM_PROCID"),
            world_size=number_in(env, "SLURM_STEP_NUM_TASKS"),
            local_rank=local_rank,
            ranks_per_node=max(tasks_here, local_rank + 1),
            init_method=f"tcp://{host}:{port}",
            source="Slurm step",
        )


def address_of_first_node(nodes: str) -> str:
    """Of a Slurm node list. `scontrol` knows the list's grammar; regexes get it wrong. Raises
    InputError.
    """

    def show(*what: str) -> str:
        words = ["scontrol", "show", *what]
        return subprocess.run(words, capture_output=True, text=True, timeout=20, check=True).stdout

    failed = f"the node list {nodes!r} could not be resolved by scontrol"
    hint = "export MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE and LOCAL_RANK in the job script"
    with naming(failed, hint, (OSError, subprocess.SubprocessError, IndexError)):
        first = show("hostnames", nodes).split()[0]
        shown = show("node", first)
    # A node's name need not resolve (virtual nodes); its NodeAddr always reaches slurmd.
    address = re.search(r"NodeAddr=(\S+)", shown)
    found = address.group(1) if address else first
    return f"[{found}]" if ":" in found else found
