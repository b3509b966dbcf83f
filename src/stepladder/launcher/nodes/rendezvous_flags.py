"""How the nodes of a `run` meet: torchrun's flags for the rendezvous, read without torch."""

from __future__ import annotations

from dataclasses import dataclass

from stepladder.core.address import (
    address_towards,
    await_name,
    name_interface,
    parse_endpoint,
    refuse_unreachable,
    show_endpoint,
)
from stepladder.core.errors import InputError
from stepladder.launcher.options import Options
from stepladder.launcher.topology import Topology

DEFAULT_PORT = 29500


@dataclass(frozen=True)
class RendezvousSpec:
    """A place to meet. nodes: the least and the most.  conf: more for the backend.

    node_rank: of the static backend.  timeout: seconds to wait for the others.
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
        return show_endpoint(self.host, self.port)


@dataclass(frozen=True)
class RendezvousFlags:
    """torchrun's flags for the rendezvous, "" or None where not given.

    backend: c10d, static (torchrun's name for --node-rank and --master-addr) or etcd-v2.
    """

    backend: str = ""
    conf: str = ""
    node_rank: int | None = None
    master_addr: str = ""

    def rendezvous(self, topology: Topology, nodes: tuple[int, int], options: Options) -> RendezvousSpec:
        """Raises InputError where the flags do not say where to meet, or name a place others cannot reach."""
        by_rank = self.backend == "static" or (
            not self.backend and self.node_rank is not None and not topology.endpoint
        )
        endpoint = topology.endpoint
        if not endpoint and self.master_addr:
            endpoint = show_endpoint(self.master_addr.strip("[]"), options.master_port or DEFAULT_PORT)
        if not endpoint:
            raise InputError(
                f"--nodes {topology.nodes} without a place to meet",
                "--rdzv-endpoint HOST:PORT, a host that is one of them",
            )
        if by_rank and (self.node_rank is None or nodes[0] < nodes[1]):
            raise InputError(
                f"--nodes {topology.nodes} by rank needs a number of nodes and this one's",
                "--nodes N --node-rank R",
            )
        if by_rank and not 0 <= (self.node_rank or 0) < nodes[1]:
            raise InputError(f"--node-rank {self.node_rank} of {nodes[1]} nodes", f"0 to {nodes[1] - 1}")
        host, port = parse_endpoint(endpoint)
        flag = "--rdzv-endpoint" if topology.endpoint else "--master-addr"
        await_name(flag, host, options.timeout)
        refuse_unreachable(flag, host, topology.local_addr)
        local_addr = topology.local_addr or address_towards(host)
        name_interface(host)
        return RendezvousSpec(
            "static" if by_rank else self.backend or "c10d", host, port, options.run_id, nodes, local_addr,
            options.timeout, self.node_rank or 0, self.read_conf(),
        )  # fmt: skip

    def read_conf(self) -> dict[str, str]:
        pairs = [pair.partition("=") for pair in self.conf.split(",") if pair]
        if bad := [name for name, equals, _ in pairs if not equals]:
            raise InputError(f"--rdzv-conf: {bad[0]!r} has no value", "--rdzv-conf key=value,key=value")
        return {name.strip(): value.strip() for name, _, value in pairs}
