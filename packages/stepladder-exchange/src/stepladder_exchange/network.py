"""The network between machines: the first rank of each machine sends and receives for it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store  # type: ignore[attr-defined]

from stepladder_exchange.group_work import copy_error
from stepladder_exchange.torch_fixes_gloo import list_tcp_connections, shut_down_connections
from stepladder_exchange.wait import OTHER_MACHINE, CallMismatch, PeerWaiter, make_loss_error

LEADERS_PREFIX = "leaders"
# The key of the store under which all machines find the name of a lost rank: the number by which
# messages name it.
LOST_KEY = "lost"
# So long after the connections of a rank break, its loss may become known. The kernel closes the
# connections of a process before it reports the end of the process, and the thread that waits for
# that report may have to wait for a core.
LOSS_REPORT_S = 0.3
LOSS_POLL_S = 0.001
WAIT_ENDED = "Operation timed out"  # how torch says that a wait has ended before the collective
LOSS_CHECK_S = 0.05  # how long a rank waits in gloo before it asks whether others know of a loss
# So long after the end of the process that serves the store, other machines give up. It may have
# ended well, and what it has sent is still on its way.
STORE_GRACE_S = 5.0
Tensors = list[torch.Tensor]
LossFinder = Callable[[], int | None]


class NodeNetwork:
    """The network between the machines of a group, as one rank uses it.

    The first rank of each machine, its leader, is in a gloo group of the leaders. A collective of
    this class waits for its result on a leader, and does nothing on other ranks.
    """

    def __init__(
        self, store: Store, gloo: ProcessGroupGloo, rank: int, nodes: tuple[tuple[int, ...], ...]
    ) -> None:
        """Connect the leaders. All ranks of the group must call it.

        Args:
            store: A store of this group alone.
            gloo: The gloo group of all ranks, whose interfaces and timeout the leaders use.
            rank: This rank.
            nodes: The ranks of each machine.
        """
        self.nodes = nodes
        self.own_ranks = next(ranks for ranks in nodes if rank in ranks)
        self.is_leader = rank == self.own_ranks[0]
        self._store = store
        self._has_shared_loss = False
        self._store_ended_at = math.inf
        self._leaders: Any = None
        options: Any = gloo.options
        earlier_connections = list_tcp_connections()
        if self.is_leader:
            self._leaders = ProcessGroupGloo(
                PrefixStore(LEADERS_PREFIX, store), nodes.index(self.own_ranks), len(nodes), options
            )
        self._connections = list_tcp_connections() - earlier_connections

    # -- collectives of the leaders ----------------------------------------------------------------

    def all_reduce(self, tensors: Tensors, operation: Any, timeout: timedelta) -> None:
        """Reduce each tensor over the machines, in place."""
        self._run(
            lambda: [self._leaders.allreduce([tensor], operation) for tensor in tensors], timeout
        )

    def broadcast(self, tensors: Tensors, root: int, timeout: timedelta) -> None:
        """Send each tensor of the machine of one rank to the others."""
        node = next(node for node, ranks in enumerate(self.nodes) if root in ranks)
        self._run(lambda: [self._leaders.broadcast(tensor, node) for tensor in tensors], timeout)

    def all_gather(self, rows: Tensors, timeout: timedelta) -> list[Tensors]:
        """Return the rows of each machine, given those of this one; a leader's alone."""
        if not self.is_leader:
            return []
        part = torch.stack(rows)
        parts = [torch.empty_like(part) for _ in self.nodes]
        self._run(lambda: [self._leaders.allgather(parts, part)], timeout)
        return [list(part) for part in parts]

    def barrier(self, timeout: timedelta) -> None:
        """Wait until all machines have come here."""
        self._run(lambda: [self._leaders.barrier()], timeout)

    def _run(self, start: Callable[[], list[Any]], timeout: timedelta) -> None:
        """Start collectives of the leaders, and wait for each of them.

        Args:
            start: Starts them, and returns the work of each.
            timeout: How long to wait for each.

        Raises:
            _NetworkError: One of them has failed, or has not ended in time.
        """
        if not self.is_leader:
            return
        try:
            for work in start():
                wait_for_collective(work, timeout, self.find_loss)
        except RuntimeError as error:
            raise _NetworkError(f"another machine does not answer: {error}") from None

    # -- a loss ------------------------------------------------------------------------------------

    def find_loss(self) -> int | None:
        """Return the name of a rank that is known to be lost on any machine, None without one.

        Returns:
            The name; OTHER_MACHINE if the store has ended, which would tell the name.
        """
        try:
            if self._store.check([LOST_KEY]):
                return int(self._store.get(LOST_KEY))
        except RuntimeError:
            now = time.monotonic()
            self._store_ended_at = min(self._store_ended_at, now)
            if now - self._store_ended_at > STORE_GRACE_S:
                return OTHER_MACHINE
        return None

    def share_loss(self, lost: int | None) -> int | None:
        """Tell the other machines which rank is lost, or learn it from them.

        Args:
            lost: The name of the lost rank; None if this rank knows of none.

        Returns:
            The name of the rank of any machine that was lost first; None if none is known.
        """
        with suppress(RuntimeError):  # the lost rank may be the one that served the store
            if self._store.check([LOST_KEY]):  # the first loss: others leave because of it
                return int(self._store.get(LOST_KEY))
            if lost is not None and not self._has_shared_loss:
                self._has_shared_loss = True
                self._store.set(LOST_KEY, str(lost))
        return lost

    def leave_after_error(self, waiter: PeerWaiter, error: RuntimeError) -> RuntimeError:
        """Leave the group after a collective has failed, and explain its error.

        Neither the ranks of this machine nor other leaders wait for this rank any more.

        Args:
            waiter: How the ranks of this machine wait for each other.
            error: The error of the collective.

        Returns:
            The error to keep in its place, which names a lost rank if one is known.
        """
        # After a mismatch ranks end of themselves.
        loss = None if isinstance(error, CallMismatch) else await_loss(waiter, self)
        if loss is None and isinstance(error, _NetworkError):  # which leaders alone raise
            waiter.leave_group(OTHER_MACHINE)
        elif self.is_leader:
            waiter.leave_group(loss)
        shut_down_connections(self._connections)
        return copy_error(error) if loss is None else make_loss_error(loss)


