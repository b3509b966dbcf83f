"""Each collective of the shared process group beside gloo's, in the same ranks; its order and its futures."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import stepladder_exchange
from exchange_ranks import run_ranks
from stepladder_exchange.process_group import SharedMemoryGroup
from stepladder_exchange.shared_segment import HALF_BYTES

SIZES = (0, 1, 17, HALF_BYTES // 4 + 1000)  # the last does not fit into a half of a slot
FLOATS = torch.float32, torch.float64, torch.float16, torch.bfloat16
INTEGERS = torch.uint8, torch.int8, torch.int32, torch.int64
OPERATIONS = [getattr(dist.ReduceOp, name) for name in ("SUM", "PRODUCT", "MIN", "MAX")]
BITS = [getattr(dist.ReduceOp, name) for name in ("BAND", "BOR", "BXOR")]
assert stepladder_exchange  # registers the back end


def drawn(rank: int, shape: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small whole numbers: their sums and products are exact in any order."""
    generator = torch.Generator().manual_seed(1000 + rank)
    return torch.randint(1, 4, torch.Size(shape), generator=generator).to(dtype)


def reduced(group: Any, rank: int) -> list[torch.Tensor]:
    results = []
    for size in SIZES:
        for operation in OPERATIONS:
            for dtype in FLOATS + INTEGERS:
                tensor = drawn(rank, [size], dtype)
                dist.all_reduce(tensor, operation, group)
                results.append(tensor)
        for operation in BITS:
            for dtype in INTEGERS:
                tensor = drawn(rank, [size], dtype)
                dist.all_reduce(tensor, operation, group)
                results.append(tensor)
    truth = torch.tensor([rank == 0, True])
    dist.all_reduce(truth, dist.ReduceOp.MAX, group)
    wave = torch.complex(drawn(rank, [3]), drawn(rank, [3]))
    dist.all_reduce(wave, group=group)
    return [*results, truth, wave]


def turned(group: Any, rank: int) -> list[torch.Tensor]:
    """Tensors that do not lie in one row, and one that autograd watches."""
    columns = drawn(rank, [4, 6]).t()  # gloo takes no account of gaps between columns
    dist.all_reduce(columns, group=group)
    image = drawn(rank, [2, 3, 2, 2]).to(memory_format=torch.channels_last)
    dist.broadcast(image, 0, group)
    rows = [torch.zeros(6, 4).t() for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, drawn(rank, [6, 4]).t(), group)
    weight = torch.nn.Parameter(drawn(rank, [3]))
    with torch.no_grad():
        dist.broadcast(weight, 1, group)
    return [columns, image, *rows, weight.detach()]


def spread(group: Any, rank: int) -> list[torch.Tensor]:
    size = dist.get_world_size(group)
    results = []
    for length in SIZES:
        for dtype in (torch.float32, torch.int64, torch.bool):
            message = drawn(rank, [length], dtype)
            dist.broadcast(message, size - 1, group)
            parts = [torch.zeros(length, dtype=dtype) for _ in range(size)]
            dist.all_gather(parts, drawn(rank, [length], dtype), group)
            whole = torch.zeros(size * length, dtype=dtype)
            dist.all_gather_into_tensor(whole, drawn(rank, [length], dtype), group)
            results += [message, *parts, whole]
    return results


def scattered(group: Any, rank: int) -> list[torch.Tensor]:
    """What is on one rank before or after, and what each rank has a part of."""
    size = dist.get_world_size(group)
    results = []
    for length in SIZES:
        summed = drawn(rank, [length])
        dist.reduce(summed, size - 1, dist.ReduceOp.MAX, group)
        results += [summed] if rank == size - 1 else []
        parts = [torch.zeros(length) for _ in range(size)] if rank == 1 else None
        dist.gather(drawn(rank, [length]), parts, 1, group)
        results += parts or []
        own = torch.zeros(length)
        dist.scatter(
            own, [drawn(n, [length]) for n in range(size)] if rank == 0 else None, 0, group
        )
        slices = drawn(rank, [size * length])
        piece = torch.zeros(length)
        dist.reduce_scatter_tensor(piece, slices, group=group)
        listed = torch.zeros(length)
        dist.reduce_scatter(listed, list(slices.chunk(size)), dist.ReduceOp.PRODUCT, group)
        results += [own, piece, listed]
    return results


