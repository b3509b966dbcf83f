"""Collectives of ranks on several machines, in stages: within each machine, between them, within.

One copy of the data leaves and enters each machine. A reduction is first done in rank order within
each machine; gloo then reduces the results of the machines.
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

LEADER = 0  # its index among the ranks of its machine


@dataclass(frozen=True)
class AcrossNodes:
    """The first stage of a collective on several machines; called, it starts the collective.

    Attributes:
        network: The network between the machines.
        timeout: How long a stage waits for other ranks.
    """

    network: NodeNetwork
    timeout: timedelta

    def wait_for_leader(self, memory: SharedMemory) -> None:
        """Let the ranks of a machine wait for their leader longer than it waits for others.

        Then the error of all of them is that another machine does not answer.
        """
        memory.waiter.set_timeout(2 * self.timeout.total_seconds())


@dataclass(frozen=True)
class AllReduceAcross(AcrossNodes):
    """Reduces tensors over the ranks of all machines.

    Attributes:
        flats: The tensors, which get the result.
        reduction: The reduction.
        operation: torch's name for it; the sum for a mean.
    """

    flats: Tensors
    reduction: Reduction
    operation: Any

    def __call__(self, memory: SharedMemory) -> Stage:
        """Reduce the tensors of this machine into those of its leader."""
        name = f"all_reduce {self.reduction.name}"
        for flat in self.flats:
            reduce_rows = partial(self._reduce_rows, flat)
            memory.combine(
                flat,
                memory.one_row_each,
                len(flat),
                reduce_rows,
                name,
            )
        return partial(self._finish, memory)

    def _reduce_rows(
        self,
        flat: torch.Tensor,
        rows: Tensors,
        lo: int,
        hi: int,
    ) -> None:
        if self.network.is_leader:
            self.reduction._replace(is_mean=False).reduce(rows, flat[lo:hi])

    def _finish(self, memory: SharedMemory) -> None:
        self.wait_for_leader(memory)
        if self.network.is_leader:
            self.network.all_reduce(
                self.flats,
                self.operation,
                self.timeout,
            )
            if self.reduction.is_mean:
                rank_count = sum(map(len, self.network.nodes))
                for flat in self.flats:
                    flat.div_(rank_count)
        for flat in self.flats:
            memory.broadcast(flat, LEADER)


@dataclass(frozen=True)
class BroadcastAcross(AcrossNodes):
    """Sends tensors of one rank to the ranks of all machines.

    Attributes:
        flats: The tensors.
        root: The rank that has them.
    """

    flats: Tensors
    root: int

    def __call__(self, memory: SharedMemory) -> Stage | None:
        """Send the tensors within the machine of their rank, or get them from there."""
        own_ranks = self.network.nodes[self.network.node]
        is_here = self.root in own_ranks
        if not is_here:
            self.wait_for_leader(memory)
            self._cross()
        for flat in self.flats:
            memory.broadcast(flat, own_ranks.index(self.root) if is_here else LEADER)
        return self._cross if is_here else None

    def _cross(self) -> None:
        if self.network.is_leader:
            nodes = self.network.nodes
            root_node = next(node for node, ranks in enumerate(nodes) if self.root in ranks)
            self.network.broadcast(
                self.flats,
                root_node,
                self.timeout,
            )


@dataclass(frozen=True)
class AllGatherAcross(AcrossNodes):
    """Collects tensors of all ranks, where each machine has as many ranks.

    Attributes:
        targets: For each tensor, where that of each rank goes.
        sources: The tensors of this rank.
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
        self.wait_for_leader(memory)
        nodes = self.network.nodes
        for targets, source in zip(self.targets, self.sources, strict=True):
            if self.network.is_leader:
                part = torch.cat([targets[rank] for rank in nodes[self.network.node]])
                parts = self.network.all_gather(part, self.timeout)
                for ranks, part in zip(nodes, parts, strict=True):
                    rows = part.view(len(ranks), len(source))
                    copy_all(list(rows), [targets[rank] for rank in ranks])
            for node, ranks in enumerate(nodes):
                if node != self.network.node:
                    for rank in ranks:
                        memory.broadcast(targets[rank], LEADER)


@dataclass(frozen=True)
class BarrierAcross(AcrossNodes):
    """Waits until the ranks of all machines have come here."""

    def __call__(self, memory: SharedMemory) -> Stage:
        """Wait for the ranks of this machine."""
        memory.barrier()
        return partial(self._finish, memory)

    def _finish(self, memory: SharedMemory) -> None:
        self.wait_for_leader(memory)
        if self.network.is_leader:
            self.network.barrier(self.timeout)
        memory.barrier()
