"""What was measured between ranks, and what of it is wrong.

Bus bandwidth is that of NVIDIA's nccl-tests (doc/PERFORMANCE.md): 2 (n - 1) / n times the bytes over the time,
what each link must carry in a ring, so that figures for different numbers of ranks compare with a link's speed.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

from stepladder.core.world import World
from stepladder.tools.doctor.finding import CLOCKS_APART, Finding, Findings, error, warning

SKEW_SECONDS, GOOD_SHARE = 1.0, 0.5


@dataclass(frozen=True)
class Speed:
    """bytes: of the tensor.  microseconds: median over rounds, on the slowest rank.  bus: GB/s (10^9)."""

    bytes: int
    microseconds: float
    bus: float


@dataclass(frozen=True)
class Link:
    """What was measured.

    speeds: of all ranks.  within: of those of one node, where they are on several, with several on one.
    limit: GB/s of the slowest interface between nodes by its driver; None on one node or if not known.
    stream: GB/s of one plain TCP connection between two ranks, on two nodes if there are several; None for GPUs
    of one node.  skew: seconds between the clocks of the ranks that differ most.
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
    def bound(self) -> float | None:
        """What all_reduce is held against: the driver's word, else what a plain connection carried."""
        return self.limit or self.stream

    def findings(self) -> Findings:
        """What of it is wrong."""
        best = max(speed.bus for speed in self.speeds)
        if self.limit is not None and self.stream is not None and self.stream < GOOD_SHARE * self.limit:
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
            yield warning(f"the ranks' clocks differ by {self.skew:.1f} s", *CLOCKS_APART, "clocks-of-ranks")


class Unreached(RuntimeError):
    """Ranks did not find each other, or lost each other on the way."""

    def __init__(self, world: World, error: Exception) -> None:
        self.first, self.rank, self.place = world.is_first, world.rank, meeting_place(world)
        super().__init__(str(error).partition("\n")[0])

    @property
    def finding(self) -> Finding:
        other = "HOST" if self.first else self.place
        return error(
            f"rank {self.rank} on {socket.gethostname()} had no way to the others, at {self.place}: {self}",
            "a cable or a route is missing, a firewall drops what nodes send each other, or a rank did not start",
            f"stepladder doctor --peer {other}, and ping {other}, on {socket.gethostname()}",
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
