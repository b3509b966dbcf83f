"""The nodes and processes of `run` and `train`: from flags, else from a rented cluster."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from stepladder.core.address import format_endpoint
from stepladder.core.errors import InputError
from stepladder.core.numbers import parse_whole_number
from stepladder.core.process_count import parse_process_range, parse_range

Range = tuple[int, int]


@dataclass(frozen=True)
class Topology:
    """Nodes and processes as text, each "" where not given.

    Attributes:
        nodes: N or A:B.
        nproc: Processes on each node: N or A:B.
        endpoint: HOST:PORT where the nodes meet.
        local_addr: The address of this node.
        note: Where the values come from that no flag gave.
    """

    nodes: str = ""
    nproc: str = ""
    endpoint: str = ""
    local_addr: str = ""
    note: str = ""

    def parse_ranges(self) -> tuple[Range, Range]:
        """Return the ranges of nodes and of processes on each; (1, 1) where not given.

        Raises:
            InputError: A range is invalid, or both vary.
        """
        nodes = parse_range("--nodes", self.nodes or "1")
        nproc = parse_process_range(self.nproc or "1")
        if nodes[1] > 1 and nproc[0] < nproc[1]:
            raise InputError(
                f"--nproc {self.nproc} with --nodes {self.nodes}: only one of them can be a range",
                "--nproc N",
            )
        return nodes, nproc

    def with_cluster_variables(self, env: Mapping[str, str] | None = None) -> Topology:
        """Return the topology completed by the variables of a RunPod cluster.

        They are the same on each of its nodes except for NODE_ADDR, and are used only where no flag
        names nodes.

        Args:
            env: The environment, by default that of this process.

        Raises:
            InputError: Only some of the variables are set.
        """
        env = os.environ if env is None else env
        if self.nodes or "RANK" in env:
            return self
        if "PRIMARY_ADDR" not in env or env.get("NUM_NODES", "1") == "1":
            return self
        numbers = ("NUM_NODES", "PRIMARY_PORT")
        missing = [name for name in numbers if parse_whole_number(env.get(name, "")) is None]
        if missing:
            raise InputError(
                f"PRIMARY_ADDR={env['PRIMARY_ADDR']} is set,"
                f" but {' and '.join(missing)} is not a number",
                "--nodes 1 for this machine alone, or --nodes N --rdzv-endpoint HOST:PORT",
            )
        nodes = env["NUM_NODES"]
        cluster_endpoint = format_endpoint(env["PRIMARY_ADDR"], int(env["PRIMARY_PORT"]))
        return replace(
            self,
            nodes=nodes,
            nproc=self.nproc or env.get("NUM_TRAINERS", ""),
            endpoint=self.endpoint or cluster_endpoint,
            local_addr=self.local_addr or env.get("NODE_ADDR", ""),
            note=f"{nodes} nodes (NUM_NODES, PRIMARY_ADDR); --nodes 1 for this one alone",
        )
