"""What passes between machines: the first rank of each one sends and receives for its machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import (  # type: ignore[attr-defined]
    PrefixStore,
    ProcessGroupGloo,
    Store,
)

from stepladder.exchange.group_work import copy_error
from stepladder.exchange.wait import OTHER_MACHINE, PeerWaiter, make_loss_error
from stepladder.rank.torch_fixes import list_tcp_connections, shut_down_connections

LEADERS_PREFIX = "leaders"
LOST_KEY = "lost"  # holds the name of a lost rank, for all machines
# The kernel closes the connections of a process before it reports the end of the process, and the
# thread that hears of it may have to wait for a core.
LOSS_REPORT_S = 0.3
LOSS_POLL_S = 0.001
Tensors = list[torch.Tensor]


class NodeNetwork:
    """The network between the machines of a group, as one rank uses it.

    The first rank of each machine, its leader, is in a gloo group of the leaders. Only leaders call
    collectives. Each of them waits for its result.
    """

    def __init__(
        self,
        store: Store,
        gloo: ProcessGroupGloo,
        rank: int,
        nodes: tuple[tuple[int, ...], ...],
    ) -> None:
        """Connect the leaders. All ranks of the group must call it.

        Args:
            store: A store of this group alone.
            gloo: The gloo group of all ranks, whose interfaces and timeout the leaders use.
            rank: This rank.
            nodes: The ranks of each machine.
        """
        self.nodes = nodes
        self.node = next(node for node, ranks in enumerate(nodes) if rank in ranks)
        self.is_leader = rank == nodes[self.node][0]
        self._store = store
        self._has_told_loss = False
        self._leaders: Any = None
        options: Any = gloo.options
        before = list_tcp_connections()
        if self.is_leader:
            self._leaders = ProcessGroupGloo(
                PrefixStore(LEADERS_PREFIX, store),
                self.node,
                len(nodes),
                options,
            )
        self._connections = list_tcp_connections() - before

    # -- collectives of the leaders ----------------------------------------------------------------

    def all_reduce(
        self,
        tensors: Tensors,
        operation: Any,
        timeout: timedelta,
    ) -> None:
        """Reduce each tensor over the machines, in place."""
        self._run(
            lambda: [self._leaders.allreduce([tensor], operation) for tensor in tensors], timeout
        )

    def broadcast(
        self,
        tensors: Tensors,
        node: int,
        timeout: timedelta,
    ) -> None:
        """Send each tensor of one machine to the others."""
        self._run(lambda: [self._leaders.broadcast(tensor, node) for tensor in tensors], timeout)

    def all_gather(self, part: torch.Tensor, timeout: timedelta) -> Tensors:
        """Return the part of each machine; all are as long."""
        parts = [torch.empty_like(part) for _ in self.nodes]
        self._run(lambda: [self._leaders.allgather(parts, part)], timeout)
        return parts

    def barrier(self, timeout: timedelta) -> None:
        """Wait until the leaders of all machines have come here."""
        self._run(lambda: [self._leaders.barrier()], timeout)

    def _run(
        self,
        start: Callable[[], list[Any]],
        timeout: timedelta,
    ) -> None:
        try:
            for work in start():
                work.wait(timeout)
        except RuntimeError as error:
            raise NetworkError(f"another machine does not answer: {error}") from None

    # -- a loss ------------------------------------------------------------------------------------

    def share_loss(self, lost: int | None) -> int | None:
        """Tell the other machines which rank is lost, or learn it from them.

        Args:
            lost: The name of the lost rank; None if none is known here.

        Returns:
            The name of a lost rank of any machine, None if none is known.
        """
        with suppress(RuntimeError):  # the store may have ended with the rank that had it
            if lost is None and self._store.check([LOST_KEY]):
                return int(self._store.get(LOST_KEY))
            if lost is not None and not self._has_told_loss:
                self._has_told_loss = True
                self._store.set(LOST_KEY, str(lost))
        return lost

    def explain(
        self,
        waiter: PeerWaiter,
        error: RuntimeError,
    ) -> RuntimeError:
        """Return the error to keep in place of one of a collective, after which the group is over.

        Neither the ranks of this machine nor other leaders wait for this one any more.

        Args:
            waiter: How the ranks of this machine wait for each other.
            error: The error.
        """
        lost = await_loss(waiter, self)
        if lost is None and isinstance(error, NetworkError):
            waiter.leave_group(OTHER_MACHINE)
        elif self.is_leader:
            waiter.leave_group(lost)
        shut_down_connections(self._connections)
        return copy_error(error) if lost is None else make_loss_error(lost)


def await_loss(waiter: PeerWaiter, network: NodeNetwork | None) -> int | None:
    """Return the name of a lost rank; None if none is known after a while.

    Args:
        waiter: How the ranks of this machine wait for each other.
        network: The network between machines, if there are several.
    """
    deadline = time.monotonic() + LOSS_REPORT_S
    while True:
        lost = waiter.find_lost()
        if network is not None:
            lost = network.share_loss(lost)
        if lost is not None or time.monotonic() >= deadline:
            return lost
        time.sleep(LOSS_POLL_S)


class NetworkError(RuntimeError):
    """The leaders of other machines cannot be reached, or did not answer in time."""
