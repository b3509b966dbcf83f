"""The flags of `run`, as torchrun has them, beside those that say where the ranks are. Read without
torch.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from stepladder.core import address
from stepladder.core.errors import InputError
from stepladder.core.numbers import is_wait_time, parse_whole_number
from stepladder.core.process_count import MAX_PROCESSES
from stepladder.launcher.topology import Topology

SIGNALS = "SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"
# No process hears the first two; the others are the kernel's word on an error, or on a child.
NEVER_HANDLED = {
    "SIGKILL",
    "SIGSTOP",
    "SIGSEGV",
    "SIGBUS",
    "SIGILL",
    "SIGFPE",
    "SIGABRT",
    "SIGCHLD",
}
BACKENDS = ("c10d", "static")
# Of --rdzv-conf: what torchrun reads there.
SECONDS = {
    "timeout",
    "join_timeout",
    "last_call_timeout",
    "close_timeout",
    "heartbeat_timeout",
    "read_timeout",
    "keep_alive_interval",
}
NUMBERS = {*SECONDS, "keep_alive_max_attempt", "rank"}
CONF = {*NUMBERS, "is_host", "store_type", "use_agent_store"}
DEFAULT_PORT = 29500


@dataclass(frozen=True)
class Options:
    """How the ranks of a script are started, shown and ended, and how several nodes meet.

    local_ranks: whose output is shown, None for all.  redirects: local rank (-1: all) to the
    streams (1 stdout, 2 stderr, 3 both) that only the log shows.  tee: those that are shown all the
    same.  signals: are forwarded to the ranks, and end the launch.  shutdown_timeout: seconds that
    ranks may take then.  virtual_local_rank: each rank sees one GPU, as its first.  master_port:
    None for a free one.  timeout: seconds that a rank may stay stopped, and that nodes wait for
    each other.  explain_after: seconds until it is said why nothing moves. end_after: seconds until
    the ranks are then ended.  backend: of the rendezvous, "" where not given. conf: more for it.
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
    conf: dict[str, str] = field(default_factory=dict)
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
        refuse_backend(flags["rdzv_backend"])
        given = {field.name: flags[field.name] for field in fields(Options) if field.name in flags}
        given |= {
            "max_restarts": (3 if elastic else 0) if restarts is None else restarts,
            "log_dir": flags["log_dir"] or (flags["run_dir"] and flags["run_dir"] / "log"),
            "local_ranks": read_ranks(ranks) if ranks else None,
            "redirects": read_streams("--redirects", flags["redirects"]),
            "tee": read_streams("--tee", flags["tee"]),
            "run_id": flags["rdzv_id"],
            "signals": read_signals(flags["signals_to_handle"]),
            "explain_after": explain_after,
            "backend": flags["rdzv_backend"],
            "conf": read_conf(flags["rdzv_conf"]),
        }
        return Options(**given)

    def refuse_absent_ranks(self, nproc: int) -> None:
        """Raises InputError where a flag names a local rank that none of `nproc` is."""
        named = {
            "--redirects": self.redirects,
            "--tee": self.tee,
            "--local-ranks-filter": self.local_ranks or (),
        }
        for flag, ranks in named.items():
            if max(ranks, default=0) >= nproc:
                raise InputError(
                    f"{flag} names local rank {max(ranks)}, and --nproc is {nproc}",
                    f"0 to {nproc - 1}",
                )

    def is_shown(self, local_rank: int, stream: int) -> bool:
        redirected, shown = (
            streams.get(local_rank, streams.get(-1, 0)) for streams in (self.redirects, self.tee)
        )
        hidden = redirected & ~shown & stream
        return not hidden and (self.local_ranks is None or local_rank in self.local_ranks)


def read_ranks(text: str) -> frozenset[int]:
    """Local ranks, as in 0,1. Raises InputError."""
    ranks = [parse_whole_number(rank, maximum=MAX_PROCESSES) for rank in text.split(",")]
    if None in ranks:
        raise InputError(
            f"--local-ranks-filter {text!r} is not a list of local ranks",
            "--local-ranks-filter 0,1",
        )
    return frozenset(rank for rank in ranks if rank is not None)


