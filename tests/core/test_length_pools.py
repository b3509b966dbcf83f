"""Batches of similar lengths: every sample once per epoch, the same ones on any number of ranks."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stepladder import Plan
from stepladder.core.order import Chunks, IndexArray


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any plan of batches of similar lengths, in memory and in files."""
    microbatch = draw(st.integers(2, 5))
    sizes = draw(st.lists(st.integers(2, 60), min_size=1, max_size=4))
    chunks = Chunks(tuple((rows, draw(st.integers(1, 12))) for rows in sizes), slots=16)
    return Plan(
        sum(sizes),
        microbatch * draw(st.integers(1, 4)),
        microbatch,
        draw(st.integers(0, 2**40)),
        draw(st.sampled_from((1, 2))),
        chunks=draw(st.sampled_from((chunks, None))),
        by_length=True,
    )


def read_steps(plan: Plan, epoch: int) -> list[IndexArray]:
    first = epoch * plan.steps_per_epoch
    return [plan.indices_of_rank(first + step, 0, 1) for step in range(plan.steps_per_epoch)]


@given(plans(), st.integers(0, 3), st.integers(1, 5))
def test_an_epoch_has_every_sample_once_on_any_number_of_ranks(
    plan: Plan, epoch: int, world_size: int
) -> None:
    batches = read_steps(plan, epoch)
    assert sorted(np.concatenate(batches).tolist()) == list(range(plan.num_samples))
    assert plan.order(epoch).tolist() == np.concatenate(batches).tolist()
    again = Plan.from_json(plan.as_json())
    for step in reversed(range(plan.steps_per_epoch)):  # as after a resume
        shares = [
            again.indices_of_rank(epoch * plan.steps_per_epoch + step, rank, world_size)
            for rank in range(world_size)
        ]
        assert np.concatenate(shares).tolist() == batches[step].tolist()


def test_a_batch_has_neighbours_of_the_order_by_length_and_every_epoch_others() -> None:
    plan = Plan(4096, 32, 1, by_length=True)
    batches = read_steps(plan, 0)
    spread = [batch.max() - batch.min() for batch in batches]
    assert np.mean(spread) < 4096 / 16
    assert all((np.diff(batch) > 0).all() for batch in batches), "the shortest sample is first"
    middles = [batch[16] for batch in batches]
    assert abs(np.corrcoef(middles[1:], middles[:-1])[0, 1]) < 0.4, "lengths come in random order"
    known = {tuple(batch.tolist()) for batch in batches}
    assert not known & {tuple(batch.tolist()) for batch in read_steps(plan, 1)}


def test_of_samples_in_chunks_those_at_like_places_make_a_batch() -> None:
    chunks = Chunks(((4096, 256),), slots=64)
    for batch in read_steps(Plan(4096, 32, 1, chunks=chunks, by_length=True), 0):
        places = batch % 256
        assert places.max() - places.min() < 40
        assert len(set((batch // 256).tolist())) > 4


def test_few_chunks_are_read_twice() -> None:
    plan = Plan(4000, 64, 1, chunks=Chunks(((4000, 10),), slots=64), by_length=True)
    in_memory: dict[int, None] = {}
    loads = 0
    for batch in read_steps(plan, 0):
        for chunk in np.unique(batch // 10).tolist():
            loads += chunk not in in_memory
            in_memory.pop(chunk, None)
            in_memory[chunk] = None
            if len(in_memory) > 64:
                del in_memory[next(iter(in_memory))]
    assert loads < 600  # of 400 chunks


def test_without_the_last_samples_every_batch_has_one_size() -> None:
    plan = Plan(103, 10, 1, by_length=True, drop_last=True)
    batches = read_steps(plan, 0)
    assert [len(batch) for batch in batches] == [10] * 10
    assert len(set(np.concatenate(batches).tolist())) == 100
