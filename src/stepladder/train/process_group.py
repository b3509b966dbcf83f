"""The ranks' process group for the length of a block: how it is formed, and how it ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist

from stepladder.core.arguments import validate_arguments
from stepladder.core.errors import InputError
from stepladder.core.waiting import wait_until
from stepladder.core.world import World
from stepladder.rank.error_reporter import REPORT_TIMEOUT_S, is_first_to_report
from stepladder.rank.membership import get_control_channel, get_joining_rank
from stepladder.rank.torch_fixes import get_default_store
from stepladder.train.comm import Comm
from stepladder.train.group_setup import pick_device
from stepladder.train.script_world import get_world_of_script
from stepladder_exchange.torch_fixes_gloo import keep_backward_context_from_gloo, wait_for_gloo

JOINED_KEY = "stepladder/joined"  # in the store: how many ranks have joined the group
JOINED_POLL_INTERVAL_S = 0.01


@validate_arguments
@contextmanager
def process_group(
    world: World | None = None, device: torch.device | None = None, timeout_seconds: float = 600
) -> Iterator[Comm]:
    """Join the ranks' process group for the length of the block.

    The group uses gloo on CPUs, and NCCL on GPUs with gloo beside it for values on the host. If
    several ranks share a GPU, it uses gloo only, since NCCL refuses them. A group that the calling
    script has made already is used as it is, and not ended.

    The group is destroyed at the end of the block, but not after an error: that would wait, up to
    the timeout, for collectives that other ranks will not join. The error must leave the block, and
    this process must end.

    Args:
        world: The ranks; by default those that the environment describes, `World.detect()`.
        device: The device of this rank; by default its GPU, or the CPU if there is none.
        timeout_seconds: How long a collective waits for ranks that do not come.

    Yields:
        The collectives of the group.

    Raises:
        InputError: If the environment describes the ranks incompletely.
        PeerLost: In the block, if another rank was lost.
    """
    # Gradients are added within backward, and the process may end right after it.
    keep_backward_context_from_gloo()
    if dist.is_initialized():
        world = get_world_of_script()
        yield Comm(world, device or pick_device("auto", world))
        wait_for_gloo()
        return
    world = world or World.detect()
    device = device or pick_device("auto", world)
    comm = Comm(world, device, timeout_seconds=timeout_seconds)
    launcher = get_control_channel()
    number = get_joining_rank()
    if number is not None:  # other ranks train already, and form a group with this one later
        comm.members = [number]
    elif not comm.alone:
        comm.init_process_group(timeout_seconds)
        _count_joined(1)
        if launcher is not None:
            launcher.report_joined()
    elif launcher is None:  # no other rank can ever join
        yield comm
        return
    with _end_together(comm):
        yield comm


@contextmanager
def _end_together(comm: Comm) -> Iterator[None]:
    """End the group after the block, at the same time on all ranks."""
    try:
        yield
    except InputError as error:  # in most cases all ranks raise it at the same point
        if not dist.is_initialized():  # the other ranks were lost
            raise
        error.set_reporter(_end_after_all_joined(error, comm.world))
        dist.destroy_process_group()
        raise
    with suppress(Exception):  # a group that has failed has closed its connections already
        # All ranks end together: gloo may abort a rank whose peers have ended.
        comm.all_reduce(torch.zeros(1)).wait()
    comm.leave_shared_memory()
    with suppress(Exception):
        dist.destroy_process_group()
    wait_for_gloo()


def _end_after_all_joined(error: InputError, world: World) -> bool:
    """Wait until all ranks have joined, and return whether this rank prints the error.

    gloo reports an error of its own if a rank ends while another one joins.

    Returns:
        True if this rank is the first to report the error.
    """
    with suppress(RuntimeError):  # the store has ended already
        wait_until(
            lambda: _count_joined() >= world.world_size,
            REPORT_TIMEOUT_S,
            poll_s=JOINED_POLL_INTERVAL_S,
        )
    return is_first_to_report(str(error), get_default_store(), world)


def _count_joined(more: int = 0) -> int:
    """Add to the number of ranks that have joined the group, and return it."""
    count: int = get_default_store().add(JOINED_KEY, more)
    return count
