"""Which process this is: a frozen value, read once.

No other module reads RANK, LOCAL_RANK and SLURM_* variables.

Precedence: torchrun's variables, then a Slurm step of several tasks, then a single process.
Half-set variables are an error, never rank 0. Standard library only.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace

from stepladder.core.errors import InputError, as_input_error
from stepladder.core.numbers import MAX_PORT, read_env_number

MAX_RANKS = 1 << 16  # a file that names more is damaged
SCONTROL_TIMEOUT_S = 20
FIRST_PORT = 20000
NUM_PORTS = 12000


@dataclass(frozen=True)
class World:
    """One process among `world_size`.

    Attributes:
        rank: 0 to world_size-1, over all nodes.
        world_size: The number of ranks.
        local_rank: 0 to ranks_per_node-1, on this node.
        ranks_per_node: The number of ranks on this node.
        init_method: A URL by which torch.distributed connects the ranks, "" for one process.
        source: Which variables decided, for the start-up text.
        note: What was ignored on the way.
        restart_count: How often the launcher has restarted the ranks.
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
        """Whether this is rank 0, the only writer of the run directory."""
        return self.rank == 0

    @property
    def num_nodes(self) -> int:
        """The number of machines, the last one possibly with fewer ranks."""
        return -(-self.world_size // self.ranks_per_node)

    def describe(self) -> str:
        """Return one line for the start-up text."""
        text = "1 process" if self.world_size == 1 else f"rank {self.rank} of {self.world_size}"
        source = f"{self.source}; {self.note}" if self.note else self.source
        return f"{text} ({source})"

    @staticmethod
    def detect(env: Mapping[str, str] | None = None) -> World:
        """Read the ranks of this process's run from `env`, by default the process environment.

        Returns:
            The world that torchrun's variables describe, or else those of a Slurm step with several
            tasks; a world of one process if neither is set.

        Raises:
            InputError: Only some of the variables are set, or one of them is not a number.
        """
        env = os.environ if env is None else env
        if "RANK" in env:
            return World.from_torchrun(env)
        is_slurm_step = read_env_number(env, "SLURM_STEP_NUM_TASKS", 1) > 1
        world = World.from_slurm(env) if is_slurm_step else World()
        if "WORLD_SIZE" in env:
            # Some hosts preset it for every process: alone it says nothing about ranks.
            return replace(world, note=f"WORLD_SIZE={env['WORLD_SIZE']} without RANK ignored")
        return world

    @staticmethod
    def from_torchrun(env: Mapping[str, str]) -> World:
        """Read the variables that torchrun and `stepladder` set for each rank."""
        world_size = read_env_number(env, "WORLD_SIZE")
        needed = ["LOCAL_RANK"]
        if world_size > 1:
            needed += ["MASTER_ADDR", "MASTER_PORT"]
        missing = [name for name in needed if name not in env]
        if missing:
            raise InputError(
                f"RANK={env['RANK']} is set without {' and '.join(missing)}",
                f"start with torchrun or `stepladder train --nproc N`, or set {' '.join(missing)}",
            )
        local_rank = read_env_number(env, "LOCAL_RANK")
        read_env_number(env, "MASTER_PORT", 0, maximum=MAX_PORT)  # only to validate it
        return World(
            rank=read_env_number(env, "RANK"),
            world_size=world_size,
            local_rank=local_rank,
            ranks_per_node=read_env_number(
                env,
                "LOCAL_WORLD_SIZE",
                max(local_rank + 1, 1),
            ),
            init_method="env://" if world_size > 1 else "",
            source="RANK, WORLD_SIZE, LOCAL_RANK",
            restart_count=read_env_number(env, "TORCHELASTIC_RESTART_COUNT", 0),
        )

    @staticmethod
    def from_slurm(env: Mapping[str, str]) -> World:
        """Read the variables of a task of `srun`; the ranks connect on the step's first node."""
        read_env_number(env, "MASTER_PORT", 0, maximum=MAX_PORT)  # torch reads it too
        name = "SLURM_STEP_TASKS_PER_NODE"  # as in 2(x3),1
        first_count = re.split(r"[(,]", env.get(name, "1"))[0]
        tasks_per_node = read_env_number({name: first_count}, name)
        local_rank = read_env_number(env, "SLURM_LOCALID")
        return World(
            rank=read_env_number(env, "SLURM_PROCID"),
            world_size=read_env_number(env, "SLURM_STEP_NUM_TASKS"),
            local_rank=local_rank,
            ranks_per_node=max(tasks_per_node, local_rank + 1),
            init_method=_make_slurm_url(env),
            source="Slurm step",
        )


def _make_slurm_url(env: Mapping[str, str]) -> str:
    """Return the URL at which the tasks of a Slurm step connect."""
    # Job ids grow without bound. The step is added so that two steps of one job have two ports.
    job_id = read_env_number(env, "SLURM_JOB_ID")
    step_id = read_env_number(env, "SLURM_STEP_ID", 0)
    port = FIRST_PORT + (job_id + 97 * step_id) % NUM_PORTS
    if read_env_number(env, "SLURM_STEP_NUM_NODES", 1) == 1:
        host = "127.0.0.1"
    else:
        host = find_first_node_address(env.get("SLURM_STEP_NODELIST", ""))
    return f"tcp://{host}:{port}"


def find_first_node_address(nodes: str) -> str:
    """Return the address of the first node of a Slurm node list.

    `scontrol` knows the grammar of such a list; regular expressions get it wrong.

    Raises:
        InputError: scontrol is missing, or does not know the list.
    """
    failed = f"the node list {nodes!r} could not be resolved by scontrol"
    hint = "export MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE and LOCAL_RANK in the job script"
    with as_input_error(
        failed,
        hint,
        (OSError, subprocess.SubprocessError, IndexError),
    ):
        first_node = _run_scontrol("hostnames", nodes).split()[0]
        node_text = _run_scontrol("node", first_node)
    # A node's name need not resolve (virtual nodes); its NodeAddr always reaches slurmd.
    match = re.search(r"NodeAddr=(\S+)", node_text)
    address = match.group(1) if match else first_node
    return f"[{address}]" if ":" in address else address


def _run_scontrol(entity: str, name: str) -> str:
    """Return the output of `scontrol show ENTITY NAME`."""
    command = ["scontrol", "show", entity, name]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=SCONTROL_TIMEOUT_S, check=True
    )
    return result.stdout