def transposed(group: Any, rank: int) -> list[torch.Tensor]:
    size = dist.get_world_size(group)
    results = []
    for length in SIZES:
        received = torch.zeros(size * length)
        dist.all_to_all_single(received, drawn(rank, [size * length]), group=group)
        results.append(received)
    sent = [(rank + 2 * peer) % 4 for peer in range(size)]
    expected = [(peer + 2 * rank) % 4 for peer in range(size)]
    uneven = torch.zeros(sum(expected), 3)
    dist.all_to_all_single(uneven, drawn(rank, [sum(sent), 3]), expected, sent, group)
    half_even = torch.zeros(2 * size)  # torch takes no list of lengths for equal ones
    lengths = [2] * size if rank else None
    dist.all_to_all_single(half_even, drawn(rank, [2 * size]), lengths, lengths, group)
    return [*results, uneven, half_even]


def coalesced(group: Any, rank: int) -> list[torch.Tensor]:
    tensors = [drawn(rank, [length]) for length in (5, SIZES[-1], 4, 2 * SIZES[-1])]
    with dist._coalescing_manager(group):
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
    outputs = [torch.zeros(dist.get_world_size(group) * 3) for _ in range(2)]
    with dist._coalescing_manager(group):
        for number, output in enumerate(outputs):
            dist.all_gather_into_tensor(output, drawn(rank, [3]) + number, group)
    pieces = [torch.zeros(3) for _ in range(2)]
    with dist._coalescing_manager(group):
        for piece, output in zip(pieces, outputs, strict=True):
            dist.reduce_scatter_tensor(piece, output, group=group)
    return [*tensors, *outputs, *pieces]


def objects(group: Any, rank: int) -> list[Any]:
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, {"rank": rank}, group)
    words = ["a word" if rank == 0 else None]
    dist.broadcast_object_list(words, 0, group)
    on_one: list[Any] = [None] * len(gathered)
    dist.gather_object(("a", rank), on_one if rank == 1 else None, 1, group)
    scattered: list[Any] = [None]
    dist.scatter_object_list(scattered, [{number} for number in range(len(gathered))], 0, group)
    passed = [("from", rank), None]
    if rank == 0:
        dist.send_object_list(passed, 1, group)
    elif rank == 1:
        dist.recv_object_list(passed, 0, group)
    return [gathered, words, on_one, scattered, passed]


def messages(group: Any, rank: int) -> list[torch.Tensor]:
    """Around a ring, from anywhere to the first rank, and both ways between two at once."""
    size = dist.get_world_size(group)
    after = (rank + 1) % size
    before = (rank - 1) % size
    results = []
    for length in SIZES:
        came = torch.zeros(2, length)
        works = [dist.isend(drawn(rank, [length]) + tag, after, group, tag) for tag in range(2)]
        works += [dist.irecv(came[tag], before, group, tag) for tag in (1, 0)]
        assert all(work.wait() for work in works if work is not None)
        results.append(came)
    sums = torch.zeros(2)
    if rank:
        dist.send(torch.tensor([1.0, float(rank)]), 0, group, tag=7)
    else:
        for _ in range(1, size):
            came = torch.zeros(2)
            source = dist.recv(came, group=group, tag=7)
            assert came.tolist() == [1.0, source]
            sums += came
    both = torch.zeros(3)
    swap = [
        dist.P2POp(dist.irecv, both, before, group),
        dist.P2POp(dist.isend, drawn(rank, [3]), after, group),
    ]
    for work in dist.batch_isend_irecv(swap):
        work.wait()
    return [*results, sums, both]


def through_gloo(group: Any, rank: int) -> list[torch.Tensor]:
    sparse = torch.eye(3).to_sparse() * (rank + 1)
    dist.all_reduce(sparse, group=group)
    return [sparse.to_dense()]


