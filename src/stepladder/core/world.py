"""Which process this is: a frozen value, read once.

No other module reads RANK, LOCAL_RANK, and the like of other launchers. `LAUNCHERS` lists the
variables of each. Half-set variables are an error, never rank 0. Standard library only.
"""

from __future__ import annotations

import os
import re
import subprocess
import zlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from stepladder.core.address import format_endpoint
from stepladder.core.arguments import validate_types
from stepladder.core.errors import InputError, as_input_error
from stepladder.core.numbers import MAX_PORT, read_env_number

MAX_RANKS = 1 << 16  # a file that names more is damaged
SCONTROL_TIMEOUT_S = 20
FIRST_PORT = 20000
NUM_PORTS = 12000  # the range ends below Linux's ephemeral ports


@dataclass(frozen=True)
class RankVariables:
    """The environment variables that a launcher sets for each rank.

    Args:
        launcher: Its name, for the start-up text.
        rank: The variable of the rank.
        world_size: The variable of the number of ranks.
        local_rank: The variable of the rank on its node.
        ranks_per_node: The variable of the number of ranks on this node.
        marker: The variable that only this launcher sets.
        hint: How to start the ranks.
        run_id: A variable that has another value in each run, but the same in all its ranks.
    """

    launcher: str
    rank: str
    world_size: str
    local_rank: str
    ranks_per_node: str
    marker: str
    hint: str
    run_id: str = ""

    def started(self, env: Mapping[str, str]) -> bool:
        """Return whether this launcher has started the process, as one of several ranks."""
        if self.marker not in env:
            return False
        return self is TORCHRUN or read_env_number(env, self.world_size, 2) > 1


TORCHRUN = RankVariables(
    "RANK, WORLD_SIZE, LOCAL_RANK",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    marker="RANK",
    hint="start with torchrun or `stepladder train --nproc N`",
)
SLURM = RankVariables(
    "Slurm step",
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_LOCALID",
    "SLURM_STEP_TASKS_PER_NODE",
    marker="SLURM_STEP_NUM_TASKS",
    hint="start with srun",
)
# In the order of precedence. Slurm starts the daemons of mpirun as a step, so that its variables
# come after those of Open MPI and Hydra. They come before PMI_RANK, which `srun --mpi=pmi2` sets.
LAUNCHERS = (
    TORCHRUN,
    RankVariables(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        marker="OMPI_COMM_WORLD_RANK",
        hint="start with mpirun",
        run_id="PMIX_NAMESPACE",
    ),
    RankVariables(
        "MPICH or Intel MPI",
        "PMI_RANK",
        "PMI_SIZE",
        "MPI_LOCALRANKID",
        "MPI_LOCALNRANKS",
        marker="MPI_LOCALRANKID",
        hint="start with mpiexec",
    ),
    SLURM,
    RankVariables(
        "PMI",
        "PMI_RANK",
        "PMI_SIZE",
        "PMI_LOCAL_RANK",
        "PMI_LOCAL_SIZE",
        marker="PMI_RANK",
        hint="start with mpiexec",
    ),
)


def find_launcher(env: Mapping[str, str]) -> RankVariables | None:
    """Return the launcher that has started this process as a rank, None if there is none."""
    return next((launcher for launcher in LAUNCHERS if launcher.started(env)), None)


def is_first_rank() -> bool:
    """Return whether this process is rank 0, or was started as no rank."""
    launcher = find_launcher(os.environ)
    return launcher is None or os.environ.get(launcher.rank) == "0"


def _validate_position(rank_name: str, rank: int, size_name: str, size: int, ranks: str) -> None:
    """Raise InputError unless a rank counts from 0 to size-1."""
    if not 0 <= rank < size:
        raise InputError(
            f"{rank_name}={rank} with {size_name}={size}", f"{ranks} count from 0 to {size_name}-1"
        )


