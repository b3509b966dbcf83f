"""The speed of collectives, measured among ranks, and findings about it.

Bus bandwidth is that of NVIDIA's nccl-tests (doc/PERFORMANCE.md): 2 (n - 1) / n times the bytes
over the time, what each link must carry in a ring, so that figures for different numbers of ranks
compare with a link's speed.
"""

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
from stepladder.tools.doctor.finding import Findings, problem
from stepladder.tools.doctor.network import find_interfaces
from stepladder.tools.findings.finding import Finding

MEASURED_BYTES = tuple(4 * 4**k for k in range(13))  # 4 bytes to 64 MiB
SIZE_BUDGET_S = 0.25  # for all rounds of one size
LAST_SIZE_S = 0.6  # no larger size follows one that takes so long
MIN_MEASURE_ROUNDS = 5
MAX_MEASURE_ROUNDS = 200
WARM_UP_ROUNDS = 2
MEASUREMENT_TIMEOUT_S = 120.0
RENDEZVOUS_TIMEOUT_S = 60.0
STREAM_CONNECT_TIMEOUT_S = 10.0
STREAM_S = 0.5
STREAM_CHUNK_BYTES = 1 << 20
MAX_CLOCK_SKEW_S = 1.0
GOOD_SHARE = 0.5  # of the nominal speed
HOST_NAME_BYTES = 64
GB = 1e9


@dataclass(frozen=True)
class Speed:
    """The speed of all_reduce for one size.

    Args:
        bytes: The size of the tensor.
        microseconds: The median over rounds, on the slowest rank.
        bus: The bus bandwidth in GB/s.
    """

    bytes: int
    microseconds: float
    bus: float


@dataclass(frozen=True)
class Link:
    """What was measured.

    Args:
        speeds: The speeds of all_reduce among all ranks.
        limit: The GB/s of the slowest interface between nodes by its driver; None on one node, or
            where it is not known.
        skew: The difference in seconds between the clocks of the ranks.
        within: The speeds among the ranks of one node, on several nodes with several ranks on one.
        stream: The GB/s of one plain TCP connection between two ranks, on two nodes if there are
            several; None for GPUs, and for shared memory of one node.
    """

    ranks: int
    nodes: int
    backend: str
    speeds: tuple[Speed, ...]
    limit: float | None
    skew: float
    within: tuple[Speed, ...] = ()
    stream: float | None = None

    @property
    def reference_speed(self) -> float | None:
        """The speed with which all_reduce is compared: the driver's, else a plain connection's."""
        return self.limit or self.stream

    def findings(self) -> Findings:
        if self.limit and self.stream is not None and self.stream < GOOD_SHARE * self.limit:
            yield problem("link-slow", self)
        best = max(speed.bus for speed in self.speeds)
        possible = min((speed for speed in (self.limit, self.stream) if speed), default=0.0)
        if self.nodes > 1 and best < GOOD_SHARE * possible:
            yield problem("link-speed", self, best=best, possible=possible)
        if abs(self.skew) > MAX_CLOCK_SKEW_S:
            yield problem("clocks-of-ranks", self)


def _unreachable_ranks_finding(world: World, message: str) -> Finding:
    """Return the finding of ranks that did not connect, or lost each other."""
    first_host = _rendezvous_host(world)
    return problem(
        "no-way-between-ranks",
        world,
        host=socket.gethostname(),
        first_host=first_host,
        other_host="HOST" if world.is_first else first_host,
        error=message.partition("\n")[0],
    )


def _rendezvous_host(world: World) -> str:
    """Return the machine of the first rank, by the name that the other ranks use."""
    if world.init_method == "env://":
        return os.environ["MASTER_ADDR"]
    return urlsplit(world.init_method).hostname or "127.0.0.1"


def bus_bandwidth(ranks: int, size: int, seconds: float) -> float:
    """Return the GB/s that each link carries in a ring all-reduce."""
    return 2 * (ranks - 1) / ranks * size / seconds / GB


def measure_link(nproc: int) -> tuple[Link | None, list[Finding]]:
    """Measure among `nproc` ranks that are started here.

    Inside torchrun, `stepladder run` or a Slurm step, measure among those ranks. Raises InputError
    where torch is missing, or nproc too many.

    Returns:
        What was measured, None on all ranks but the first; and what is wrong with it, or that the
        ranks did not connect.
    """
    world = World.detect()
    # A lost store prints a page of C++ frames for each attempt.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    try:
        if world.world_size > 1:
            link = _measure_as_rank()
        else:
            with redirect_stdout(sys.stderr):  # what ranks print is no part of the answer
                link = launch(_measure_as_rank, nproc=nproc, timeout=MEASUREMENT_TIMEOUT_S)[0]
    except RuntimeError as lost:  # so are torch's own errors, PeerLost and RankFailed
        return None, [_unreachable_ranks_finding(world, str(lost))]
    return link, list(link.findings()) if link else []


def _measure_as_rank() -> Link | None:
    """Measure on each rank, and return the result on the first."""
    from stepladder.train.process_group import process_group

    with process_group(timeout_seconds=RENDEZVOUS_TIMEOUT_S) as comm:
        world = comm.world
        host_name = socket.gethostname().encode()[:HOST_NAME_BYTES].ljust(HOST_NAME_BYTES)
        hosts = comm.gather_bytes(host_name)
        ranks_by_host = Counter(hosts)
        nodes = max(world.num_nodes, len(ranks_by_host))
        most_ranks = max(ranks_by_host.values())
        speeds = _measure_speeds(comm, comm, world.world_size)
        within: tuple[Speed, ...] = ()
        if nodes > 1 and most_ranks > 1:
            within = _measure_speeds(comm, comm.make_subgroup(hosts), most_ranks)
        backend = _backend_of(comm)
        has_network = nodes > 1 or backend == "gloo"
        stream = _measure_stream(comm, hosts) if has_network else None
        comm.gather_bytes(b".")  # so that all ranks read their clocks at the same time
        clocks = _gather_values(comm, time.time())
        limits = [limit for limit in _gather_values(comm, _slowest_interface_speed()) if limit]
    limit = min(limits) if nodes > 1 and limits else None
    skew = round(max(clocks) - min(clocks), 3)
    link = Link(world.world_size, nodes, backend, speeds, limit, skew, within, stream)
    return link if world.is_first else None


