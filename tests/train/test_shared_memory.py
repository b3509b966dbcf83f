"""Collectives through shared memory: what gloo gives, a rank's end noticed, no core used while one
waits.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from ranks import run_ranks
from stepladder.core.world import World
from stepladder.rank.exchange_choice import EXCHANGE_VARIABLE, MEMORY_EXCHANGE
from stepladder.train.comm import Comm
from stepladder.train.sync import make_sync
from stepladder.train.sync.ddp import allocate_shared_zeros
from stepladder_exchange.shared_segment import HALF_BYTES

pytestmark = pytest.mark.ranks

LARGE = HALF_BYTES // 4 + 1000  # numbers that do not fit into a half
DTYPES = torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8


def drawn(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(97 * size + rank)
    return torch.randint(0, 60, (size,), generator=generator).to(dtype)


def scattered(comm: Comm, complete: torch.Tensor) -> torch.Tensor:
    """This rank's slice of the sum; gloo's by an all-reduce."""
    own_part = complete.chunk(comm.world.world_size)[comm.world.rank].clone()
    if comm.shared_memory is None:
        comm.all_reduce(complete).wait()
        return complete.chunk(comm.world.world_size)[comm.world.rank]
    comm.reduce_scatter(own_part, complete, "").wait()
    return own_part


def all_collectives(comm: Comm) -> list[Any]:
    """What every collective leaves, over types and sizes; several are under way at once."""
    assert (comm.shared_memory is not None) == (os.environ[EXCHANGE_VARIABLE] == MEMORY_EXCHANGE)
    size = comm.world.world_size
    rank = comm.world.rank
    results: list[Any] = []
    for length in (0, 1, 17, LARGE):
        sums = [drawn(rank, length, dtype) for dtype in DTYPES]
        pendings = [comm.all_reduce(tensor) for tensor in sums]
        for pending in reversed(pendings):
            pending.wait()
        message = drawn(rank, length, torch.float32)
        comm.broadcast(message, size - 1)
        gathered = torch.empty(size * length)
        comm.all_gather(gathered, drawn(rank, length, torch.float32)).wait()
        sent = drawn(rank, size * length, torch.float32)
        sizes = [length] * size
        received = torch.empty_like(sent)
        comm.all_to_all(received, sent, sizes, sizes).wait()
        results += [*sums, message, gathered, received, scattered(comm, sent)]
    turned = drawn(rank, 24, torch.float32).view(2, 3, 2, 2).to(memory_format=torch.channels_last)
    comm.all_reduce(turned).wait()
    assert len(turned.stride()) == 4 and not turned.is_contiguous()
    lasting = [
        allocate_shared_zeros(comm, LARGE + more, dtype)
        for more, dtype in ((0, torch.float32), (5, torch.int64))
    ]
    for step in range(2):  # they are reduced where they lie
        for tensor in lasting:
            tensor += drawn(rank, len(tensor) + step, tensor.dtype)[step:]
        for pending in [comm.all_reduce(tensor) for tensor in lasting]:
            pending.wait()
    results += lasting
    adding, sums = comm.start_sum([rank, 0.5, True])
    adding.wait()
    assert sums() == [sum(range(size)), size / 2, size]
    args = (
        comm.gather_bytes(bytes([rank]) * 100),
        comm.broadcast_bytes(b"word" if rank == 0 else None),
    )
    return [[item.clone() for item in results], turned.contiguous(), args, comm.exact_mean(rank, 2)]


@pytest.mark.parametrize("world_size", [2, 3])
def test_each_collective_leaves_what_gloo_leaves(world_size: int) -> None:
    shared, by_gloo = (
        run_ranks(all_collectives, world_size, by_gloo=gloo) for gloo in (False, True)
    )
    for ours, theirs in zip(shared, by_gloo, strict=True):
        assert all(map(torch.equal, ours[0], theirs[0])) and len(ours[0]) == 38
        assert torch.equal(ours[1], theirs[1]) and ours[2:] == theirs[2:]


def trees(comm: Comm, lengths: list[int], passes: int) -> list[torch.Tensor]:
    """Sums of numbers that any other order of additions would round otherwise."""
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(length)) for length in lengths])
    sync = make_sync("exact", model, comm, 1)
    rank = comm.world.rank
    size = comm.world.world_size
    first, last = passes * rank // size, passes * (rank + 1) // size
    results = []
    for step in range(3):
        sync.begin(first, last - first, passes)
        for number in range(first, last):
            generator = torch.Generator().manual_seed(100 * step + number)
            loss = sum((p * torch.randn(len(p), generator=generator)).sum() for p in model)
            sync.backward(loss, 1, torch.tensor([float(number)]))
        result = sync.finish(last - first, [rank == 0])
        assert (result.total_count, result.votes, result.extra.tolist()) == (
            passes,
            [True],
            [sum(range(passes))],
        )
        results += [p.grad.clone() for p in model]
        for p in model:
            p.grad = None
    return results


@pytest.mark.parametrize("passes", [5, 8])
def test_the_tree_has_the_same_bits_on_any_number_of_ranks(passes: int) -> None:
    lengths = [7, LARGE, 1, 33]
    alone = trees(Comm(World(), torch.device("cpu")), lengths, passes)
    for world_size, by_gloo in ((2, False), (3, False), (4, False), (3, True)):
        for grads in run_ranks(trees, world_size, lengths, passes, by_gloo=by_gloo):
            assert all(map(torch.equal, grads, alone)), (world_size, by_gloo)
