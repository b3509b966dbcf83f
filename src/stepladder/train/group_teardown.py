"""How a rank waits in a process group that may break, and how it leaves it.

gloo: work that is under way ends in its own time, as connections end. NCCL: its kernels may wait
for a lost rank for ever, so its communicators are aborted (torch.distributed's
`_abort_process_group`), and the errors of a collective come to who waits for it instead of ending
the process (TORCH_NCCL_ASYNC_ERROR_HANDLING=0 and TORCH_NCCL_BLOCKING_WAIT=1 in torch's
"ProcessGroupNCCL Environment Variables")."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from stepladder.core.errors import PeerLost
from stepladder.core.world import World
from stepladder.rank.torch_fixes import abort_process_group

GLOO_POLL_INTERVAL = timedelta(seconds=0.05)
NCCL_POLL_INTERVAL_S = 5e-5
MIN_GROUP_LIFETIME_S = 10.0  # for gloo's threads of a group that was left, at least
NCCL_ABORT_TIMEOUT_S = 20.0  # NCCL's own abort may wait for a card that does not answer
NCCL_ERRORS_RAISE = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_BLOCKING_WAIT": "1"}


class Started(Protocol):
    """A collective under way."""

    @property
    def is_finished(self) -> bool: ...


_former: list[
    tuple[Any, list[Started], float]
] = []  # groups that were left, with what was under way, and when


def can_use_nccl(world: World, device: torch.device) -> bool:
    """Whether ranks reduce by NCCL, which wants a card for each. Later groups are parts of the
    first.
    """
    return device.type == "cuda" and world.ranks_per_node <= torch.cuda.device_count()


def poll_work(work: dist.Work, by_nccl: bool, until: float) -> None:
    """For a collective. until: raises PeerLost after that monotonic time, where nobody else would.

    NCCL's own wait would not end with a lost rank, and one with a time limit fails for good when
    that is over."""
    if by_nccl:
        time.sleep(NCCL_POLL_INTERVAL_S)
        if time.monotonic() > until:
            raise PeerLost(
                "timed out: a collective is not done by the time that --timeout gives it"
            )
        return
    with suppress(RuntimeError):  # also that it took too long so far
        work.wait(GLOO_POLL_INTERVAL)


def destroy_group(by_nccl: bool, under_way: Collection[Started]) -> None:
    """The default group. Whoever frees gloo's waits for its threads, which may need the GIL: not
    before they rest.

    Raises PeerLost where NCCL cannot be left.
    """
    now = time.monotonic()
    _former.append((dist.group.WORLD, list(under_way), now))
    if by_nccl:
        _abort()
    else:
        with suppress(Exception):
            dist.destroy_process_group()
    _former[:] = [
        (group, left, then)
        for group, left, then in _former
        if now - then < MIN_GROUP_LIFETIME_S or not all(one.is_finished for one in left)
    ]


def _abort() -> None:
    def end() -> None:
        with suppress(Exception):
            abort_process_group()

    thread = threading.Thread(target=end, name="abort", daemon=True)
    thread.start()
    thread.join(NCCL_ABORT_TIMEOUT_S)
    if thread.is_alive() or dist.is_initialized():
        raise PeerLost("NCCL did not let go of the group that a rank was lost from")
