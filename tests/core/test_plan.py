"""The plan: every sample once per epoch, the same microbatches for any number of processes."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from inspect import signature
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from stepladder.core.errors import InputError
from stepladder.core.order import derive_pass_seed, derive_seed, make_permutation
from stepladder.core.plan import (
    IdleSpan,
    Plan,
    Span,
    add_idle_spans,
    choose_microbatch,
    fuse_spans,
    split_evenly,
)
from stepladder.core.plan_sampler import PlanSampler


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any plan of data in memory, with and without batch norm."""
    microbatch = draw(st.integers(1, 9))
    count = draw(st.integers(1, 8))
    min_microbatch = draw(st.sampled_from((1, 2))) if microbatch > 1 else 1
    samples = draw(st.integers(min_microbatch, 5 * microbatch * count))
    return Plan(
        samples, microbatch * count, microbatch, draw(st.integers(0, 2**40)), min_microbatch
    )


def lone_samples(samples: int) -> Plan:
    return Plan(samples, global_batch=4, microbatch=2, min_microbatch=2)


def sizes(spans: list[Span]) -> list[int]:
    return [len(span) for span in spans]


@given(plans(), st.integers(1, 10))
def test_shares_of_any_number_of_processes_are_the_steps_microbatches_in_order(
    plan: Plan, world_size: int
) -> None:
    for step in range(plan.steps_per_epoch):
        shares = [plan.share(step, rank, world_size) for rank in range(world_size)]
        assert [span for spans in shares for span in spans] == plan.microbatches(step)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(plans())
def test_microbatches_cover_the_batch_without_gap_and_none_is_too_short(plan: Plan) -> None:
    for step in range(plan.steps_per_epoch):
        spans, (lo, hi) = plan.microbatches(step), plan.batch(step)
        assert [span.number for span in spans] == list(range(len(spans)))
        assert [span.lo for span in spans] == [0, *(span.hi for span in spans[:-1])]
        assert spans[-1].hi == hi - lo
        assert min(sizes(spans)) >= plan.min_microbatch
        assert set(sizes(spans[:-1])) <= {plan.microbatch}, "only the last may have another size"
        assert len(spans[-1]) < plan.microbatch + plan.min_microbatch


@given(plans())
def test_the_epochs_steps_cover_all_samples_and_only_the_last_is_not_a_global_batch(
    plan: Plan,
) -> None:
    bounds = [plan.batch(step) for step in range(plan.steps_per_epoch)]
    assert [lo for lo, _ in bounds] == [0, *(hi for _, hi in bounds[:-1])]
    assert {hi - lo for lo, hi in bounds[:-1]} <= {plan.global_batch}
    assert bounds[-1][1] == plan.num_samples
    assert (
        plan.min_microbatch
        <= bounds[-1][1] - bounds[-1][0]
        < plan.global_batch + plan.min_microbatch
    )
    assert [
        plan.batch(step + plan.steps_per_epoch) for step in range(plan.steps_per_epoch)
    ] == bounds
    last = plan.steps_per_epoch - 1
    assert [plan.epoch_of_step(step) for step in (0, last, last + 1, 3 * last + 3)] == [0, 0, 1, 3]


@given(plans(), st.integers(1, 8), st.integers(0, 3))
def test_all_ranks_together_read_every_sample_once_per_epoch(
    plan: Plan, world_size: int, epoch: int
) -> None:
    first = epoch * plan.steps_per_epoch
    read = [
        plan.indices(step, span)
        for step in range(first, first + plan.steps_per_epoch)
        for rank in range(world_size)
        for span in plan.share(step, rank, world_size)
    ]
    assert sorted(np.concatenate(read).tolist()) == list(range(plan.num_samples))
    assert np.concatenate(read).tolist() == plan.order(epoch).tolist(), "in the order of the epoch"


@given(plans(), st.data())
def test_a_plan_sampler_resumed_at_any_step_goes_on_as_if_never_stopped(
    plan: Plan, data: st.DataObject
) -> None:
    num_steps = 2 * plan.steps_per_epoch
    world_size = data.draw(st.integers(1, 4))
    rank = data.draw(st.integers(0, world_size - 1))
    start = data.draw(st.integers(0, num_steps))
    unbroken = list(PlanSampler(plan, num_steps, rank, world_size))
    resumed = PlanSampler(plan, num_steps, rank, world_size, start_step=start)
    assert list(resumed) == unbroken[start:]
    assert len(resumed) == num_steps - start


