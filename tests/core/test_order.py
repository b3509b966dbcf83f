"""The order of data in files: each row once per epoch, chunk by chunk, whoever reads it."""

from __future__ import annotations

import numpy as np
import pytest

from stepladder import Plan
from stepladder.core.order import Chunks
from stepladder.core.plan import fuse

CHUNKS = Chunks(((40, 8), (40, 8), (23, 8)), slots=16)  # 13 chunks, the last of 7 rows


def stream_plan(samples: int = 103, batch: int = 12, microbatch: int = 3, **more: int) -> Plan:
    chunks = CHUNKS if samples == 103 else Chunks(((samples, 8),), slots=16)
    return Plan(samples, batch, microbatch, chunks=chunks, **more)


@pytest.mark.parametrize("batch, microbatch", [(12, 3), (12, 12), (8, 1), (103, 103), (200, 25)])
@pytest.mark.parametrize("samples", [103, 1, 8, 96])
@pytest.mark.parametrize("least", [1, 2])
def test_an_epoch_has_every_row_once(samples: int, batch: int, microbatch: int, least: int) -> None:
    if samples < least or microbatch < least:
        return
    plan = stream_plan(samples, batch, microbatch, min_microbatch=least)
    trained = plan.steps_per_epoch * batch
    order = plan.order(1)
    assert len(set(order.tolist())) == len(order) == min(samples, max(trained, plan.batch(-1)[1]))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_shares_of_any_number_of_ranks_make_the_same_batches(world_size: int) -> None:
    plan = stream_plan()
    for step in range(2 * plan.steps_per_epoch):
        lo, hi = plan.batch(step)
        whole = plan.order(step // plan.steps_per_epoch)[lo:hi].tolist()
        shares = [plan.indices(step, s) for r in range(world_size) for s in plan.share(step, r, world_size)]
        fused = [plan.indices(step, s) for r in range(world_size) for s in fuse(plan.share(step, r, world_size))]
        assert np.concatenate(shares).tolist() == np.concatenate(fused).tolist() == whole


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
    assert sum(map(len, read)) <= 800 + 4 * 2 * plan.stream.chunks_per_window, "chunks at a lane's ends are shared"


def test_few_chunks_are_open_at_a_time() -> None:
    plan = Plan(8000, 80, 10, chunks=Chunks(((8000, 10),), slots=32))
    assert plan.stream is not None
    for step in range(0, plan.steps_per_epoch - 1):
        rows = np.concatenate([plan.indices(s, span) for s in (step, step + 1) for span in plan.microbatches(s)])
        assert len(np.unique(rows // 10)) <= 32


def test_the_order_depends_on_seed_and_epoch_and_mixes() -> None:
    first, second, other = stream_plan().order(0), stream_plan().order(1), stream_plan(seed=1).order(0)
    assert stream_plan().order(0).tolist() == first.tolist()
    assert len({tuple(first), tuple(second), tuple(other)}) == 3
    assert (np.abs(np.diff(first)) == 1).mean() < 0.2


def test_the_order_stays_the_same_with_every_version() -> None:
    """Frozen: another order here means that no run can be resumed that was begun before."""
    plan = Plan(10, 4, 2, chunks=Chunks(((6, 2), (4, 3)), slots=8))
    assert plan.order(0).tolist() == [8, 7, 6, 9, 2, 3, 0, 1, 4, 5]


def test_a_plan_comes_back_from_its_config() -> None:
    for plan in (stream_plan(seed=3), Plan(10, 4, 2)):
        assert Plan.from_json(plan.as_json()) == plan
        assert Plan.from_json(plan.as_json()).order(2).tolist() == plan.order(2).tolist()
