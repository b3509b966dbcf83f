"""How a rank waits for collectives that other ranks may never join, and how it leaves its group.

A collective of gloo ends when its connections end. Kernels of NCCL may wait for a lost rank for
ever. So NCCL's communicators are aborted, and its collectives raise their errors where they are
waited for, instead of ending the process (TORCH_NCCL_ASYNC_ERROR_HANDLING and
TORCH_NCCL_BLOCKING_WAIT in torch's "ProcessGroupNCCL Environment Variables").
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from stepladder.core.errors import PeerLost
from stepladder.core.world import World
from stepladder.rank.torch_fixes import abort_process_group

GLOO_POLL_INTERVAL = timedelta(seconds=0.05)
NCCL_POLL_INTERVAL_S = 5e-5
MIN_GROUP_LIFETIME_S = 10.0  # after a group was left: gloo's threads may still use it
NCCL_ABORT_TIMEOUT_S = 20.0  # NCCL's own abort may wait for a GPU that does not answer
NCCL_ERRORS_RAISE = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_BLOCKING_WAIT": "1"}


class _StartedCollective(Protocol):
    """A collective that was started."""

    @property
    def is_finished(self) -> bool:
        """Whether it is done or has failed."""


class _FormerGroup(NamedTuple):
    """A process group that was left, with the collectives that were under way then."""

    group: Any
    under_way: list[_StartedCollective]
    left_at: float

    def is_in_use(self, now: float) -> bool:
        """Return whether threads of gloo may still use the group."""
        is_recent = now - self.left_at < MIN_GROUP_LIFETIME_S
        return is_recent or not all(collective.is_finished for collective in self.under_way)


_former_groups: list[_FormerGroup] = []


def can_use_nccl(world: World, device: torch.device) -> bool:
    """Return whether the ranks exchange tensors by NCCL, which needs a GPU for each rank.

    The groups that are formed after a loss consist of ranks of the first group.
    """
    return device.type == "cuda" and world.ranks_per_node <= torch.cuda.device_count()


def poll_work(work: dist.Work, by_nccl: bool, deadline: float) -> None:
    """Wait a moment for a collective.

    NCCL's own wait would not end with a lost rank. A wait with a time limit would make the
    collective fail for good at that limit.

    Args:
        work: The collective.
        by_nccl: Whether NCCL carries it out.
        deadline: The monotonic time after which a collective of NCCL has timed out.

    Raises:
        PeerLost: After the deadline.
    """
    if by_nccl:
        time.sleep(NCCL_POLL_INTERVAL_S)
        if time.monotonic() > deadline:
            raise PeerLost(
                "timed out: a collective is not done by the time that --timeout gives it"
            )
        return
    with suppress(RuntimeError):  # raised also if it is not done yet
        work.wait(GLOO_POLL_INTERVAL)


def destroy_group(by_nccl: bool, under_way: Collection[_StartedCollective]) -> None:
    """Leave the default group, and keep it until its threads are idle.

    Freeing a group of gloo waits for its threads, which may need the GIL.

    Args:
        by_nccl: Whether the group uses NCCL.
        under_way: The collectives that are under way.

    Raises:
        PeerLost: If NCCL cannot be aborted.
    """
    now = time.monotonic()
    _former_groups.append(_FormerGroup(dist.group.WORLD, list(under_way), now))
    if by_nccl:
        _abort_nccl()
    else:
        with suppress(Exception):
            dist.destroy_process_group()
    _former_groups[:] = [former for former in _former_groups if former.is_in_use(now)]


def _abort_nccl() -> None:
    def abort() -> None:
        with suppress(Exception):
            abort_process_group()

    thread = threading.Thread(target=abort, name="abort", daemon=True)
    thread.start()
    thread.join(NCCL_ABORT_TIMEOUT_S)
    if thread.is_alive() or dist.is_initialized():
        raise PeerLost("NCCL did not let go of the group that a rank was lost from")
