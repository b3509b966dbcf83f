"""Other answers to "how many ranks are there?", for code of a job that must not depend on them.

With `--sync exact` a job is what it is on one process. Its `build` is told that there is one; the
first microbatch is computed again as if there were twice as many ranks, which must change nothing.
Its own collectives are refused.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType

import torch.distributed as dist

from stepladder.core.errors import InputError
from stepladder.core.world import LAUNCHERS, TORCHRUN
from stepladder.rank.torch_fixes_groups import calling_before_collectives
from stepladder.train.layout.base import StateLayout

# Modules that call collectives in a pass of the job.
COLLECTIVE_CALLERS = (
    "stepladder.train.comm",
    "stepladder.train.layout.fsdp",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
)
SIZES = {name for each in LAUNCHERS for name in (each.world_size, each.ranks_per_node)}


@contextmanager
def pretend_one_rank() -> Iterator[None]:
    """Have variables and torch.distributed answer that there is one rank.

    The number of this rank stays, by which a job prints on rank 0 alone.
    """
    variables = dict.fromkeys(SIZES & os.environ.keys(), "1")
    is_initialized = dist.is_initialized
    dist.is_initialized = lambda: False
    try:
        with _answer(variables, lambda group=None: 1, dist.get_rank):
            yield
    finally:
        dist.is_initialized = is_initialized


@contextmanager
def pretend_more_ranks() -> Iterator[None]:
    """Have variables and torch.distributed answer as on a rank of a group of twice as many."""
    size = int(os.environ.get(TORCHRUN.world_size, 1))
    rank = int(os.environ.get(TORCHRUN.rank, 0))
    variables = {TORCHRUN.world_size: str(2 * size), TORCHRUN.rank: str(rank + size)}
    get_size = dist.get_world_size
    get_rank = dist.get_rank
    with _answer(
        variables,
        lambda group=None: 2 * get_size(group),
        lambda group=None: get_rank(group) + get_size(group),
    ):
        yield


def refuse_collectives() -> AbstractContextManager[None]:
    """Refuse collectives of the job in the block: their result depends on the number of ranks."""
    return calling_before_collectives(_validate_caller)


@contextmanager
def isolate_job(layout: StateLayout, sync: str) -> Iterator[None]:
    """Refuse in the block what the loss and the metrics of a job must not use."""
    collectives: AbstractContextManager[None] = nullcontext()
    if sync == "exact" and not layout.comm.alone:
        collectives = refuse_collectives()
    with layout.hiding_state(), collectives:
        yield


def _validate_caller(collective: FrameType) -> None:
    """Raise InputError unless the trainer, or fully_shard, has called a collective."""
    caller: FrameType | None = collective
    while caller is not None:
        module = caller.f_globals.get("__name__", "")
        if module.startswith(COLLECTIVE_CALLERS):
            return
        if module.startswith("stepladder."):
            raise InputError(
                f"--sync exact: the job calls torch.distributed.{collective.f_code.co_name} in its"
                " loss, data or metrics, which depend on the number of processes then",
                "return a sum and a count, which the trainer adds over processes; or --sync ddp",
            )
        caller = caller.f_back


@contextmanager
def _answer(
    variables: dict[str, str], get_size: Callable[..., int], get_rank: Callable[..., int]
) -> Iterator[None]:
    """Replace variables and torch.distributed's functions in the block."""
    before = {name: os.environ.get(name) for name in variables}
    get_own_size = dist.get_world_size
    get_own_rank = dist.get_rank
    os.environ.update(variables)
    dist.get_world_size = get_size
    dist.get_rank = get_rank
    try:
        yield
    finally:
        dist.get_world_size = get_own_size
        dist.get_rank = get_own_rank
        for name, value in before.items():
            if os.environ.get(name) != variables[name]:
                continue  # the job has changed it
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
