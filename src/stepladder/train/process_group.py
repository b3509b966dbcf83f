"""The ranks' process group, for the length of a block: how it comes about, and how they leave it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist

from stepladder.core.errors import InputError
from stepladder.core.numbers import number_in
from stepladder.core.world import World
from stepladder.rank.membership import joins, wire
from stepladder.rank.refusal import SECONDS_TO_LEAVE, says_it
from stepladder.rank.torch_fixes import (
    get_default_store,
    keep_backward_context_from_gloo,
    wait_for_gloo,
)
from stepladder.train.comm import Comm
from stepladder.train.group_setup import pick_device


@contextmanager
def process_group(
    world: World | None = None, device: torch.device | None = None, timeout_seconds: float = 600
) -> Iterator[Comm]:
    """The ranks' process group for the length of the block; its `Comm` is the block's value.

    world: by default as the environment says, `World.detect()`.  device: by default this rank's
    GPU, or the CPU where there is none.  timeout_seconds: how long a collective waits for ranks
    that do not come. Raises InputError where the environment is half set, and in the block PeerLost
    where another rank has gone.

    Destroyed at its end, but not after an error: that would wait, up to the timeout, for
    collectives that ranks have begun and others will not join. The error must get out, and this
    process end.

    gloo on CPU; NCCL on CUDA, with gloo beside it for host values. Several ranks on one GPU: gloo
    only, since NCCL refuses them. A group that the caller's script has made already is used as it
    is, and left."""
    # gradients are added within backward, and the process may end right after it
    keep_backward_context_from_gloo()
    if dist.is_initialized():
        adopted = _world_of_the_script()
        yield Comm(adopted, device or pick_device("auto", adopted))
        wait_for_gloo()
        return
    world = world or World.detect()
    device = device or pick_device("auto", world)
    comm = Comm(world, device, timeout_seconds=timeout_seconds)
    if (number := joins()) is not None:
        comm.members = [number]
    elif comm.alone and wire() is None:  # else others may join it
        yield comm
        return
    elif not comm.alone:
        comm.init_process_group(timeout_seconds)
        _count("joined", 1)
        if (launcher := wire()) is not None:
            launcher.say_met()
    with _left_together(comm):
        yield comm


@contextmanager
def _left_together(comm: Comm) -> Iterator[None]:
    try:
        yield
    except InputError as error:  # mostly all ranks have it at the same place
        if not dist.is_initialized():  # the others have gone
            raise
        error.speaks = _leave_after_all(error, comm.world)
        dist.destroy_process_group()
        raise
    with suppress(Exception):  # one that has failed has closed its connections already
        comm.all_reduce(
            torch.zeros(1)
        ).wait()  # all leave together: gloo may abort a rank whose peers have gone
    comm.leave_shared_memory()
    with suppress(Exception):
        dist.destroy_process_group()
    wait_for_gloo()


def _leave_after_all(error: InputError, world: World) -> bool:
    """Whether this rank says it. gloo complains of a rank that goes while another one joins."""
    end = time.monotonic() + SECONDS_TO_LEAVE
    with suppress(RuntimeError):  # the store is gone already
        while _count("joined") < world.world_size and time.monotonic() < end:
            time.sleep(0.01)
    return says_it(str(error), get_default_store(), world)


def _count(what: str, more: int = 0) -> int:
    """How many ranks have joined the group, with so many more."""
    count: int = get_default_store().add(f"stepladder/{what}", more)
    return count


def _world_of_the_script() -> World:
    """Who this process is in a group that is there already."""
    return World(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        local_rank=number_in(os.environ, "LOCAL_RANK", dist.get_rank()),
        ranks_per_node=number_in(os.environ, "LOCAL_WORLD_SIZE", dist.get_world_size()),
        source="the script's own process group",
    )
