"""How fast ranks meet, measured among them, and what of it is wrong.

Bus bandwidth is that of NVIDIA's nccl-tests (doc/PERFORMANCE.md): 2 (n - 1) / n times the bytes
over the time, what each link must carry in a ring, so that figures for different numbers of ranks
compare with a link's speed."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections import Counter
from contextlib import nullcontext, redirect_stdout, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from stepladder.core.address import resolve_host
from stepladder.core.world import World
from stepladder.launcher.function import launch
from stepladder.tools.doctor.finding import CLOCKS_APART, Finding, Findings, error, warning
from stepladder.tools.doctor.network import find_interfaces

SIZES = tuple(4 * 4**k for k in range(13))  # bytes: 4 to 64 MiB
SECONDS_PER_SIZE, MOST_ROUNDS, WARM_UP = 0.25, 200, 2
SECONDS_OF_LAST_SIZE = 0.6
SECONDS_TO_MEASURE, SECONDS_TO_MEET, SECONDS_TO_CONNECT, SECONDS_OF_STREAM = 120.0, 60.0, 10.0, 0.5
SKEW_SECONDS, GOOD_SHARE = 1.0, 0.5


@dataclass(frozen=True)
class Speed:
    """bytes: of the tensor.  microseconds: median over rounds, on the slowest rank.  bus: GB/s
    (10^9).
    """

    bytes: int
    microseconds: float
    bus: float


@dataclass(frozen=True)
class Link:
    """What was measured.

    speeds: of all ranks.  within: of those of one node, where they are on several, with several on
    one. limit: GB/s of the slowest interface between nodes by its driver; None on one node or if
    not known. stream: GB/s of one plain TCP connection between two ranks, on two nodes if there are
    several; None for GPUs or shared memory of one node.  skew: seconds between the clocks of the
    ranks that differ most."""

    ranks: int
    nodes: int
    backend: str
    speeds: tuple[Speed, ...]
    limit: float | None
    skew: float
    within: tuple[Speed, ...] = ()
    stream: float | None = None

    @property
    def bound(self) -> float | None:
        """What all_reduce is held against: the driver's word, else what a plain connection carried."""
        return self.limit or self.stream

    def findings(self) -> Findings:
        best = max(speed.bus for speed in self.speeds)
        if (
            self.limit is not None
            and self.stream is not None
            and self.stream < GOOD_SHARE * self.limit
        ):
            yield warning(
                f"one plain TCP connection carries {self.stream:.3f} GB/s, of {self.limit:.2f} that the"
                " interface has by its driver",
                "a slower link on the way, a limit of the network or of the virtual machine, or others use it",
                "iperf3 between the nodes; ip -s link for errors; another network by GLOO_SOCKET_IFNAME",
                "link-slow",
            )
        carried = min((one for one in (self.limit, self.stream) if one), default=0.0)
        if self.nodes > 1 and best < GOOD_SHARE * carried:
            yield warning(
                f"all_reduce reaches {best:.3f} GB/s, of {carried:.3f} that the link could carry",
                "another network was chosen, one TCP stream is not enough, or others use the link",
                "stepladder doctor --peer HOST; NCCL_DEBUG=INFO shows its choice; NCCL_SOCKET_NTHREADS=4",
                "link-speed",
            )
        if abs(self.skew) > SKEW_SECONDS:
            yield warning(
                f"the ranks' clocks differ by {self.skew:.1f} s", *CLOCKS_APART, "clocks-of-ranks"
            )


def unreached(world: World, said: str) -> Finding:
    """Ranks did not find each other, or lost each other on the way."""
    here, place = socket.gethostname(), meeting_place(world)
    other, first_line = "HOST" if world.is_first else place, said.partition("\n")[0]
    return error(
        f"rank {world.rank} on {here} had no way to the others, at {place}: {first_line}",
        "a cable or a route is missing, a firewall drops what nodes send each other, or a rank did not start",
        f"stepladder doctor --peer {other}, and ping {other}, on {here}",
        "no-way-between-ranks",
    )


def meeting_place(world: World) -> str:
    """The first rank's machine, as the others know it."""
    if world.init_method == "env://":
        return os.environ["MASTER_ADDR"]
    return urlsplit(world.init_method).hostname or "127.0.0.1"


def bus_bandwidth(ranks: int, size: int, seconds: float) -> float:
    """GB/s that each link carries in a ring all-reduce."""
    return 2 * (ranks - 1) / ranks * size / seconds / 1e9


def measure(nproc: int) -> tuple[Link | None, list[Finding]]:
    """What the first rank has measured, and what is wrong with it, or that the ranks do not meet.

    Among `nproc` ranks started here; inside torchrun, `stepladder run` or a Slurm step among those,
    and then None on all but the first. Raises InputError where torch is missing or nproc too many.
    """
    world = World.detect()
    os.environ.setdefault(
        "TORCH_CPP_LOG_LEVEL", "FATAL"
    )  # a lost store prints a page of C++ frames per try
    try:
        if world.world_size > 1:
            link = measure_as_rank()
        else:
            with redirect_stdout(sys.stderr):  # what ranks print is no part of the answer
                link = launch(measure_as_rank, nproc=nproc, timeout=SECONDS_TO_MEASURE)[0]
    except RuntimeError as lost:  # torch's own are of this kind, PeerLost and RankFailed too
        return None, [unreached(world, str(lost))]
    return link, list(link.findings()) if link else []


