"""The nodes and processes of `run` and `train`: from flags, else from a cluster's variables.

`CLUSTERS` lists the clusters whose variables describe the nodes.
"""

from __future__ import annotations

import os
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from stepladder.core.address import format_endpoint
from stepladder.core.errors import InputError, as_input_error
from stepladder.core.numbers import parse_whole_number
from stepladder.core.process_count import parse_process_range, parse_range
from stepladder.core.world import FIRST_PORT, NUM_PORTS, TORCHRUN, World, find_launcher

Range = tuple[int, int]
CLUSTER_VARIABLE = "STEPLADDER_CLUSTER"  # names another batch system than Slurm
NODES_HINT = "--nodes 1 for this machine alone, or --nodes N --rdzv-endpoint HOST:PORT"


@dataclass(frozen=True)
class Topology:
    """Nodes and processes as text, each "" where not given.

    Args:
        nodes: N or A:B.
        nproc: Processes on each node: N or A:B.
        endpoint: HOST:PORT where the nodes meet.
        local_addr: The address of this node.
        note: Where the values come from that no flag gave.
        hosts: Hosts on which this process is to start the command, the value of --hosts.
    """

    nodes: str = ""
    nproc: str = ""
    endpoint: str = ""
    local_addr: str = ""
    note: str = ""
    hosts: str = ""

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
        """Return the topology completed by the variables of a cluster of several nodes.

        They are used only where no flag names nodes or hosts, and not in a rank.

        Args:
            env: The environment, by default that of this process.

        Raises:
            InputError: Only some of a cluster's variables are set, or they contradict each other.
        """
        env = os.environ if env is None else env
        if self.nodes or self.hosts or find_launcher(env) is not None:
            return self
        for read in CLUSTERS:
            topology = read(env)
            if topology is not None:
                return replace(
                    topology,
                    nproc=self.nproc or topology.nproc,
                    endpoint=self.endpoint or topology.endpoint,
                    local_addr=self.local_addr or topology.local_addr,
                    note=f"{topology.nodes} nodes ({topology.note}); --nodes 1 for this one alone",
                )
        return self

    def in_step(self, env: Mapping[str, str] | None = None) -> Topology:
        """Return the topology for a task of a launcher's, such as srun's or mpirun's.

        The flags may say that each task is the agent of a node. All tasks start one job together.

        Args:
            env: The environment, by default that of this process.

        Raises:
            InputError: Each task would start a job of its own.
        """
        env = os.environ if env is None else env
        launcher = find_launcher(env)
        if launcher in (None, TORCHRUN) or not (self.nodes or self.nproc):
            return self
        is_on_nodes = self.parse_ranges()[0][1] > 1
        if is_on_nodes and self.endpoint:
            return self
        world = World.detect(env)
        if not self.nodes and self.nproc in ("1", str(world.ranks_per_node)):
            return replace(self, nproc="")  # each task is a rank
        tasks = str(world.world_size)
        nodes = env.get("SLURM_STEP_NUM_NODES", str(world.num_nodes))
        if tasks == nodes and self.nodes in ("", nodes):
            endpoint = self.endpoint or format_endpoint(*world.endpoint)
            return replace(
                self, nodes=nodes, endpoint=endpoint, note=f"{nodes} nodes ({world.source})"
            )
        if is_on_nodes:
            return self
        raise InputError(
            f"{tasks} tasks ({world.source}) on {nodes} {'node' if nodes == '1' else 'nodes'} each"
            f" start {self.nproc or 1} ranks: {tasks} trainings, none of which knows the others",
            "one task per node (srun --ntasks-per-node=1); or neither --nproc nor --nodes, and each"
            " task is a rank; or --independent",
        )


