"""The handle of a collective that has started."""

from __future__ import annotations

from typing import Protocol

import torch.distributed as dist

from stepladder.rank.progress import AWAITED, COLLECTIVE, Progress
from stepladder.train.peer_loss import raising_peer_lost
from stepladder_exchange.shared_memory import SharedMemory
from stepladder_exchange.work import Work


class _CollectiveOwner(Protocol):
    """What a handle uses of the Comm that has started the collective."""

    progress: Progress
    shared_memory: SharedMemory | None
    unfinished: set[Pending]

    def wait_for(self, work: dist.Work | Work) -> None:
        """Wait until the collective is done or a rank is lost."""


class Pending:
    """A collective that has started. Call `wait()` before its tensor is read."""

    def __init__(self, work: dist.Work | Work | None, comm: _CollectiveOwner | None = None) -> None:
        self._work = work
        self._comm = comm
        self._number = 0
        if comm is not None:
            self._number = comm.progress.slots[COLLECTIVE]
            if comm.shared_memory is None:
                comm.unfinished.add(self)

    def wait(self) -> None:
        """Wait until the collective is done.

        Raises:
            PeerLost: The collective failed, most likely because another rank ended.
        """
        work = self._work
        comm = self._comm
        if work is None or comm is None:
            return
        if isinstance(work, Work) and work.has_result:
            return
        slots = comm.progress.slots
        slots[AWAITED] = self._number
        try:
            with raising_peer_lost:
                comm.wait_for(work)
        finally:
            slots[AWAITED] = 0
            if comm.shared_memory is None and self.is_finished:
                comm.unfinished.discard(self)

    @property
    def is_finished(self) -> bool:
        """Whether the collective has ended, with a result or an error."""
        return self._work is None or self._work.is_completed()