def _backend_of(comm: Any) -> str:
    """Return the backend that `process_group` has chosen."""
    import torch

    if comm.device.type == "cuda" and comm.world.ranks_per_node <= torch.cuda.device_count():
        return "nccl"
    if comm.shared_memory is None:
        return "gloo"
    return "shared memory"


def _gather_values(comm: Any, value: float) -> list[float]:
    """Return the values of all ranks, in rank order."""
    row = np.zeros(comm.world.world_size)
    row[comm.world.rank] = value
    return list(comm.sum(row).tolist())


def _measure_speeds(comm: Any, among: Any, ranks: int) -> tuple[Speed, ...]:
    """Measure sizes up to the first one that takes long: each is four times the one before.

    Args:
        comm: All ranks.
        among: The ranks that take part in a collective with this one.
        ranks: Their number.
    """
    speeds: list[Speed] = []
    for size in MEASURED_BYTES:
        speed = _measure_speed(comm, among, ranks, size)
        speeds.append(speed)
        if speed.microseconds > 1e6 * LAST_SIZE_S:
            break
    return tuple(speeds)


def _measure_speed(comm: Any, among: Any, ranks: int, size: int) -> Speed:
    """Measure one size in as many rounds as fit the time, the same number on all ranks."""
    import torch

    tensor = torch.zeros(max(1, size // 4), device=comm.device)
    tensor_bytes = tensor.numel() * 4

    def all_reduce_seconds() -> float:
        began = time.perf_counter()
        among.all_reduce(tensor).wait()
        if comm.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    warm_up_seconds = max(all_reduce_seconds() for _ in range(WARM_UP_ROUNDS))
    affordable = SIZE_BUDGET_S / max(_gather_values(comm, warm_up_seconds))
    rounds = int(min(MAX_MEASURE_ROUNDS, max(MIN_MEASURE_ROUNDS, affordable)))
    median = float(np.median([all_reduce_seconds() for _ in range(rounds)]))
    seconds = max(_gather_values(comm, median))
    bus = bus_bandwidth(ranks, tensor_bytes, seconds)
    return Speed(tensor_bytes, round(seconds * 1e6, 1), round(bus, 4))


def _measure_stream(comm: Any, hosts: list[bytes]) -> float | None:
    """Measure one TCP connection to rank 0, from the first rank of another node or the last rank.

    Returns:
        GB/s, or None where a firewall is between.
    """
    on_other_nodes = [rank for rank, host in enumerate(hosts) if host != hosts[0]]
    sender = on_other_nodes[0] if on_other_nodes else comm.world.world_size - 1
    host = _rendezvous_host(comm.world)
    server = None
    port = 0
    if comm.world.is_first:
        server = open_listener(host, is_one_machine=not on_other_nodes)
        port = server.getsockname()[1]
    port = int(_gather_values(comm, port)[0])
    speed = 0.0
    with suppress(OSError), server or nullcontext():
        if server:
            speed = _receive_stream(server)
        elif comm.world.rank == sender:
            _send_stream(host, port)
    return round(_gather_values(comm, speed)[0], 4) or None


def open_listener(host: str, is_one_machine: bool) -> socket.socket:
    """Return a socket at the address by which other ranks know this machine, on a free port.

    Args:
        host: The name or address that other ranks use.
        is_one_machine: Whether all ranks are on this machine. If not, the name may be a loopback
            address here, as in Debian's hosts file, and another address elsewhere: then the socket
            listens on all addresses.
    """
    for address in resolve_host(host):
        if is_one_machine or not address.is_loopback:
            with suppress(OSError):
                family = socket.AF_INET if address.version == 4 else socket.AF_INET6
                return socket.create_server((str(address), 0), family=family)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0), family=socket.AF_INET)


def _send_stream(host: str, port: int) -> None:
    with socket.create_connection((host, port), STREAM_CONNECT_TIMEOUT_S) as connection:
        chunk = bytes(STREAM_CHUNK_BYTES)
        deadline = time.monotonic() + STREAM_S
        while time.monotonic() < deadline:
            connection.sendall(chunk)


def _receive_stream(server: socket.socket) -> float:
    """Return the GB/s that arrive until the sender closes the connection."""
    server.settimeout(STREAM_CONNECT_TIMEOUT_S)
    connection, _ = server.accept()
    with connection:
        connection.settimeout(STREAM_CONNECT_TIMEOUT_S)
        buffer = bytearray(STREAM_CHUNK_BYTES)
        received = connection.recv_into(bytearray(1))
        began = time.perf_counter()
        while count := connection.recv_into(buffer):
            received += count
        return received / (time.perf_counter() - began) / GB


def _slowest_interface_speed() -> float:
    """Return the GB/s of the interfaces in GLOO_SOCKET_IFNAME, else of the slowest one that is up.

    The result is 0 where no driver knows its speed.
    """
    named = os.environ.get("GLOO_SOCKET_IFNAME", "")
    speeds = [
        interface.speed_mbit
        for interface in find_interfaces()
        if interface.up
        and interface.speed_mbit
        and (not named or interface.name in named.split(","))
    ]
    return min(speeds, default=0) / 8000
