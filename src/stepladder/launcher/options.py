"""The flags of `run`, as torchrun has them, beside those that say where the ranks are. Read without torch."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from stepladder.core import address
from stepladder.core.errors import InputError
from stepladder.launcher.topology import Topology

SIGNALS = "SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"
DEFAULT_PORT = 29500


@dataclass(frozen=True)
class Options:
    """How the ranks of a script are started, shown and ended, and how several nodes meet.

    local_ranks: whose output is shown, None for all.  redirects: local rank (-1: all) to the streams (1 stdout,
    2 stderr, 3 both) that only the log shows.  tee: those that are shown all the same.  signals: are forwarded to
    the ranks, and end the launch.  shutdown_timeout: seconds that ranks may take then.  virtual_local_rank: each
    rank sees one GPU, as its first.  master_port: None for a free one.  timeout: seconds that a rank may stay
    stopped, and that nodes wait for each other.  explain_after: seconds until it is said why nothing moves.
    end_after: seconds until the ranks are then ended.  backend, conf: of the rendezvous, "" where not given.
    """

    max_restarts: int = 0
    log_dir: Path | None = None
    local_ranks: frozenset[int] | None = None
    redirects: dict[int, int] = field(default_factory=dict)
    tee: dict[int, int] = field(default_factory=dict)
    role: str = "default"
    run_id: str = "none"
    signals: tuple[signal.Signals, ...] = tuple(signal.Signals[name] for name in SIGNALS)
    shutdown_timeout: float = 30.0
    virtual_local_rank: bool = False
    master_port: int | None = None
    timeout: float = 600.0
    explain_after: float | None = None
    end_after: float | None = None
    backend: str = ""
    conf: str = ""
    node_rank: int | None = None
    master_addr: str = ""

    @staticmethod
    def read(flags: dict[str, Any], elastic: bool) -> Options:
        """From the command line. elastic: the number of processes is a range. Raises InputError."""
        restarts, ranks = flags["max_restarts"], flags["local_ranks_filter"]
        explain_after, end_after = flags["explain_after"], flags["end_after"]
        if end_after is not None and explain_after is None:
            explain_after = min(60.0, end_after / 2)
        if end_after is not None and explain_after > end_after:
            raise InputError(
                f"--end-after {end_after:g} with --explain-after {explain_after:g}: nothing would be explained",
                f"--explain-after {end_after / 2:g}",
            )
        if ranks and not re.fullmatch(r"\d+(,\d+)*", ranks):
            raise InputError(
                f"--local-ranks-filter {ranks!r} is no list of local ranks", "--local-ranks-filter 0,1"
            )
        given = {field.name: flags[field.name] for field in fields(Options) if field.name in flags}
        given |= {
            "max_restarts": (3 if elastic else 0) if restarts is None else restarts,
            "log_dir": flags["log_dir"] or (flags["run_dir"] and flags["run_dir"] / "log"),
            "local_ranks": frozenset(map(int, ranks.split(","))) if ranks else None,
            "redirects": read_streams("--redirects", flags["redirects"]),
            "tee": read_streams("--tee", flags["tee"]),
            "run_id": flags["rdzv_id"],
            "signals": read_signals(flags["signals_to_handle"]),
            "explain_after": explain_after,
            "backend": flags["rdzv_backend"],
            "conf": flags["rdzv_conf"],
        }
        return Options(**given)

    def is_shown(self, local_rank: int, stream: int) -> bool:
        redirected, shown = (streams.get(local_rank, streams.get(-1, 0)) for streams in (self.redirects, self.tee))
        hidden = redirected & ~shown & stream
        return not hidden and (self.local_ranks is None or local_rank in self.local_ranks)


def read_streams(flag: str, text: str) -> dict[int, int]:
    """`3` for all local ranks, or `0:1,1:2` by local rank. Raises InputError."""
    if re.fullmatch(r"[0-3]", text):
        return {-1: int(text)}
    if not re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", text):
        raise InputError(f"{flag} {text!r} names no streams", f"{flag} 3, or 0:1,1:2 by local rank")
    return {int(rank): int(streams) for rank, streams in (pair.split(":") for pair in text.split(","))}


def read_signals(text: str) -> tuple[signal.Signals, ...]:
    try:
        return tuple(signal.Signals[name.strip()] for name in text.split(",") if name.strip())
    except KeyError as error:
        raise InputError(
            f"--signals-to-handle: {error} is no signal", f"--signals-to-handle {','.join(SIGNALS)}"
        ) from error


@dataclass(frozen=True)
class RendezvousSpec:
    """Where and how the nodes of a `run` meet.

    backend: c10d, static (torchrun's name for --node-rank and --master-addr) or etcd-v2.  nodes: the least and the
    most.  timeout: seconds to wait for the others.  node_rank: of the static backend.  conf: more for the backend.
    """

    backend: str
    host: str
    port: int
    run_id: str
    nodes: tuple[int, int]
    local_addr: str
    timeout: float
    node_rank: int
    conf: dict[str, str]

    @property
    def endpoint(self) -> str:
        return address.show_endpoint(self.host, self.port)

    @staticmethod
    def read(options: Options, topology: Topology, nodes: tuple[int, int]) -> RendezvousSpec:
        """Raises InputError where the flags do not say where to meet, or name a place others cannot reach."""
        node_rank, endpoint = options.node_rank, topology.endpoint
        by_rank = options.backend == "static" or not (options.backend or node_rank is None or endpoint)
        if not endpoint and options.master_addr:
            endpoint = address.show_endpoint(options.master_addr.strip("[]"), options.master_port or DEFAULT_PORT)
        if not endpoint:
            raise InputError(
                f"--nodes {topology.nodes} without a place to meet",
                "--rdzv-endpoint HOST:PORT, a host that is one of them",
            )
        if by_rank and (node_rank is None or nodes[0] < nodes[1]):
            raise InputError(
                f"--nodes {topology.nodes} by rank needs a number of nodes and this one's",
                "--nodes N --node-rank R",
            )
        if by_rank and not 0 <= (node_rank or 0) < nodes[1]:
            raise InputError(f"--node-rank {node_rank} of {nodes[1]} nodes", f"0 to {nodes[1] - 1}")
        host, port = address.parse_endpoint(endpoint)
        flag = "--rdzv-endpoint" if topology.endpoint else "--master-addr"
        address.await_name(flag, host, options.timeout)
        address.refuse_unreachable(flag, host, topology.local_addr)
        local_addr = topology.local_addr or address.address_towards(host)
        address.name_interface(host)
        return RendezvousSpec(
            "static" if by_rank else options.backend or "c10d", host, port, options.run_id, nodes, local_addr,
            options.timeout, node_rank or 0, read_conf(options.conf),
        )  # fmt: skip


def read_conf(text: str) -> dict[str, str]:
    pairs = [pair.partition("=") for pair in text.split(",") if pair]
    if bad := [name for name, equals, _ in pairs if not equals]:
        raise InputError(f"--rdzv-conf: {bad[0]!r} has no value", "--rdzv-conf key=value,key=value")
    return {name.strip(): value.strip() for name, _, value in pairs}