def test_the_last_batch_holds_the_rest_and_may_leave_ranks_without_samples() -> None:
    plan = Plan(num_samples=70, global_batch=32, microbatch=4)
    assert plan.steps_per_epoch == 3
    assert plan.batch(2) == (64, 70)
    assert [sizes(plan.share(2, rank, 4)) for rank in range(4)] == [[], [4], [], [2]]
    assert [plan.epoch_of_step(step) for step in (0, 2, 3)] == [0, 0, 1]


@pytest.mark.parametrize(
    ("samples", "last_batch"),
    [(8, [2, 2]), (7, [3]), (6, [2]), (9, [2, 3]), (5, [2, 3]), (3, [3]), (2, [2])],
)
def test_a_lone_last_sample_under_batch_norm_joins_the_microbatch_before_it(
    samples: int, last_batch: list[int]
) -> None:
    plan = lone_samples(samples)
    assert sizes(plan.microbatches(plan.steps_per_epoch - 1)) == last_batch


def test_a_whole_last_batch_of_one_sample_joins_the_step_before_it() -> None:
    plan = lone_samples(9)
    assert (plan.steps_per_epoch, plan.batch(0), plan.batch(1), plan.batch(2)) == (
        2,
        (0, 4),
        (4, 9),
        (0, 4),
    )


def test_without_batch_norm_a_lone_last_sample_is_a_step_of_its_own() -> None:
    plan = Plan(num_samples=9, global_batch=4, microbatch=2)
    assert (plan.steps_per_epoch, plan.batch(2)) == (3, (8, 9))


@given(st.integers(1, 3000), st.integers(0, 2**63 - 1))
def test_an_order_is_a_permutation(samples: int, seed: int) -> None:
    assert sorted(make_permutation(samples, seed).tolist()) == list(range(samples))


def test_an_order_depends_on_seed_and_epoch_and_on_nothing_else() -> None:
    plan = Plan(100, 10, 5, seed=3)
    first = plan.order(0).tolist()
    second = plan.order(1).tolist()
    assert plan.order(0).tolist() == first, "going back to an epoch changed its order"
    assert Plan(100, 50, 1, seed=3, min_microbatch=1).order(0).tolist() == first
    assert len({tuple(o) for o in (first, second, Plan(100, 10, 5, seed=4).order(0).tolist())}) == 3
    assert first != list(range(100))


@pytest.mark.parametrize(
    ("epoch", "order"), [(0, [6, 9, 5, 3, 7, 0, 1, 4, 2, 8]), (1, [9, 7, 3, 6, 8, 0, 5, 1, 2, 4])]
)
def test_an_order_stays_the_same_with_every_version_of_numpy(epoch: int, order: list[int]) -> None:
    """Frozen: another order here means that no run can be resumed that was begun before."""
    assert Plan(num_samples=10, global_batch=4, microbatch=2, seed=0).order(epoch).tolist() == order


def test_a_plan_is_what_it_was_made_of_whatever_has_been_asked_of_it() -> None:
    """Its caches count neither in a comparison nor in its text."""
    plan = Plan(20, 8, 2, seed=1)
    second_plan = Plan(20, 8, 2, seed=1)
    text = repr(plan)
    assert plan.indices(1, plan.microbatches(1)[0]).shape == (2,)
    assert (plan, repr(plan)) == (second_plan, text)
    assert plan != Plan(20, 8, 2, seed=2)
    with pytest.raises(FrozenInstanceError):
        plan.seed = 2  # type: ignore[misc]


def test_by_default_a_plan_has_seed_0_knows_no_batch_norm_and_is_of_data_in_memory() -> None:
    assert Plan(8, 4, 2) == Plan(8, 4, 2, seed=0, min_microbatch=1, chunks=None)


def test_a_global_batch_that_is_no_multiple_names_both_flags_and_a_microbatch_that_fits() -> None:
    with pytest.raises(InputError) as caught:
        Plan(100, global_batch=64, microbatch=24)
    assert caught.value.problem == "--global-batch 64 is not a multiple of --microbatch 24"
    assert caught.value.hint == "--microbatch 16"


@pytest.mark.parametrize("name", ["num_samples", "global_batch", "microbatch"])
@pytest.mark.parametrize("value", [0, -8])
def test_nothing_may_be_empty(name: str, value: int) -> None:
    with pytest.raises(
        InputError,
        match="holds no sample" if name == "num_samples" else f"{name}={value}.*at least 1",
    ):
        Plan(**{"num_samples": 8, "global_batch": 8, "microbatch": 8, name: value})


@pytest.mark.parametrize(("samples", "microbatch"), [(1, 2), (8, 1)])
def test_batch_norm_refuses_a_microbatch_of_one(samples: int, microbatch: int) -> None:
    with pytest.raises(InputError, match="batch norm needs 2 samples"):
        Plan(samples, 4, microbatch, min_microbatch=2)


