"""How a run's processes come about: this one, ranks on this machine, or agents on several nodes."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial

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
from stepladder.core.settings import TrainRequest
from stepladder.core.world import World
from stepladder.launcher.local.group_spec import GroupSpec
from stepladder.launcher.local.local_group import LocalGroup
from stepladder.launcher.local.monitor import Limits
from stepladder.launcher.local.output import LogFiles
from stepladder.launcher.local.supervisor import run_local
from stepladder.launcher.nodes.own_node import as_node, end_process_if_waiting
from stepladder.launcher.nodes.self_watch import watch_itself
from stepladder.launcher.topology import Topology
from stepladder.rank.exit_record import EndWriter, identify_start
from stepladder.rank.lifecycle import record_failure, run_and_exit
from stepladder.rank.preemption import get_seconds_left
from stepladder.storage.trained_jobs import record_trained_job

SECONDS_FOR_FOREIGN_LOCK = 120.0
# Of torch's threads, once it is loaded: so they wait for each other for microseconds only.
# libgomp's own measure is hundreds of times that. Where others want the cores too, it is taken from
# the very thread that is waited for: among twenty runnable processes on two cores, 0.6 steps a
# second became 8.
SPINS = "3000"


@dataclass(frozen=True)
class Launch:
    """How `train` starts its processes, and where.

    explain_after: seconds without progress until it is said why; None: a minute, or half the
    timeout. on_loss: what the others do when a rank is lost: continue in place, restart from the
    last snapshot, or stop. With --shard, to continue is to restart, unless there are two copies of
    each slice."""

    topology: Topology = field(default_factory=Topology)
    max_restarts: int = 3
    explain_after: float | None = None
    on_loss: str = "continue"

    @property
    def restarts(self) -> int:
        """How many there may be."""
        return 0 if self.on_loss == "stop" else self.max_restarts

    def __post_init__(self) -> None:
        if self.explain_after is not None:
            validate_wait_time("--explain-after", self.explain_after)
        if self.max_restarts < 0:
            raise InputError(
                f"--max-restarts {self.max_restarts} is too small", "--max-restarts 0 or more"
            )


def start(request: TrainRequest, launch: Launch) -> int:
    """Train in every rank: this may be one, the parent of ranks, or a node's agent. Returns the
    exit code.
    """
    if identify_start()["restart"]:  # of a batch job: a fresh start was asked for at its first one
        request = replace(request, settings=replace(request.settings, fresh=False))
    get_seconds_left()  # refuses a time limit that is none
    with EndWriter() as end:
        if "OMP_WAIT_POLICY" not in os.environ:
            os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
        nodes, (least, most) = launch.topology.ranges()
        if (least < most or nodes[1] > 1) and request.settings.batch_per_rank is not None:
            raise InputError(
                "--batch-per-rank with a number of processes that may change:"
                " the global batch would change with it",
                "--global-batch N, or --nproc N",
            )
        world = World.detect() if nodes[1] == 1 else World()
        if world.is_first:
            record_trained_job(request.job)
        nproc = launch.topology.nproc
        if world.world_size > 1 and nproc not in ("", "1", str(world.ranks_per_node)):
            raise InputError(
                f"--nproc {nproc} inside {world.describe()}",
                "leave --nproc out: the launcher has decided",
            )
        refuse_no_rank(request.settings.fail_at, max(world.world_size, nodes[1] * most))
        request.settings.validate_shard_copies(max(world.world_size, nodes[1] * most))
        if nodes[1] > 1:
            end.code = start_node(request, launch, nodes, most)
        elif world.world_size > 1:
            # Before torch is loaded: ranks that never come would be a page of C++ frames.
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
            validate_limits()
            watch_itself(world, launch.explain_after)
            run_and_exit(train_rank, request)
        elif most > 1:
            end.code = run_local(job_group(request, launch, most), most, launch.restarts, least)
        else:
            validate_limits()
            get_scratch_folder()  # data loaders' sockets are there
            from stepladder.train.job_runner import (
                train_file,
            )  # torch: not before this process is known to be a rank

            with record_failure():
                end.code = train_file(request)
    return end_process_if_waiting(end.code)


def refuse_no_rank(places: Iterable[tuple[int, int]], ranks: int) -> None:
    for rank, step in places:
        if rank >= ranks:
            raise InputError(
                f"--fail-at {rank}:{step}: there is no rank {rank}", f"--fail-at {ranks - 1}:{step}"
            )


def train_rank(request: TrainRequest) -> int:
    """What a process does that was started as a rank. It imports torch; its parent does not."""
    from stepladder.train.job_runner import train_file

    return train_file(request)


def job_group(
    request: TrainRequest, launch: Launch, ranks: int, accepts_joining_nodes: bool = False
) -> LocalGroup:
    """A group of so many ranks of a job."""
    settings = request.settings
    limits = Limits(settings.timeout, launch.explain_after)
    others_have_all = settings.shard == "none" or settings.shard_copies > 1
    goes_on = launch.on_loss == "continue" and others_have_all
    spec = GroupSpec(
        output=LogFiles(settings.run_dir / "log"),
        recovers_in_place=goes_on,
        accepts_joining_nodes=goes_on and accepts_joining_nodes,
    )
    return LocalGroup(
        partial(train_rank, request), choose_threads_per_rank(settings, ranks), limits, spec
    )


def start_node(request: TrainRequest, launch: Launch, nodes: tuple[int, int], nproc: int) -> int:
    """This machine's part of a run on several nodes."""
    settings, topology = request.settings, launch.topology
    endpoint, local_addr = topology.endpoint, topology.local_addr
    if "RANK" in os.environ:
        raise InputError(
            f"--nodes {topology.nodes} inside a rank (RANK={os.environ['RANK']})",
            "leave --nodes out under torchrun, or start `stepladder train` once per node without it",
        )
    read_env_number(os.environ, "MASTER_PORT", 0, MAX_PORT)  # torch reads it too
    validate_interface()
    if endpoint:
        host, port = parse_endpoint(endpoint)
        wait_for_name("--rdzv-endpoint", host, settings.timeout)
        validate_reachable("--rdzv-endpoint", host, local_addr)
        if is_local(host) and not can_bind(host, port) and not is_listening(host, port):
            raise InputError(f"--rdzv-endpoint: port {port} cannot be opened here", "another port")
    from stepladder.launcher.nodes.rendezvous import (
        Rendezvous,
    )  # psutil, for which `train --help` need not wait

    rendezvous = Rendezvous(
        settings.run_dir, local_addr, endpoint, settings.fresh, settings.timeout
    )
    rendezvous.seats.most, rendezvous.asked = nodes[1], request.fingerprint
    # The lock of a node without power stays for a while on a network file system.
    wait = max(settings.lock_wait, SECONDS_FOR_FOREIGN_LOCK)
    settings = replace(settings, fresh=False, most_ranks=nodes[1] * nproc, lock_wait=wait)
    on_cpu = settings.device == "cpu" or not count_gpus()  # on GPUs, all restart
    request = replace(request, settings=settings)
    group = job_group(request, launch, nproc, accepts_joining_nodes=on_cpu)
    with as_node(group, nproc, launch.restarts) as node:
        from stepladder.launcher.nodes.launch import train_on_nodes  # torchelastic is torch

        return train_on_nodes(node, rendezvous, nodes)
