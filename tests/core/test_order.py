"""The order of data in files: each row once per epoch, chunk by chunk, whoever reads it."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepladder import Plan
from stepladder.core.order import Chunks, IndexArray, StreamOrder, make_permutation
from stepladder.core.plan import fuse_spans

CHUNKS = Chunks(((40, 8), (40, 8), (23, 8)), slots=16)  # 13 chunks, the last of 7 rows


def stream_plan(seed: int = 0) -> Plan:
    return Plan(103, 12, 3, seed, chunks=CHUNKS)


@st.composite
def stream_plans(draw: st.DrawFn) -> Plan:
    """Any plan of data in shards of any sizes, with and without batch norm."""
    microbatch = draw(st.integers(1, 9))
    count = draw(st.integers(1, 8))
    min_microbatch = draw(st.sampled_from((1, 2))) if microbatch > 1 else 1
    sizes = draw(
        st.lists(st.integers(1, 60), min_size=1, max_size=4).filter(
            lambda sizes: sum(sizes) >= min_microbatch
        )
    )
    shards = tuple((rows, draw(st.integers(1, 12))) for rows in sizes)
    chunks = Chunks(shards, draw(st.integers(1, 64)))
    return Plan(
        sum(sizes),
        microbatch * count,
        microbatch,
        draw(st.integers(0, 2**40)),
        min_microbatch,
        chunks,
    )


@pytest.mark.parametrize(
    ("shards", "slots", "rows", "expected"),
    [
        (((24, 6),), 8, 24, True),
        (((24, 6), (0, 1)), 1, 24, True),
        (((24, 6),), 8, 23, False),
        (((24, 6),), 0, 24, False),
        (((24, 0),), 8, 24, False),
        (((-1, 6), (25, 6)), 8, 24, False),
    ],
)
def test_chunks_hold_a_number_of_rows(
    shards: tuple[tuple[int, int], ...], slots: int, rows: int, expected: bool
) -> None:
    assert Chunks(shards, slots).can_hold(rows) is expected


@given(stream_plans(), st.integers(0, 3))
def test_an_epoch_has_every_row_once(plan: Plan, epoch: int) -> None:
    assert sorted(plan.order(epoch).tolist()) == list(range(plan.num_samples))


@given(stream_plans(), st.integers(1, 8))
def test_shares_of_any_number_of_ranks_make_the_same_batches(plan: Plan, world_size: int) -> None:
    for step in range(2 * plan.steps_per_epoch):
        lo, hi = plan.batch(step)
        batch_order = plan.order(step // plan.steps_per_epoch)[lo:hi].tolist()
        shares = [
            plan.indices(step, s)
            for r in range(world_size)
            for s in plan.share(step, r, world_size)
        ]
        fused = [
            plan.indices(step, s)
            for r in range(world_size)
            for s in fuse_spans(plan.share(step, r, world_size))
        ]
        assert np.concatenate(shares).tolist() == np.concatenate(fused).tolist() == batch_order


def test_a_rank_reads_only_its_part_of_the_chunks() -> None:
    plan = Plan(8000, 80, 10, chunks=Chunks(((8000, 10),), slots=64))
    assert plan.stream is not None and plan.stream.num_lanes == 8
    read = [
        {
            int(row) // 10
            for step in range(plan.steps_per_epoch)
            for span in plan.share(step, rank, 4)
            for row in plan.indices(step, span)
        }
        for rank in range(4)
    ]
    assert sum(map(len, read)) <= 800 + 4 * 2 * plan.stream.chunks_per_window, (
        "chunks at a lane's ends are shared"
    )


def test_few_chunks_are_open_at_a_time() -> None:
    plan = Plan(8000, 80, 10, chunks=Chunks(((8000, 10),), slots=32))
    assert plan.stream is not None
    for step in range(0, plan.steps_per_epoch - 1):
        rows = np.concatenate(
            [plan.indices(s, span) for s in (step, step + 1) for span in plan.microbatches(s)]
        )
        assert len(np.unique(rows // 10)) <= 32


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_with_few_slots_one_chunk_is_read_after_the_other(slots: int) -> None:
    order = Plan(80, 8, 4, chunks=Chunks(((80, 10),), slots)).order(0)
    assert np.count_nonzero(np.diff(order // 10)) == 7


@pytest.mark.parametrize(("slots", "lanes"), [(1, 1), (8, 2), (12, 2), (16, 4), (1024, 8)])
def test_a_lane_has_four_slots_or_more(slots: int, lanes: int) -> None:
    """And there are no more lanes than microbatches, nor more than 64."""
    chunks = Chunks(((7680, 10),), slots)
    stream = Plan(7680, 80, 10, chunks=chunks).stream
    assert stream is not None and stream.num_lanes == lanes
    stream = Plan(7680, 128, 1, chunks=chunks).stream
    assert stream is not None and (stream.num_lanes == 64) == (slots == 1024)


@pytest.mark.parametrize(("rows_per_chunk", "shared"), [(12, 0), (11, 7)])
def test_a_window_is_made_once_for_each_lane_that_reads_of_it(
    rows_per_chunk: int, shared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where all lanes come to the next one in the same step. shared: windows at the end of one
    lane and the beginning of the next, which are read too far apart to be kept so long."""
    made: list[tuple[int, int]] = []
    make_window = StreamOrder._make_window

    def counting(order: StreamOrder, epoch: int, number: int) -> IndexArray:
        made.append((epoch, number))
        return make_window(order, epoch, number)

    monkeypatch.setattr(StreamOrder, "_make_window", counting)
    plan = Plan(7680, 80, 10, chunks=Chunks(((7680, rows_per_chunk),), slots=64))
    assert plan.stream is not None and plan.stream.num_lanes == 8
    for step in range(2 * plan.steps_per_epoch):
        for span in plan.microbatches(step):
            plan.indices(step, span)
    assert len(made) == len(set(made)) + 2 * shared


def test_a_large_order_stays_the_same_too() -> None:
    """So large that two samples draw keys that differ in the place's bits alone: these go by their
    place.
    """
    order = make_permutation(2**22, seed=0)
    assert blake2b(order.data, digest_size=8).hexdigest() == "2b0881237b15a4ed"


@given(stream_plans(), st.integers(0, 3))
def test_each_epoch_deals_out_every_chunk_once(plan: Plan, epoch: int) -> None:
    assert plan.stream is not None and plan.chunks is not None
    dealt = plan.stream.chunk_order(epoch).tolist()
    assert sorted(dealt) == list(range(sum(-(-rows // size) for rows, size in plan.chunks.shards)))


def test_the_order_depends_on_seed_and_epoch_and_mixes() -> None:
    first = stream_plan().order(0)
    second = stream_plan().order(1)
    third = stream_plan(seed=1).order(0)
    assert stream_plan().order(0).tolist() == first.tolist()
    assert len({tuple(first), tuple(second), tuple(third)}) == 3
    assert (np.abs(np.diff(first)) == 1).mean() < 0.2


def test_the_order_stays_the_same_with_every_version() -> None:
    """Frozen: another order here means that no run can be resumed that was begun before."""
    plan = Plan(10, 4, 2, chunks=Chunks(((6, 2), (4, 3)), slots=8))
    assert plan.order(0).tolist() == [8, 7, 6, 9, 2, 3, 0, 1, 4, 5]


def test_a_plan_comes_back_from_its_config() -> None:
    for plan in (stream_plan(seed=3), Plan(10, 4, 2)):
        assert Plan.from_json(plan.as_json()) == plan
        assert Plan.from_json(plan.as_json()).order(2).tolist() == plan.order(2).tolist()