needs_numpy = pytest.mark.skipif(
    find_spec("numpy") is None, reason="torch's collectives of objects need numpy, also on gloo"
)


def beside_gloo(collective: Callable[[Any, int], list[Any]]) -> tuple[Any, Any]:
    shared = dist.new_group(backend="stepladder")
    gloo = dist.new_group(backend="gloo")
    assert isinstance(shared, SharedMemoryGroup)
    assert shared.is_shared, shared.obstacle
    results = [collective(group, dist.get_rank()) for group in (shared, gloo)]
    dist.barrier(shared)
    dist.destroy_process_group(shared)
    return results[0], results[1]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    "collective",
    [
        *(reduced, turned, spread, scattered, transposed, coalesced, through_gloo),
        pytest.param(objects, marks=needs_numpy),
        messages,
    ],
)
def test_each_collective_leaves_what_gloo_leaves(
    collective: Callable[[Any, int], list[Any]], world_size: int
) -> None:
    for ours, theirs in run_ranks(beside_gloo, world_size, collective):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def lists_transposed() -> list[list[float]]:
    """gloo has no all-to-all of lists."""
    group = dist.new_group(backend="stepladder")
    rank = dist.get_rank()
    size = dist.get_world_size(group)
    outputs = [torch.zeros(peer + rank) for peer in range(size)]
    parts = [torch.full((peer + rank,), 10.0 * rank + peer) for peer in range(size)]
    dist.all_to_all(outputs, parts, group)
    with pytest.raises(RuntimeError, match="sends 1 numbers to rank 0, which expects 2"):
        wrong = [2 if rank == 0 else 1] * size
        dist.all_to_all_single(torch.zeros(sum(wrong)), torch.zeros(size), wrong, None, group)
    return [output.tolist() for output in outputs]


def test_lists_of_any_lengths_are_transposed() -> None:
    expected = [[[10.0 * peer + rank] * (peer + rank) for peer in range(3)] for rank in range(3)]
    assert run_ranks(lists_transposed, 3) == expected


def sums_of_random_numbers(length: int) -> tuple[bool, bool]:
    """Whether a sum is the one in rank order, and whether it is gloo's."""
    size = dist.get_world_size()
    rank = dist.get_rank()
    shared = dist.new_group(backend="stepladder")
    gloo = dist.new_group(backend="gloo")
    addends = [torch.randn(length, generator=torch.Generator().manual_seed(r)) for r in range(size)]
    in_rank_order = addends[0].clone()
    for addend in addends[1:]:
        in_rank_order += addend
    ours = addends[rank].clone()
    theirs = addends[rank].clone()
    dist.all_reduce(ours, group=shared)
    dist.all_reduce(theirs, group=gloo)
    return torch.equal(ours, in_rank_order), torch.equal(ours, theirs)


@pytest.mark.parametrize("length", [5000, SIZES[-1] + 1, 2_500_003])  # the last in several chunks
def test_sums_are_added_in_rank_order_which_is_gloos_for_two_ranks(length: int) -> None:
    assert run_ranks(sums_of_random_numbers, 2, length) == [(True, True)] * 2
    assert [in_order for in_order, _ in run_ranks(sums_of_random_numbers, 3, length)] == [True] * 3


