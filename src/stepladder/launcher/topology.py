"""Where the processes of `run` and `train` belong: flags first, then what a rented cluster says of
itself.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from stepladder.core.address import format_endpoint
from stepladder.core.errors import InputError
from stepladder.core.numbers import parse_whole_number
from stepladder.core.process_count import parse_process_range, parse_range


@dataclass(frozen=True)
class Topology:
    """As text, "" where not given. nodes, nproc: N or A:B.  endpoint: HOST:PORT.  local_addr: this
    node's.

    note: where values come from that no flag gave.
    """

    nodes: str = ""
    nproc: str = ""
    endpoint: str = ""
    local_addr: str = ""
    note: str = ""

    def ranges(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """The least and the most nodes, and ranks on each; one of each where not given. Raises
        InputError.
        """
        nodes, nproc = (
            parse_range("--nodes", self.nodes or "1"),
            parse_process_range(self.nproc or "1"),
        )
        if nodes[1] > 1 and nproc[0] < nproc[1]:
            raise InputError(
                f"--nproc {self.nproc} with --nodes {self.nodes}: only one of them can be a range",
                "--nproc N",
            )
        return nodes, nproc

    def completed(self, env: Mapping[str, str] | None = None) -> Topology:
        """With the variables of a RunPod cluster, which are the same on each of its nodes but for
        NODE_ADDR.

        Taken only where no flag names nodes. Raises InputError where they are half set.
        """
        env = os.environ if env is None else env
        if (
            self.nodes
            or "RANK" in env
            or "PRIMARY_ADDR" not in env
            or env.get("NUM_NODES", "1") == "1"
        ):
            return self
        missing = [
            name
            for name in ("NUM_NODES", "PRIMARY_PORT")
            if parse_whole_number(env.get(name, "")) is None
        ]
        if missing:
            raise InputError(
                f"PRIMARY_ADDR={env['PRIMARY_ADDR']} is set, but {' and '.join(missing)} is not a number",
                "--nodes 1 for this machine alone, or --nodes N --rdzv-endpoint HOST:PORT",
            )
        return replace(
            self,
            nodes=env["NUM_NODES"],
            nproc=self.nproc or env.get("NUM_TRAINERS", ""),
            endpoint=self.endpoint
            or format_endpoint(env["PRIMARY_ADDR"], int(env["PRIMARY_PORT"])),
            local_addr=self.local_addr or env.get("NODE_ADDR", ""),
            note=f"{env['NUM_NODES']} nodes (NUM_NODES, PRIMARY_ADDR); --nodes 1 for this one alone",
        )
