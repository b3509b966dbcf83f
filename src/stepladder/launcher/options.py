"""The flags of `run`, which are torchrun's, except those that say where the ranks are.

Imports no torch.
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

DEFAULT_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
# No process can handle the first two; the kernel sends the others on an error, or about a child.
UNHANDLED_SIGNALS = {
    "SIGKILL",
    "SIGSTOP",
    "SIGSEGV",
    "SIGBUS",
    "SIGILL",
    "SIGFPE",
    "SIGABRT",
    "SIGCHLD",
}
RENDEZVOUS_BACKENDS = ("c10d", "static")
# Keys of --rdzv-conf: those that torchrun reads.
CONF_SECONDS = {
    "timeout",
    "join_timeout",
    "last_call_timeout",
    "close_timeout",
    "heartbeat_timeout",
    "read_timeout",
    "keep_alive_interval",
}
CONF_NUMBERS = {*CONF_SECONDS, "keep_alive_max_attempt", "rank"}
CONF_KEYS = {*CONF_NUMBERS, "is_host", "store_type", "use_agent_store"}
DEFAULT_MASTER_PORT = 29500
DEFAULT_EXPLAIN_AFTER_LIMIT_S = 60.0
ELASTIC_MAX_RESTARTS = 3
ALL_RANKS = -1


@dataclass(frozen=True)
class Options:
    """How the ranks of a script are started, shown and ended, and how several nodes meet.

    Args:
        max_restarts: How often all ranks may restart.
        log_dir: The folder of the log, or None.
        local_ranks: The local ranks whose output is shown, None for all.
        redirects: By local rank (-1: all), the streams that only the log shows: 1 stdout, 2 stderr,
            3 both.
        tee: The same for streams that are shown in any case.
        role: The value of ROLE_NAME.
        run_id: The name of the launch, where several meet at one endpoint.
        signals: Are forwarded to the ranks, and end the launch.
        shutdown_timeout: Seconds that the ranks may take to end then, None for those of a job.
        virtual_local_rank: Each rank sees one GPU, as its first.
        master_port: None for a free one.
        timeout: Seconds that a rank may stay stopped, and that nodes wait for each other.
        explain_after: Seconds without progress until the reason is printed.
        end_after: Seconds without progress until the ranks are ended.
        backend: The rendezvous back end, "" where not given.
        conf: Further settings of the rendezvous.
        node_rank: The number of this node, for the static back end.
        master_addr: The address of node 0, for the static back end.
    """

    max_restarts: int = 0
    log_dir: Path | None = None
    local_ranks: frozenset[int] | None = None
    redirects: dict[int, int] = field(default_factory=dict)
    tee: dict[int, int] = field(default_factory=dict)
    role: str = "default"
    run_id: str = "none"
    signals: tuple[signal.Signals, ...] = tuple(signal.Signals[name] for name in DEFAULT_SIGNALS)
    shutdown_timeout: float | None = None
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
    def from_flags(flags: dict[str, Any], elastic: bool) -> Options:
        """Return the options of a command line.

        Args:
            flags: The values of the flags, by name.
            elastic: The number of processes is a range.

        Raises:
            InputError: A flag's value is invalid.
        """
        explain_after = _choose_explain_after(flags["explain_after"], flags["end_after"])
        _validate_backend(flags["rdzv_backend"])
        max_restarts = flags["max_restarts"]
        if max_restarts is None:
            max_restarts = ELASTIC_MAX_RESTARTS if elastic else 0
        log_dir = flags["log_dir"]
        if log_dir is None and flags["run_dir"] is not None:
            log_dir = flags["run_dir"] / "log"
        local_ranks = flags["local_ranks_filter"]
        as_typed = {
            field.name: flags[field.name] for field in fields(Options) if field.name in flags
        }
        parsed = {
            "max_restarts": max_restarts,
            "log_dir": log_dir,
            "local_ranks": _parse_local_ranks(local_ranks) if local_ranks else None,
            "redirects": _parse_streams("--redirects", flags["redirects"]),
            "tee": _parse_streams("--tee", flags["tee"]),
            "run_id": flags["rdzv_id"],
            "signals": _parse_signals(flags["signals_to_handle"]),
            "explain_after": explain_after,
            "backend": flags["rdzv_backend"],
            "conf": _parse_rendezvous_conf(flags["rdzv_conf"]),
        }
        return Options(**(as_typed | parsed))

    def validate_local_ranks(self, nproc: int) -> None:
        """Raise InputError where a flag names a local rank that none of `nproc` has."""
        ranks_by_flag = {
            "--redirects": self.redirects,
            "--tee": self.tee,
            "--local-ranks-filter": self.local_ranks or (),
        }
        for flag, ranks in ranks_by_flag.items():
            largest = max(ranks, default=0)
            if largest >= nproc:
                raise InputError(
                    f"{flag} names local rank {largest}, and --nproc is {nproc}",
                    f"0 to {nproc - 1}",
                )

    def is_shown(self, local_rank: int, stream: int) -> bool:
        """Return whether a stream (1 stdout, 2 stderr) of a rank is shown."""
        redirected = self.redirects.get(local_rank, self.redirects.get(ALL_RANKS, 0))
        teed = self.tee.get(local_rank, self.tee.get(ALL_RANKS, 0))
        if redirected & ~teed & stream:
            return False
        return self.local_ranks is None or local_rank in self.local_ranks


def _choose_explain_after(explain_after: float | None, end_after: float | None) -> float | None:
    """Return --explain-after, whose default depends on --end-after.

    Raises:
        InputError: The ranks would be ended before anything is explained.
    """
    if end_after is None:
        return explain_after
    if explain_after is None:
        return min(DEFAULT_EXPLAIN_AFTER_LIMIT_S, end_after / 2)
    if explain_after > end_after:
        raise InputError(
            f"--end-after {end_after:g} with --explain-after {explain_after:g}:"
            " nothing would be explained",
            f"--explain-after {end_after / 2:g}",
        )
    return explain_after


def _parse_local_ranks(text: str) -> frozenset[int]:
    """Return the local ranks of a list such as 0,1.

    Raises:
        InputError: An entry is not a local rank.
    """
    ranks = [parse_whole_number(rank, maximum=MAX_PROCESSES) for rank in text.split(",")]
    if None in ranks:
        raise InputError(
            f"--local-ranks-filter {text!r} is not a list of local ranks",
            "--local-ranks-filter 0,1",
        )
    return frozenset(rank for rank in ranks if rank is not None)


def _parse_streams(flag: str, text: str) -> dict[int, int]:
    """Return the streams by local rank, -1 for all.

    Args:
        flag: The flag's name.
        text: `3` for all local ranks, or `0:1,1:2` by local rank.

    Raises:
        InputError: The text names no streams.
    """
    error = InputError(f"{flag} {text!r} names no streams", f"{flag} 3, or 0:1,1:2 by local rank")
    entries = text.split(",")
    streams: dict[int, int] = {}
    for entry in entries:
        rank_text, colon, stream_text = entry.rpartition(":")
        rank = parse_whole_number(rank_text, maximum=MAX_PROCESSES) if colon else ALL_RANKS
        stream = parse_whole_number(stream_text, maximum=3)
        if rank is None or stream is None or rank in streams:
            raise error
        if rank == ALL_RANKS and len(entries) > 1:
            raise error
        streams[rank] = stream
    return streams


def _parse_signals(text: str) -> tuple[signal.Signals, ...]:
    """Return the signals of a list of names.

    Raises:
        InputError: A name is not a signal, or one that no process can handle.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name in UNHANDLED_SIGNALS:
            problem = "cannot be handled"
        elif name not in signal.Signals.__members__:
            problem = "is not a signal"
        else:
            continue
        hint = f"--signals-to-handle {','.join(DEFAULT_SIGNALS)}"
        raise InputError(f"--signals-to-handle: {name!r} {problem}", hint)
    return tuple(signal.Signals[name] for name in names)