def read_streams(flag: str, text: str) -> dict[int, int]:
    """`3` for all local ranks, or `0:1,1:2` by local rank. Raises InputError."""
    streams = {}
    for pair in text.split(","):
        rank, colon, number = pair.rpartition(":")
        place, which = (
            parse_whole_number(rank, maximum=MAX_PROCESSES) if colon else -1,
            parse_whole_number(number, maximum=3),
        )
        if place is None or which is None or place in streams or (place < 0 and "," in text):
            raise InputError(
                f"{flag} {text!r} names no streams", f"{flag} 3, or 0:1,1:2 by local rank"
            )
        streams[place] = which
    return streams


def read_signals(text: str) -> tuple[signal.Signals, ...]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in signal.Signals.__members__ or name in NEVER_HANDLED:
            what = "cannot be handled" if name in NEVER_HANDLED else "is not a signal"
            hint = f"--signals-to-handle {','.join(SIGNALS)}"
            raise InputError(f"--signals-to-handle: {name!r} {what}", hint)
    return tuple(signal.Signals[name] for name in names)


def refuse_backend(name: str) -> None:
    """Raise InputError for a rendezvous back end that `run` does not support."""
    if name and name not in BACKENDS:
        raise InputError(
            f"--rdzv-backend {name!r} is not supported: use {' or '.join(BACKENDS)}",
            "--rdzv-backend c10d",
        )


def read_conf(text: str) -> dict[str, str]:
    pairs = [pair.partition("=") for pair in text.split(",") if pair]
    if bad := [
        name for name, equals, value in pairs if not (name.strip() and equals and value.strip())
    ]:
        raise InputError(f"--rdzv-conf: {bad[0]!r} has no value", "--rdzv-conf key=value,key=value")
    conf = {name.strip(): value.strip() for name, _, value in pairs}
    for name, value in conf.items():
        if name not in CONF:
            raise InputError(
                f"--rdzv-conf: {name!r} is none of {', '.join(sorted(CONF))}",
                "--rdzv-conf join_timeout=60",
            )
        if name in SECONDS and not is_wait_time(value):
            raise InputError(
                f"--rdzv-conf {name}={value} is not a number of seconds to wait",
                f"--rdzv-conf {name}=60",
            )
        if name in NUMBERS - SECONDS and parse_whole_number(value) is None:
            raise InputError(f"--rdzv-conf {name}={value} is not a number", f"--rdzv-conf {name}=3")
        if name == "is_host" and value.lower() not in ("true", "false", "0", "1"):
            raise InputError(
                f"--rdzv-conf is_host={value} is neither true nor false",
                "--rdzv-conf is_host=false",
            )
    return conf


@dataclass(frozen=True)
class RendezvousSpec:
    """Where and how the nodes of a `run` meet.

    backend: c10d or static (torchrun's name for --node-rank and --master-addr).  nodes:
    the least and the most.  timeout: seconds to wait for the others.  node_rank: of the static
    backend.  conf: more for the backend."""

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
        return address.format_endpoint(self.host, self.port)

    @staticmethod
    def read(options: Options, topology: Topology, nodes: tuple[int, int]) -> RendezvousSpec:
        """Raises InputError where the flags do not say where to meet, or name a place others cannot
        reach.
        """
        node_rank, endpoint = options.node_rank, topology.endpoint
        by_rank = options.backend == "static" or not (
            options.backend or node_rank is None or endpoint
        )
        if not endpoint and options.master_addr:
            endpoint = address.format_endpoint(
                options.master_addr.strip("[]"), options.master_port or DEFAULT_PORT
            )
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
        address.wait_for_name(flag, host, options.timeout)
        address.validate_reachable(flag, host, topology.local_addr)
        local_addr = topology.local_addr or address.find_address_to(host)
        address.set_interface_env(host)
        return RendezvousSpec(
            "static" if by_rank else options.backend or "c10d",
            host,
            port,
            options.run_id,
            nodes,
            local_addr,
            options.timeout,
            node_rank or 0,
            options.conf,
        )
