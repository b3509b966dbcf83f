"""How fast ranks meet: latency and bus bandwidth of all_reduce over sizes, and how far their clocks differ."""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stepladder.core.cores import refuse_too_many
from stepladder.core.world import World
from stepladder.launcher.local.group import LocalGroup
from stepladder.launcher.local.monitor import Limits
from stepladder.launcher.local.outcome import Refused, Success
from stepladder.launcher.local.ranks import end_well, handling_signals
from stepladder.tools.doctor.facts import rebuilt
from stepladder.tools.doctor.link import Link, Speed, Unreached, bus_bandwidth, meeting_place
from stepladder.tools.doctor.network import find_interfaces

SIZES = tuple(4 * 4**k for k in range(13))  # bytes: 4 to 64 MiB
SECONDS_PER_SIZE, MOST_ROUNDS, WARM_UP = 0.25, 200, 2
SECONDS_OF_LAST_SIZE = 0.6
SECONDS_TO_MEET, SECONDS_TO_CONNECT, SECONDS_OF_STREAM = 60.0, 10.0, 0.5


def measure(nproc: int, timeout: float = 120.0) -> Link | None:
    """Among `nproc` ranks started here; inside torchrun, `stepladder run` or a Slurm step among those, and then
    None on all but the first. Raises InputError where torch is missing or nproc too many, Unreached where ranks do
    not meet."""
    world = World.detect()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # a lost store prints a page of C++ frames per try
    with tempfile.TemporaryDirectory(prefix="stepladder-doctor-") as folder:
        out = Path(folder) / "link.json"
        if world.world_size > 1:
            try:
                measure_as_rank(out)
            except RuntimeError as error:  # torch's own are of this kind, and PeerLost
                raise Unreached(world, error) from error
        else:
            _start_ranks(nproc, out, timeout)
        return rebuilt(Link, json.loads(out.read_text())) if world.is_first else None


def _start_ranks(nproc: int, out: Path, timeout: float) -> None:
    refuse_too_many(nproc)
    group = LocalGroup(1, Limits(timeout))
    with handling_signals(group):
        outcome = group.run(measure_as_rank, (out,), nproc, 0)
        if not isinstance(outcome, Success | Refused):
            raise Unreached(World(), RuntimeError(outcome.text))
        end_well(outcome)


def measure_as_rank(out: Path) -> int:
    """What each rank does; the first writes to `out`. Returns the exit code."""
    from stepladder.train.comm import pick_device, process_group  # torch

    world = World.detect()
    with process_group(world, pick_device("auto", world), SECONDS_TO_MEET) as comm:
        hosts = comm.gather_bytes(socket.gethostname().encode()[:64].ljust(64))
        counts = Counter(hosts)
        nodes, most = max(world.num_nodes, len(counts)), max(counts.values())
        speeds = _speeds(comm, comm, world.world_size)
        within: tuple[Speed, ...] = ()
        if nodes > 1 and most > 1:
            within = _speeds(comm, comm.among(hosts), most)
        backend = _backend(world, comm.device.type)
        stream = _stream(comm, hosts) if nodes > 1 or backend == "gloo" else None
        comm.gather_bytes(b".")
        clocks = comm.sum(_in_row(world, time.time()))
        limits = comm.sum(_in_row(world, _slowest_link() or 0.0))
    known = [limit for limit in limits if limit]
    limit = min(known) if nodes > 1 and known else None
    skew = round(float(clocks.max() - clocks.min()), 3)
    if world.is_first:
        link = Link(world.world_size, nodes, backend, speeds, limit, skew, within, stream)
        out.write_text(json.dumps(asdict(link)))
    return 0


def _backend(world: World, device: str) -> str:
    """As `process_group` chooses it."""
    import torch

    return "nccl" if device == "cuda" and world.ranks_per_node <= torch.cuda.device_count() else "gloo"


def _in_row(world: World, value: float) -> Any:
    """A row with this rank's value in its place: their sum has all ranks'."""
    import numpy as np

    row = np.zeros(world.world_size)
    row[world.rank] = value
    return row


def _speeds(comm: Any, among: Any, ranks: int) -> tuple[Speed, ...]:
    """Up to the size that takes long, for the next is four times as large."""
    speeds: list[Speed] = []
    for size in SIZES:
        speeds.append(_speed(comm, among, ranks, size))
        if speeds[-1].microseconds > 1e6 * SECONDS_OF_LAST_SIZE:
            break
    return tuple(speeds)


def _speed(comm: Any, among: Any, ranks: int, size: int) -> Speed:
    """One size: as many rounds as fit the time, the same on all ranks. among: the `ranks` that take part."""
    import numpy as np
    import torch

    tensor = torch.zeros(max(1, size // 4), device=comm.device)

    def once() -> float:
        began = time.perf_counter()
        among.all_reduce(tensor).wait()
        if comm.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    first = max(once() for _ in range(WARM_UP))
    slowest = comm.sum(_in_row(comm.world, first)).max()
    rounds = int(min(MOST_ROUNDS, max(5, SECONDS_PER_SIZE / slowest)))
    median = float(np.median([once() for _ in range(rounds)]))
    seconds = float(comm.sum(_in_row(comm.world, median)).max())
    bus = bus_bandwidth(ranks, tensor.numel() * 4, seconds)
    return Speed(tensor.numel() * 4, round(seconds * 1e6, 1), round(bus, 4))


def _stream(comm: Any, hosts: list[bytes]) -> float | None:
    """GB/s from the first rank of another node, or from the last, to rank 0. None where a firewall is between."""
    elsewhere = [rank for rank, host in enumerate(hosts) if host != hosts[0]]
    sender = elsewhere[0] if elsewhere else comm.world.world_size - 1
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    speed = 0.0
    with socket.create_server(("", 0), family=family, dualstack_ipv6=family == socket.AF_INET6) as server:
        port = int(comm.sum(_in_row(comm.world, server.getsockname()[1]))[0])
        with suppress(OSError):
            if comm.world.is_first:
                speed = _receive(server)
            elif comm.world.rank == sender:
                _send(meeting_place(comm.world), port)
        speed = float(comm.sum(_in_row(comm.world, speed))[0])
    return round(speed, 4) or None


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


def _slowest_link() -> float | None:
    """GB/s of this machine's named interface (GLOO_SOCKET_IFNAME), else of the slowest that is up."""
    named = os.environ.get("GLOO_SOCKET_IFNAME", "")
    speeds = [
        one.speed_mbit for one in find_interfaces()
        if one.up and one.speed_mbit and (not named or one.name in named.split(","))
    ]  # fmt: skip
    return min(speeds) / 8000 if speeds else None
