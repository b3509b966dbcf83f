"""The start of a run: as this process, as ranks on this machine, or as agents on several nodes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from stepladder.core.address import (
    can_bind,
    is_listening,
    is_local,
    parse_endpoint,
    validate_interface,
    validate_reachable,
    wait_for_name,
)
from stepladder.core.errors import InputError
from stepladder.core.machine_limits import validate_limits
from stepladder.core.numbers import MAX_PORT, read_env_number, validate_wait_time
from stepladder.core.process_count import choose_threads_per_rank, count_gpus
from stepladder.core.scratch import get_scratch_folder
from stepladder.core.settings import Settings, TrainRequest
from stepladder.core.world import World
from stepladder.launcher.local.group_spec import GroupSpec
from stepladder.launcher.local.local_group import LocalGroup
from stepladder.launcher.local.monitor import Limits
from stepladder.launcher.local.output import LogFiles
from stepladder.launcher.local.supervisor import run_local
from stepladder.launcher.nodes.local_node import exit_if_threads_wait, open_local_node
from stepladder.launcher.nodes.self_monitor import start_self_monitor
from stepladder.launcher.topology import Topology
from stepladder.rank.exit_record import EndWriter, identify_start
from stepladder.rank.lifecycle import record_failure, run_and_exit
from stepladder.rank.preemption import get_seconds_left
from stepladder.storage.trained_jobs import record_trained_job

FOREIGN_LOCK_TIMEOUT_S = 120.0
# Python's own hashes of texts differ in each start without it, and with them the order of a set of
# words: a vocabulary made of one would be another on each rank, and after each resume.
HASH_SEED_VARIABLE = "PYTHONHASHSEED"
# Spins of torch's threads once torch is loaded, so that they wait for each other for microseconds
# only. libgomp's default is hundreds of times that. On a busy machine a long spin takes the core
# from the very thread that is waited for: with twenty runnable processes on two cores, 0.6 steps a
# second became 8.
GOMP_SPIN_COUNT = "3000"


@dataclass(frozen=True)
class Launch:
    """How `train` starts its processes, and where.

    Args:
        topology: Nodes and processes.
        max_restarts: How often all ranks may restart from the last snapshot.
        explain_after: Seconds without progress until the reason is printed; None for a minute, or
            half the timeout.
        on_loss: What the other ranks do when one is lost: "continue" in place, "restart" from the
            last snapshot, or "stop". With --shard they restart in place of "continue", unless there
            are two copies of each slice.
    """

    topology: Topology = field(default_factory=Topology)
    max_restarts: int = 3
    explain_after: float | None = None
    on_loss: str = "continue"

    @property
    def restarts(self) -> int:
        """The number of restarts that are allowed."""
        return 0 if self.on_loss == "stop" else self.max_restarts

    def __post_init__(self) -> None:
        if self.explain_after is not None:
            validate_wait_time("--explain-after", self.explain_after)
        if self.max_restarts < 0:
            raise InputError(
                f"--max-restarts {self.max_restarts} is too small", "--max-restarts 0 or more"
            )


def start(request: TrainRequest, launch: Launch) -> int:
    """Train in every rank, and return the exit code of this process.

    This process may be a rank, the parent of ranks, or a node's agent.

    Returns:
        0 if the training is complete, 75 if it has stopped with a snapshot, otherwise 1.

    Raises:
        InputError: The time limit, the job or a setting is invalid.
    """
    if identify_start()["restart"]:  # of a batch job: --fresh was meant for its first start
        request = replace(request, settings=replace(request.settings, fresh=False))
    get_seconds_left()  # raises InputError for an invalid time limit
    with EndWriter() as end:
        placement = _place_ranks(request, launch)
        _fix_text_hashes(placement.is_rank)
        if placement.is_single_process:
            validate_limits()
            get_scratch_folder()  # sockets of data loaders are there
            # Imports torch: only in a process that is a rank.
            from stepladder.train.job_runner import train_file

            with record_failure():
                end.code = train_file(request)
        else:
            end.code = _start_ranks(request, launch, placement)
    return exit_if_threads_wait(end.code)


@dataclass(frozen=True)
class _Placement:
    """The processes of a run, as far as this process knows them.

    Args:
        world: The ranks that a launcher outside of this package has started, if any.
        nodes: The smallest and the largest number of nodes.
        min_nproc: The smallest number of ranks on this node.
        max_nproc: The largest number of ranks on this node.
    """

    world: World
    nodes: tuple[int, int]
    min_nproc: int
    max_nproc: int

    @property
    def is_on_nodes(self) -> bool:
        """Whether the run may use several nodes."""
        return self.nodes[1] > 1

    @property
    def is_rank(self) -> bool:
        """Whether this process is a rank, and starts none."""
        return self.is_single_process or (not self.is_on_nodes and self.world.world_size > 1)

    @property
    def is_single_process(self) -> bool:
        """Whether this process is the only rank."""
        return not self.is_on_nodes and self.world.world_size == 1 and self.max_nproc == 1


def _fix_text_hashes(is_rank: bool) -> None:
    """Have Python hash a text alike in each rank and start, unless the user has chosen how.

    It reads the variable when it starts: a command that is a rank itself starts anew.
    """
    if HASH_SEED_VARIABLE not in os.environ:
        os.environ[HASH_SEED_VARIABLE] = "0"
        is_command = "stepladder" in Path(sys.argv[0]).parts[-2:]  # its file or its __main__.py
        if is_rank and is_command and sys.flags.hash_randomization:
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _place_ranks(request: TrainRequest, launch: Launch) -> _Placement:
    """Return the processes of the run, after checking that the settings allow them."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", GOMP_SPIN_COUNT)
    nodes, (min_nproc, max_nproc) = launch.topology.parse_ranges()
    is_on_nodes = nodes[1] > 1
    may_change = min_nproc < max_nproc or is_on_nodes
    if may_change and request.settings.batch_per_rank is not None:
        raise InputError(
            "--batch-per-rank with a number of processes that may change:"
            " the global batch would change with it",
            "--global-batch N, or --nproc N",
        )
    world = World() if is_on_nodes else World.detect()
    if world.is_first:
        record_trained_job(request.job)
    _validate_nproc(launch.topology.nproc, world)
    max_ranks = max(world.world_size, nodes[1] * max_nproc)
    _validate_fail_at(request.settings.fail_at, max_ranks)
    request.settings.validate_shard_copies(max_ranks)
    return _Placement(world, nodes, min_nproc, max_nproc)