def _validate_backend(name: str) -> None:
    """Raise InputError for a rendezvous back end that `run` does not support."""
    if name and name not in RENDEZVOUS_BACKENDS:
        raise InputError(
            f"--rdzv-backend {name!r} is not supported: use {' or '.join(RENDEZVOUS_BACKENDS)}",
            "--rdzv-backend c10d",
        )


def _parse_rendezvous_conf(text: str) -> dict[str, str]:
    """Return the settings of --rdzv-conf.

    Raises:
        InputError: A setting is unknown, or its value is invalid.
    """
    conf = {}
    for entry in text.split(","):
        if not entry:
            continue
        name, _, value = entry.partition("=")
        if not (name.strip() and value.strip()):
            raise InputError(
                f"--rdzv-conf: {name!r} has no value", "--rdzv-conf key=value,key=value"
            )
        conf[name.strip()] = value.strip()
    for name, value in conf.items():
        _validate_rendezvous_setting(name, value)
    return conf


def _validate_rendezvous_setting(name: str, value: str) -> None:
    """Raise InputError where a setting of --rdzv-conf is unknown, or its value is invalid."""
    if name not in CONF_KEYS:
        raise InputError(
            f"--rdzv-conf: {name!r} is none of {', '.join(sorted(CONF_KEYS))}",
            "--rdzv-conf join_timeout=60",
        )
    if name in CONF_SECONDS and not is_wait_time(value):
        raise InputError(
            f"--rdzv-conf {name}={value} is not a number of seconds to wait",
            f"--rdzv-conf {name}=60",
        )
    if name in CONF_NUMBERS - CONF_SECONDS and parse_whole_number(value) is None:
        raise InputError(f"--rdzv-conf {name}={value} is not a number", f"--rdzv-conf {name}=3")
    if name == "is_host" and value.lower() not in ("true", "false", "0", "1"):
        raise InputError(
            f"--rdzv-conf is_host={value} is neither true nor false", "--rdzv-conf is_host=false"
        )