def futures() -> list[Any]:
    """All are started before one of them is waited for, in the other order on the second rank."""
    group = dist.new_group(backend="stepladder")
    rank = dist.get_rank()
    tensors = [torch.full((3,), float(rank + number)) for number in range(20)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    assert all(work is not None for work in works)
    doubled = works[7].get_future().then(lambda future: future.value()[0] * 2)
    for work in reversed(works) if rank else works:
        assert work.wait() and work.is_completed()
    return [torch.stack(tensors).sum().item(), doubled.wait().tolist()]


def test_collectives_are_started_and_waited_for_later() -> None:
    expected = [sum(3.0 * (2 * number + 1) for number in range(20)), [30.0] * 3]
    assert run_ranks(futures, 2) == [expected] * 2


def crossed() -> float:
    """A rank that starts a collective and sends, beside one that first receives."""
    group = dist.new_group(backend="stepladder")
    token = torch.tensor([5.0])
    total = torch.ones(2)
    if dist.get_rank() == 0:
        work = dist.all_reduce(total, group=group, async_op=True)
        dist.send(token, 1, group)
        work.wait()
    else:
        token.zero_()
        dist.recv(token, 0, group)
        dist.all_reduce(total, group=group)
    return (token + total.sum()).item()


def test_an_asynchronous_collective_does_not_keep_its_caller() -> None:
    assert run_ranks(crossed, 2) == [9.0] * 2


def late() -> str:
    group = dist.new_group(backend="stepladder", timeout=timedelta(seconds=0.3))
    message = ""
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError) as caught:
            dist.all_reduce(torch.ones(2), group=group)
        message = str(caught.value)
        with pytest.raises(RuntimeError, match="did not arrive"):  # the group is of no more use
            dist.barrier(group)
    dist.barrier()
    return message


def test_a_timeout_names_the_ranks_that_are_missing() -> None:
    assert run_ranks(late, 3)[0] == (
        "timed out: rank 1, rank 2 did not arrive in 0.3 s, the timeout of the group"
    )


def pairs() -> list[float]:
    """Groups of two of three ranks, whose messages have the numbers of all ranks."""
    rank = dist.get_rank()
    groups = [dist.new_group(list(ranks), backend="stepladder") for ranks in ((0, 2), (1, 2))]
    results = []
    for group, ranks in zip(groups, ((0, 2), (1, 2)), strict=True):
        if rank in ranks:
            tensor = torch.tensor([float(rank)])
            dist.all_reduce(tensor, group=group)
            results.append(tensor.item())
    if rank == 0:
        dist.destroy_process_group(groups[0])
    dist.barrier()
    if rank == 2:
        with pytest.raises(RuntimeError, match="rank 0 has gone"):
            dist.all_reduce(torch.ones(1), group=groups[0])
    return results


def test_groups_of_some_ranks_name_ranks_as_all_do() -> None:
    assert run_ranks(pairs, 3) == [[2.0], [3.0], [2.0, 3.0]]


def gone_in_turn() -> str:
    """A rank leaves; a second one fails for it, and leaves; then a third one comes."""
    group = dist.new_group(backend="stepladder")
    dist.barrier(group)
    message = ""
    for leaving in (1, 0, 2):
        if dist.get_rank() == leaving:
            if leaving != 1:
                with pytest.raises(RuntimeError) as caught:
                    dist.barrier(group)
                message = str(caught.value)
            dist.destroy_process_group(group)
        dist.barrier()
    return message


def test_who_comes_late_hears_of_the_rank_that_was_lost_first() -> None:
    assert run_ranks(gone_in_turn, 3) == ["rank 1 has gone", "", "rank 1 has gone"]


def left_over() -> int:
    """Mappings that are there after groups, and were not before; threads would be waited for."""

    def count_mappings() -> int:
        gc.collect()
        return Path("/proc/self/maps").read_text().count("memfd:stepladder")

    threads = {*threading.enumerate()}
    mappings = count_mappings()
    for _round in range(3):
        group = dist.new_group(backend="stepladder")
        works = [dist.all_reduce(torch.ones(3), group=group, async_op=True) for _ in range(3)]
        for work in works:
            work.wait()
        dist.barrier(group)
        dist.destroy_process_group(group)
        for thread in {*threading.enumerate()} - threads:
            thread.join()
        del group, works
    return count_mappings() - mappings


def test_nothing_is_left_of_a_group_that_was_destroyed() -> None:
    assert run_ranks(left_over, 2) == [0, 0]


def forked() -> str:
    """What a child that is no rank gets when it calls a collective."""
    group = dist.new_group(backend="stepladder")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            dist.all_reduce(torch.ones(1), group=group)
        except RuntimeError as error:
            os.write(writer, str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    assert total.item() == 2
    return os.read(reader, 1000).decode()


def test_a_child_that_a_rank_forks_cannot_disturb_the_group() -> None:
    for message in run_ranks(forked, 2):
        assert "was forked from process" in message