def _start_ranks(request: TrainRequest, launch: Launch, placement: _Placement) -> int:
    """Train in several ranks, and return the exit code. A rank of another launcher ends here."""
    if placement.is_on_nodes:
        return _run_job_node(request, launch, placement.nodes, placement.max_nproc)
    if placement.world.world_size > 1:
        # Set before torch is loaded: for ranks that do not come it prints a page of C++ frames.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        validate_limits()
        start_self_monitor(placement.world, launch.explain_after)
        run_and_exit(train_rank, request)
    group = _make_job_group(request, launch, placement.max_nproc)
    return run_local(group, placement.max_nproc, launch.restarts, placement.min_nproc)


def _validate_nproc(nproc: str, world: World) -> None:
    """Raise InputError where --nproc contradicts the launcher that started this process."""
    if world.world_size > 1 and nproc not in ("", "1", str(world.ranks_per_node)):
        raise InputError(
            f"--nproc {nproc} inside {world.describe()}",
            "leave --nproc out: the launcher has decided",
        )


def _validate_fail_at(places: Iterable[tuple[int, int]], rank_count: int) -> None:
    """Raise InputError where --fail-at names a rank that does not exist."""
    for rank, step in places:
        if rank >= rank_count:
            raise InputError(
                f"--fail-at {rank}:{step}: there is no rank {rank}",
                f"--fail-at {rank_count - 1}:{step}",
            )