@dataclass(frozen=True)
class RendezvousSpec:
    """The rendezvous of a `run` on several nodes: the store, its back end and its limits.

    Args:
        backend: "c10d" or "static", which is torchrun's name for --node-rank and --master-addr.
        host: The host of the store.
        port: Its port.
        run_id: The name of the launch.
        nodes: The smallest and the largest number of nodes.
        local_addr: How other nodes reach this one.
        timeout: Seconds to wait for the other nodes.
        node_rank: The number of this node, for the static back end.
        conf: Further settings of the back end.
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
        """HOST:PORT of the store."""
        return address.format_endpoint(self.host, self.port)

    @staticmethod
    def from_options(
        options: Options, topology: Topology, nodes: tuple[int, int]
    ) -> RendezvousSpec:
        """Return the rendezvous that the flags describe.

        Args:
            options: The flags of `run`.
            topology: The flags that say where the ranks are.
            nodes: The smallest and the largest number of nodes.

        Raises:
            InputError: The flags name no endpoint, or one that other nodes cannot reach.
        """
        endpoint = topology.endpoint
        if not endpoint and options.master_addr:
            port = options.master_port or DEFAULT_MASTER_PORT
            endpoint = address.format_endpoint(options.master_addr.strip("[]"), port)
        if not endpoint:
            raise InputError(
                f"--nodes {topology.nodes} without an address to meet at",
                "--rdzv-endpoint HOST:PORT, a host that is one of them",
            )
        is_static = _is_static_rendezvous(options, topology)
        if is_static:
            _validate_node_rank(options.node_rank, topology, nodes)
        host, port = address.parse_endpoint(endpoint)
        flag = "--rdzv-endpoint" if topology.endpoint else "--master-addr"
        address.wait_for_name(flag, host, options.timeout)
        address.validate_reachable(flag, host, topology.local_addr)
        local_addr = topology.local_addr or address.find_address_to(host)
        address.set_interface_env(host)
        return RendezvousSpec(
            backend="static" if is_static else options.backend or "c10d",
            host=host,
            port=port,
            run_id=options.run_id,
            nodes=nodes,
            local_addr=local_addr,
            timeout=options.timeout,
            node_rank=options.node_rank or 0,
            conf=options.conf,
        )


def _is_static_rendezvous(options: Options, topology: Topology) -> bool:
    """Return whether --node-rank numbers the nodes, and --master-addr says where they meet."""
    if options.backend:
        return options.backend == "static"
    return options.node_rank is not None and not topology.endpoint


def _validate_node_rank(node_rank: int | None, topology: Topology, nodes: tuple[int, int]) -> None:
    """Raise InputError where --node-rank is missing, or is not one of a fixed number of nodes."""
    if node_rank is None or nodes[0] < nodes[1]:
        raise InputError(
            f"--nodes {topology.nodes} by rank needs a number of nodes and this one's",
            "--nodes N --node-rank R",
        )
    if not 0 <= node_rank < nodes[1]:
        raise InputError(f"--node-rank {node_rank} of {nodes[1]} nodes", f"0 to {nodes[1] - 1}")