def wait_for_collective(work: Any, timeout: timedelta, find_loss: LossFinder) -> bool:
    """Wait for a collective of gloo, or until other ranks know of a loss.

    If a connection breaks while data are on their way, gloo does not tell who waits for them.

    Args:
        work: The work of gloo.
        timeout: How long to wait for it; 0 for no timeout but that of gloo's group.
        find_loss: Returns the name of a rank that is lost to others, None if there is none.

    Returns:
        What gloo's work returns.

    Raises:
        RuntimeError: The collective has failed, has not ended in time, or a rank is lost.
    """
    deadline = time.monotonic() + (timeout.total_seconds() or math.inf)
    while True:
        remaining = deadline - time.monotonic()
        had_ended = work.is_completed()  # before the wait: it may end between the wait and a look
        try:
            has_ended: bool = work.wait(timedelta(seconds=min(LOSS_CHECK_S, max(remaining, 0.001))))
        except RuntimeError as error:
            is_only_late = WAIT_ENDED in str(error) and not had_ended
            if not is_only_late or remaining <= 0 or find_loss() is not None:
                raise
        else:
            return has_ended


def await_loss(waiter: PeerWaiter, network: NodeNetwork | None) -> int | None:
    """Wait until a lost rank is known, for LOSS_REPORT_S at most.

    Args:
        waiter: How the ranks of this machine wait for each other.
        network: The network between machines, if there are several.

    Returns:
        The name of the lost rank; None if none is known by then.
    """
    deadline = time.monotonic() + LOSS_REPORT_S
    while True:
        loss = waiter.find_lost()
        if network is not None:
            loss = network.share_loss(loss)
        if loss is not None or time.monotonic() >= deadline:
            return loss
        time.sleep(LOSS_POLL_S)


class _NetworkError(RuntimeError):
    """The leader of another machine cannot be reached, or did not answer in time."""