@dataclass(frozen=True)
class World:
    """One process among `world_size`.

    Args:
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
        validate_types(World, vars(self))
        _validate_position("RANK", self.rank, "WORLD_SIZE", self.world_size, "ranks")
        _validate_position(
            "LOCAL_RANK", self.local_rank, "LOCAL_WORLD_SIZE", self.ranks_per_node, "local ranks"
        )

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, the only writer of the run directory."""
        return self.rank == 0

    @property
    def num_nodes(self) -> int:
        """The number of machines, the last one possibly with fewer ranks."""
        return -(-self.world_size // self.ranks_per_node)

    @property
    def endpoint(self) -> tuple[str, int]:
        """Host and port at which the ranks connect."""
        if self.init_method == "env://":
            return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        url = urlsplit(self.init_method)
        return url.hostname or "", url.port or 0

    def within_subgroup(self, labels: Sequence[Hashable]) -> World:
        """Return the place of this rank among the ranks with its label, given all ranks' labels."""
        own = labels[self.rank]
        rank = labels[: self.rank].count(own)
        return replace(self, rank=rank, world_size=labels.count(own))

    def describe(self) -> str:
        """Return one line for the start-up text."""
        text = "1 process" if self.world_size == 1 else f"rank {self.rank} of {self.world_size}"
        source = f"{self.source}; {self.note}" if self.note else self.source
        return f"{text} ({source})"

    @staticmethod
    def detect(env: Mapping[str, str] | None = None) -> World:
        """Read the ranks of this process's run from `env`, by default the process environment.

        Returns:
            The world that the variables of the first of `LAUNCHERS` describe which has started
            this process; a world of one process if none has.

        Raises:
            InputError: Only some of the variables are set, one of them is not a number, or they
                contradict each other.
        """
        env = os.environ if env is None else env
        launcher = find_launcher(env)
        if launcher is None:
            world = World()
        else:
            world = World.from_launcher(launcher, env)
        if "WORLD_SIZE" in env and launcher is not TORCHRUN:
            # Some hosts preset it for every process: alone it says nothing about ranks.
            return replace(world, note=f"WORLD_SIZE={env['WORLD_SIZE']} without RANK ignored")
        return world

    @staticmethod
    def from_launcher(launcher: RankVariables, env: Mapping[str, str]) -> World:
        """Read the variables that a launcher sets for each rank."""
        world_size = read_env_number(env, launcher.world_size)
        _validate_set(launcher, env, world_size)
        read_env_number(env, "MASTER_PORT", 0, maximum=MAX_PORT)  # torch reads it too
        rank = read_env_number(env, launcher.rank)
        local_rank = read_env_number(env, launcher.local_rank)
        name = launcher.ranks_per_node
        count = re.split(r"[(,]", env.get(name, "1"))[0]  # Slurm writes 2(x3),1
        ranks_per_node = read_env_number({name: count}, name)
        if launcher is SLURM or name not in env:
            ranks_per_node = max(ranks_per_node, local_rank + 1)
        _validate_position(launcher.rank, rank, launcher.world_size, world_size, "ranks")
        _validate_position(launcher.local_rank, local_rank, name, ranks_per_node, "local ranks")
        # A rank of ours that joins a running group is one of one until it has joined.
        if ranks_per_node > world_size and launcher not in (TORCHRUN, SLURM):
            raise InputError(
                f"{name}={ranks_per_node} with {launcher.world_size}={world_size}", launcher.hint
            )
        return World(
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            ranks_per_node=ranks_per_node,
            init_method=_make_url(launcher, env, world_size, ranks_per_node),
            source=launcher.launcher,
            restart_count=read_env_number(env, "TORCHELASTIC_RESTART_COUNT", 0),
        )


def _validate_set(launcher: RankVariables, env: Mapping[str, str], world_size: int) -> None:
    """Raise InputError if only some of a launcher's variables are set."""
    needed = [launcher.rank, launcher.local_rank]
    if launcher is TORCHRUN:
        if world_size > 1:
            needed += ["MASTER_ADDR", "MASTER_PORT"]
    elif launcher is not SLURM:
        needed.append(launcher.ranks_per_node)
    missing = [name for name in needed if name not in env]
    if missing:
        raise InputError(
            f"{launcher.marker}={env[launcher.marker]} is set without {' and '.join(missing)}",
            f"{launcher.hint}, or set {' '.join(missing)}",
        )


def _make_url(
    launcher: RankVariables, env: Mapping[str, str], world_size: int, ranks_per_node: int
) -> str:
    """Return the URL at which the ranks of a launcher connect, "" for one rank."""
    if world_size == 1:
        return ""
    if launcher is TORCHRUN:
        return "env://"
    if launcher is SLURM:
        return _make_slurm_url(env)
    if "MASTER_ADDR" in env and "MASTER_PORT" in env:
        return f"tcp://{format_endpoint(env['MASTER_ADDR'], int(env['MASTER_PORT']))}"
    if ranks_per_node < world_size or launcher.run_id not in env:
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in env]
        raise InputError(
            f"{launcher.world_size}={world_size} with {launcher.ranks_per_node}={ranks_per_node},"
            f" but {' and '.join(missing)} is not set: the ranks do not know where to connect",
            "export MASTER_ADDR=HOST MASTER_PORT=29500, HOST being that of rank 0; mpirun of Open"
            " MPI needs -x MASTER_ADDR -x MASTER_PORT too",
        )
    port = FIRST_PORT + zlib.crc32(env[launcher.run_id].encode()) % NUM_PORTS
    return f"tcp://127.0.0.1:{port}"


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
    with as_input_error(failed, hint, (OSError, subprocess.SubprocessError, IndexError)):
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
