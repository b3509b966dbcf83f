"""Collectives of ranks on several machines, which are the nodes of the group.

The ranks of each machine exchange data in shared memory, the leaders of the machines exchange it
over the network, and each leader hands the result to the ranks of its machine. So one copy of the
data leaves and enters each machine. A reduction is first done in rank order within each machine;
gloo then reduces the results of the machines.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from stepladder.exchange.group_work import Stage
from stepladder.exchange.network import NodeNetwork, Tensors
from stepladder.exchange.reduction import Reduction
from stepladder.exchange.shared_memory import SharedMemory
from stepladder.exchange.work import copy_all

LEADER = 0  # the index of the leader among the ranks of its machine


@dataclass(frozen=True)
class AcrossNodes:
    """A collective on several machines. To call the object is the first stage of the collective.

    Args:
        network: The network between the machines.
        timeout: How long a stage waits for other ranks.
    """

    network: NodeNetwork
    timeout: timedelta

    def set_leader_timeout(self, memory: SharedMemory) -> None:
        """Set how long this rank waits for its leader: twice as long as the leader for others.

        If another machine does not answer, the leader then fails first, and tells the ranks of its
        machine why.
        """
        memory.waiter.set_timeout(2 * self.timeout.total_seconds())


@dataclass(frozen=True)
class AllReduceAcross(AcrossNodes):
    """Reduces tensors over the ranks of all machines.

    Args:
        flats: Flat tensors with the numbers of this rank, which the result replaces.
        reduction: The reduction within a machine.
        operation: The same reduction between machines, an operation of torch; a sum for a mean.
    """

    flats: Tensors
    reduction: Reduction
    operation: Any

    def __call__(self, memory: SharedMemory) -> Stage:
        """Reduce the tensors of this machine into those of its leader."""
        name = f"all_reduce {self.reduction.name}"
        for flat in self.flats:
            reduce_rows = partial(self._reduce_rows, flat)
            memory.combine(flat, memory.one_row_each, len(flat), reduce_rows, name)
        return partial(self._finish, memory)

    def _reduce_rows(self, flat: torch.Tensor, rows: Tensors, lo: int, hi: int) -> None:
        if self.network.is_leader:
            # `_finish` divides, by the number of ranks on all machines.
            without_division = self.reduction._replace(is_mean=False)
            without_division.reduce(rows, flat[lo:hi])

    def _finish(self, memory: SharedMemory) -> None:
        self.set_leader_timeout(memory)
        if self.network.is_leader:
            self.network.all_reduce(self.flats, self.operation, self.timeout)
            if self.reduction.is_mean:
                rank_count = sum(map(len, self.network.nodes))
                for flat in self.flats:
                    flat.div_(rank_count)
        for flat in self.flats:
            memory.broadcast(flat, LEADER)


@dataclass(frozen=True)
class BroadcastAcross(AcrossNodes):
    """Sends tensors of one rank to the ranks of all machines.

    Args:
        flats: Flat tensors: on `root` those to send, on other ranks those to overwrite.
        root: The rank that sends.
    """

    flats: Tensors
    root: int

    def __call__(self, memory: SharedMemory) -> Stage | None:
        """Send the tensors to the ranks of this machine.

        On the machine of `root`, the leaders exchange the tensors in the next stage, since the
        leader of that machine may have to get them first. Other machines exchange them at once.

        Returns:
            The next stage, or None if this stage is the last.
        """
        own_ranks = self.network.nodes[self.network.node]
        has_root = self.root in own_ranks
        if has_root:
            source = own_ranks.index(self.root)
        else:
            source = LEADER
            self.set_leader_timeout(memory)
            self._send_between_machines()
        for flat in self.flats:
            memory.broadcast(flat, source)
        return self._send_between_machines if has_root else None

    def _send_between_machines(self) -> None:
        if self.network.is_leader:
            nodes = self.network.nodes
            root_node = next(node for node, ranks in enumerate(nodes) if self.root in ranks)
            self.network.broadcast(self.flats, root_node, self.timeout)


@dataclass(frozen=True)
class AllGatherAcross(AcrossNodes):
    """Collects tensors of all ranks, if all machines have equally many ranks.

    Args:
        targets: For each source, one tensor for each rank, which gets the source of that rank.
        sources: The flat tensors of this rank.
    """

    targets: list[Tensors]
    sources: Tensors

    def __call__(self, memory: SharedMemory) -> Stage:
        """Collect the tensors of this machine."""
        own_ranks = self.network.nodes[self.network.node]
        for targets, source in zip(self.targets, self.sources, strict=True):
            memory.all_gather([targets[rank] for rank in own_ranks], source)
        return partial(self._finish, memory)

    def _finish(self, memory: SharedMemory) -> None:
        self.set_leader_timeout(memory)
        nodes = self.network.nodes
        own_ranks = nodes[self.network.node]
        for targets, source in zip(self.targets, self.sources, strict=True):
            if self.network.is_leader:
                own_part = torch.cat([targets[rank] for rank in own_ranks])
                parts = self.network.all_gather(own_part, self.timeout)
                for ranks, part in zip(nodes, parts, strict=True):
                    rows = part.view(len(ranks), len(source))
                    copy_all(list(rows), [targets[rank] for rank in ranks])
            for node, ranks in enumerate(nodes):
                if node != self.network.node:
                    for rank in ranks:
                        memory.broadcast(targets[rank], LEADER)


@dataclass(frozen=True)
class BarrierAcross(AcrossNodes):
    """Waits until the ranks of all machines have called it."""

    def __call__(self, memory: SharedMemory) -> Stage:
        """Wait for the ranks of this machine."""
        memory.barrier()
        return partial(self._finish, memory)

    def _finish(self, memory: SharedMemory) -> None:
        self.set_leader_timeout(memory)
        if self.network.is_leader:
            self.network.barrier(self.timeout)
        memory.barrier()