@pytest.mark.parametrize(
    ("global_batch", "microbatch"),
    [(64, 8), (96, 12), (128, 16), (7, 1), (9, 3), (1, 1), (2, 1), (13, 13)],
)
def test_the_default_cut_is_into_the_largest_divisor_up_to_eight(
    global_batch: int, microbatch: int
) -> None:
    assert choose_microbatch(global_batch) == microbatch


@given(st.integers(0, 10_000), st.integers(1, 64))
def test_a_share_is_contiguous_and_balanced(count: int, world_size: int) -> None:
    shares = [split_evenly(count, rank, world_size) for rank in range(world_size)]
    assert [lo for lo, _ in shares] + [count] == [0, *(hi for _, hi in shares)]
    assert {hi - lo for lo, hi in shares} <= {count // world_size, -(-count // world_size)}


def test_fused_microbatches_are_one_pass_keyed_by_the_first() -> None:
    assert fuse_spans([Span(3, 6, 8), Span(4, 8, 10), Span(5, 10, 11)]) == [Span(3, 6, 11)]
    assert fuse_spans([]) == []


def test_keys_of_passes_differ_over_a_grid_and_fit_a_seed() -> None:
    keys = {
        derive_pass_seed(derive_seed(seed, "pass"), s, n)
        for seed, s, n in product(range(4), range(500), range(32))
    }
    assert len(keys) == 4 * 500 * 32
    assert all(0 <= k < 2**63 for k in keys)


def test_keys_differ_over_a_grid_and_between_parts_that_look_alike() -> None:
    keys = [
        derive_seed(seed, word, n)
        for seed, word, n in product(range(20), ("order", "sample"), range(200))
    ]
    keys += [derive_seed(1, 12), derive_seed(11, 2), derive_seed(112), derive_seed("1", "1", "2")]
    assert len(set(keys)) == len(keys)
    assert all(0 <= k < 2**63 for k in keys)


def test_a_key_stays_the_same_with_every_version() -> None:
    assert (derive_seed(0, "order", 0), derive_pass_seed(derive_seed(0, "pass"), 1, 2)) == (
        3471081512423777433,
        6098966606050272473,
    )


def test_a_dataloader_with_a_plan_sampler_reads_every_sample_once_per_epoch() -> None:
    plan = Plan(num_samples=22, global_batch=8, microbatch=2)
    samples = TensorDataset(torch.arange(22))
    read: list[int] = []
    for rank in range(3):
        sampler = PlanSampler(plan, num_steps=3, rank=rank, world_size=3)
        loader = DataLoader(samples, batch_sampler=sampler)
        assert len(loader) == 3
        read += [i for (batch,) in loader for i in batch.tolist()]
    assert sorted(read) == list(range(22))


def test_a_plan_sampler_is_by_default_of_one_process_from_the_first_step() -> None:
    plan = Plan(num_samples=22, global_batch=8, microbatch=2)
    assert [i for batch in PlanSampler(plan, 3) for i in batch] == plan.order(0).tolist()


def test_a_rank_without_samples_makes_an_empty_step_so_that_ranks_stay_together() -> None:
    plan = Plan(num_samples=10, global_batch=8, microbatch=2)
    sampler = PlanSampler(plan, num_steps=2, rank=0, world_size=2)
    assert [len(batch) for batch in sampler] == [4, 0]
    loader = DataLoader(TensorDataset(torch.arange(10)), batch_sampler=sampler, collate_fn=list)
    assert [len(batch) for batch in loader] == [4, 0]


def test_a_pass_that_adds_nothing_has_no_samples() -> None:
    assert len(IdleSpan(0, 4, 8)) == 0
    assert len(Span(0, 4, 8)) == 4


def test_idle_passes_follow_until_all_ranks_make_as_many() -> None:
    shares = [[Span(0, 0, 4), Span(1, 4, 8), Span(2, 8, 12)], [Span(3, 12, 16)], []]
    idle = IdleSpan(0, 0, 4)
    passes = [add_idle_spans(spans, shares) for spans in shares]
    assert passes == [shares[0], [*shares[1], idle, idle], [idle, idle, idle]]


def test_without_the_last_batch_there_has_to_be_another_one() -> None:
    assert Plan(16, 16, 4, drop_last=True).steps_per_epoch == 1
    with pytest.raises(InputError, match="drop_last leaves no batch: 15 samples"):
        Plan(15, 16, 4, drop_last=True)


def test_a_plan_is_made_of_its_public_fields_alone() -> None:
    assert not [name for name in signature(Plan).parameters if name.startswith("_")]