def train_rank(request: TrainRequest) -> int:
    """Train as a rank. It imports torch; the parent of ranks does not."""
    from stepladder.train.job_runner import train_file

    return train_file(request)


def _make_job_group(
    request: TrainRequest, launch: Launch, nproc: int, may_join: bool = False
) -> LocalGroup:
    """Make a group of ranks that train a job.

    Args:
        request: The job and its settings.
        launch: How the ranks are started.
        nproc: The number of ranks on this node.
        may_join: Whether nodes may join the running ranks, if these recover in place.

    Returns:
        The group, none of whose ranks is started yet.
    """
    settings = request.settings
    limits = Limits(settings.timeout, launch.explain_after)
    recovers_in_place = launch.on_loss == "continue" and settings.survives_loss
    spec = GroupSpec(
        output=LogFiles(settings.run_dir / "log"),
        recovers_in_place=recovers_in_place,
        accepts_joining_nodes=recovers_in_place and may_join,
    )
    threads = choose_threads_per_rank(settings.threads, settings.sync, nproc)
    return LocalGroup(partial(train_rank, request), threads, limits, spec)


def _run_job_node(request: TrainRequest, launch: Launch, nodes: tuple[int, int], nproc: int) -> int:
    """Run this machine's part of a job on several nodes.

    Args:
        request: The job and its settings.
        launch: How the ranks are started.
        nodes: The smallest and the largest number of nodes.
        nproc: The number of ranks on this node.

    Returns:
        The exit code, when all nodes have ended.
    """
    settings = request.settings
    _validate_node_environment(launch.topology, settings)
    # Imported late for psutil, which `train --help` does not need.
    from stepladder.launcher.nodes.run_dir_rendezvous import RunDirRendezvous

    rendezvous = RunDirRendezvous(
        settings.run_dir,
        launch.topology.local_addr,
        launch.topology.endpoint,
        settings.fresh,
        settings.timeout,
        job_digest=request.fingerprint,
        max_nodes=nodes[1],
    )
    # The lock of a node without power stays for a while on a network file system.
    lock_wait = max(settings.lock_wait, FOREIGN_LOCK_TIMEOUT_S)
    node_settings = replace(settings, fresh=False, most_ranks=nodes[1] * nproc, lock_wait=lock_wait)
    is_on_cpu = settings.device == "cpu" or not count_gpus()  # on GPUs, all ranks restart
    request = replace(request, settings=node_settings)
    group = _make_job_group(request, launch, nproc, may_join=is_on_cpu)
    with open_local_node(group, nproc, launch.restarts) as node:
        from stepladder.launcher.nodes.launch import train_on_nodes  # torchelastic imports torch

        return train_on_nodes(node, rendezvous, nodes)


def _validate_node_environment(topology: Topology, settings: Settings) -> None:
    """Raise InputError where this process cannot be the agent of one of several nodes."""
    if "RANK" in os.environ:
        raise InputError(
            f"--nodes {topology.nodes} inside a rank (RANK={os.environ['RANK']})",
            "leave --nodes out under torchrun, or start `stepladder train` once per node without"
            " it",
        )
    read_env_number(os.environ, "MASTER_PORT", 0, MAX_PORT)  # torch reads it too
    validate_interface()
    if not topology.endpoint:
        return
    host, port = parse_endpoint(topology.endpoint)
    wait_for_name("--rdzv-endpoint", host, settings.timeout)
    validate_reachable("--rdzv-endpoint", host, topology.local_addr)
    is_taken = is_local(host) and not can_bind(host, port)
    if is_taken and not is_listening(host, port):
        raise InputError(f"--rdzv-endpoint: port {port} cannot be opened here", "another port")