def measure_as_rank() -> Link | None:
    """What each rank does; the first has the result."""
    import torch

    from stepladder.train.process_group import process_group

    with process_group(timeout_seconds=SECONDS_TO_MEET) as comm:
        world, hosts = comm.world, comm.gather_bytes(socket.gethostname().encode()[:64].ljust(64))
        counts = Counter(hosts)
        nodes, most = max(world.num_nodes, len(counts)), max(counts.values())
        speeds = _speeds(comm, comm, world.world_size)
        within = _speeds(comm, comm.make_subgroup(hosts), most) if nodes > 1 and most > 1 else ()
        # As `process_group` chooses it.
        on_nccl = comm.device.type == "cuda" and world.ranks_per_node <= torch.cuda.device_count()
        backend = "nccl" if on_nccl else "gloo" if comm.shared_memory is None else "shared memory"
        stream = _stream(comm, hosts) if nodes > 1 or backend == "gloo" else None
        comm.gather_bytes(b".")
        clocks = _of_all(comm, time.time())
        limits = [limit for limit in _of_all(comm, _slowest_link()) if limit]
    limit = min(limits) if nodes > 1 and limits else None
    skew = round(max(clocks) - min(clocks), 3)
    link = Link(world.world_size, nodes, backend, speeds, limit, skew, within, stream)
    return link if world.is_first else None


def _of_all(comm: Any, value: float) -> list[float]:
    """Every rank's value, in rank order."""
    row = np.zeros(comm.world.world_size)
    row[comm.world.rank] = value
    return list(comm.sum(row).tolist())


def _speeds(comm: Any, among: Any, ranks: int) -> tuple[Speed, ...]:
    """Up to the size that takes long, for the next is four times as large."""
    speeds: list[Speed] = []
    for size in SIZES:
        speeds.append(_speed(comm, among, ranks, size))
        if speeds[-1].microseconds > 1e6 * SECONDS_OF_LAST_SIZE:
            break
    return tuple(speeds)


def _speed(comm: Any, among: Any, ranks: int, size: int) -> Speed:
    """One size: as many rounds as fit the time, the same on all ranks. among: the `ranks` that take
    part.
    """
    import torch

    tensor = torch.zeros(max(1, size // 4), device=comm.device)

    def once() -> float:
        began = time.perf_counter()
        among.all_reduce(tensor).wait()
        if comm.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    first = max(once() for _ in range(WARM_UP))
    rounds = int(min(MOST_ROUNDS, max(5, SECONDS_PER_SIZE / max(_of_all(comm, first)))))
    median = float(np.median([once() for _ in range(rounds)]))
    seconds = max(_of_all(comm, median))
    bus = bus_bandwidth(ranks, tensor.numel() * 4, seconds)
    return Speed(tensor.numel() * 4, round(seconds * 1e6, 1), round(bus, 4))


def _stream(comm: Any, hosts: list[bytes]) -> float | None:
    """GB/s from the first rank of another node, or from the last, to rank 0. None where a firewall
    is between.
    """
    elsewhere = [rank for rank, host in enumerate(hosts) if host != hosts[0]]
    sender = elsewhere[0] if elsewhere else comm.world.world_size - 1
    host, speed = meeting_place(comm.world), 0.0
    server = listener_at(host, alone=not elsewhere) if comm.world.is_first else None
    port = int(_of_all(comm, server.getsockname()[1] if server else 0)[0])
    with suppress(OSError), server or nullcontext():
        if server:
            speed = _receive(server)
        elif comm.world.rank == sender:
            _send(host, port)
    return round(_of_all(comm, speed)[0], 4) or None


def listener_at(host: str, alone: bool) -> socket.socket:
    """Return a socket at the address by which others know this machine, on a port of its own.

    alone: all ranks are on this machine. Else the name may lead to a loopback address here, as
    Debian's hosts file has it, and to another one elsewhere: only then it listens on all addresses.
    """
    addresses = [address for address in resolve_host(host) if alone or not address.is_loopback]
    for address in addresses:
        with suppress(OSError):
            family = socket.AF_INET if address.version == 4 else socket.AF_INET6
            return socket.create_server((str(address), 0), family=family)
    both = socket.has_dualstack_ipv6()
    return socket.create_server(
        ("", 0), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both
    )


def _send(host: str, port: int) -> None:
    with socket.create_connection((host, port), SECONDS_TO_CONNECT) as link:
        piece, until = bytes(1 << 20), time.monotonic() + SECONDS_OF_STREAM
        while time.monotonic() < until:
            link.sendall(piece)


def _receive(server: socket.socket) -> float:
    """GB/s of what comes, until the other closes."""
    server.settimeout(SECONDS_TO_CONNECT)
    link, _ = server.accept()
    with link:
        link.settimeout(SECONDS_TO_CONNECT)
        buffer, received = bytearray(1 << 20), link.recv_into(bytearray(1))
        began = time.perf_counter()
        while count := link.recv_into(buffer):
            received += count
        return received / (time.perf_counter() - began) / 1e9


def _slowest_link() -> float:
    """GB/s of this machine's named interface (GLOO_SOCKET_IFNAME), else of the slowest that is up;
    or 0.
    """
    named = os.environ.get("GLOO_SOCKET_IFNAME", "")
    speeds = [
        one.speed_mbit
        for one in find_interfaces()
        if one.up and one.speed_mbit and (not named or one.name in named.split(","))
    ]
    return min(speeds, default=0) / 8000