def _read_runpod(env: Mapping[str, str]) -> Topology | None:
    """Return the nodes of a RunPod cluster, on each of which the same command is started."""
    if "PRIMARY_ADDR" not in env or env.get("NUM_NODES", "1") == "1":
        return None
    nodes = _read_count(env, "NUM_NODES", "PRIMARY_ADDR")
    port = _read_count(env, "PRIMARY_PORT", "PRIMARY_ADDR")
    return Topology(
        str(nodes),
        env.get("NUM_TRAINERS", ""),
        format_endpoint(env["PRIMARY_ADDR"], port),
        env.get("NODE_ADDR", ""),
        "NUM_NODES, PRIMARY_ADDR",
    )


def _read_skypilot(env: Mapping[str, str]) -> Topology | None:
    """Return the nodes of a SkyPilot task, on each of which the same command is started."""
    gpus_name = "SKYPILOT_NUM_GPUS_PER_NODE"
    addresses = env.get("SKYPILOT_NODE_IPS", "").split()
    if len(addresses) < 2 and env.get("SKYPILOT_NUM_NODES", "1") == "1":
        return None
    nodes = _read_count(env, "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_IPS")
    node = _read_count(env, "SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS")
    if nodes != len(addresses) or node >= nodes:
        raise InputError(
            f"SKYPILOT_NUM_NODES={nodes} and SKYPILOT_NODE_RANK={node}, but SKYPILOT_NODE_IPS"
            f" names {len(addresses)} nodes ({', '.join(addresses)})",
            NODES_HINT,
        )
    gpus = _read_count({gpus_name: "0", **env}, gpus_name, "SKYPILOT_NODE_IPS")
    # Two tasks on one cluster meet at two ports.
    port = FIRST_PORT + zlib.crc32(env.get("SKYPILOT_TASK_ID", "").encode()) % NUM_PORTS
    return Topology(
        str(nodes),
        str(gpus or ""),
        format_endpoint(addresses[0], port),
        addresses[node],
        "SKYPILOT_NUM_NODES, SKYPILOT_NODE_IPS",
    )


def _read_grid_engine(env: Mapping[str, str]) -> Topology | None:
    """Return the hosts of a parallel job of Grid Engine, which runs on the first of them."""
    if not env.get("PE_HOSTFILE"):
        return None
    path = Path(env["PE_HOSTFILE"])
    with as_input_error(f"PE_HOSTFILE={path} cannot be read", NODES_HINT, (OSError, ValueError)):
        lines = [line.split() for line in path.read_text(encoding="utf-8").splitlines()]
    slots: Counter[str] = Counter()
    for fields in filter(None, lines):  # host, slots, queue, processors; one for each queue
        count = parse_whole_number(fields[1], 1) if len(fields) > 1 else None
        if count is None:
            raise InputError(
                f"PE_HOSTFILE={path} has the line {' '.join(fields)!r}, not: host slots queue",
                NODES_HINT,
            )
        slots[fields[0]] += count
    listing = ", ".join(f"{host}: {count}" for host, count in slots.items())
    if "NHOSTS" in env and env["NHOSTS"] != str(len(slots)):
        raise InputError(
            f"NHOSTS={env['NHOSTS']}, but PE_HOSTFILE={path} names {len(slots)} hosts ({listing})",
            NODES_HINT,
        )
    if len(slots) < 2:
        return None
    return Topology(
        str(len(slots)),
        str(min(slots.values())),  # all nodes run equally many ranks
        note=f"PE_HOSTFILE, slots: {listing}",
        hosts=",".join(slots),
    )


# In the order of precedence.
CLUSTERS: tuple[Callable[[Mapping[str, str]], Topology | None], ...] = (
    _read_runpod,
    _read_skypilot,
    _read_grid_engine,
)


def _read_count(env: Mapping[str, str], name: str, present: str) -> int:
    """Return the number in a variable that a cluster sets together with another one."""
    number = parse_whole_number(env.get(name, ""))
    if number is None:
        value = repr(env[name]) if name in env else "not set"
        raise InputError(
            f"{present} is {env.get(present, '')!r}, but {name} is not a number: {value}",
            NODES_HINT,
        )
    return number
