"""The order that is computed where it is read: a permutation, as well shuffled as one that is drawn
and held.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepladder import InputError, Plan
from stepladder.core.order import MAX_SORTED, FeistelOrder, IndexArray, make_permutation

MAKE: dict[str, Callable[[int, int], IndexArray]] = {
    "sort": make_permutation,
    "feistel": lambda count, seed: FeistelOrder(count, seed).indices_at(np.arange(count)),
}
BOTH = pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)


@pytest.mark.parametrize("seed", range(3))
def test_every_small_size_is_a_permutation(seed: int) -> None:
    for count in range(1, 700):
        order = MAKE["feistel"](count, seed)
        assert np.bincount(order, minlength=count).tolist() == [1] * count


@given(st.integers(1, 2**17), st.integers(0, 2**63 - 1))
def test_any_size_is_a_permutation(count: int, seed: int) -> None:
    covered = np.zeros(count, dtype=bool)
    covered[FeistelOrder(count, seed).indices_at(np.arange(count))] = True
    assert covered.all()


@given(st.integers(2, 2**62), st.integers(0, 2**63 - 1), st.sets(st.integers(0, 2**62), min_size=2))
def test_of_the_largest_sizes_no_index_comes_twice(count: int, seed: int, places: set[int]) -> None:
    positions = np.unique(np.array(sorted(places)) % count)
    indices = FeistelOrder(count, seed).indices_at(positions)
    assert len(set(indices.tolist())) == len(positions)
    assert indices.min() >= 0 and indices.max() < count


def test_an_index_depends_on_its_position_alone() -> None:
    plan = Plan(10**9, 128, 16, seed=5)
    step = 4_000_000
    batch_indices = plan.indices_at(0, *plan.batch(step))
    parts = [plan.indices(step, span) for rank in range(3) for span in plan.share(step, rank, 3)]
    assert np.concatenate(parts).tolist() == batch_indices.tolist()
    assert (
        plan.indices_at(0, 0, 8).tolist()
        != plan.indices_at(1, 0, 8).tolist()
        != Plan(10**9, 128, 16, 6).indices_at(1, 0, 8).tolist()
    )


def test_it_stays_the_same_with_every_version() -> None:
    """Frozen: another order here means that no run can be resumed that was begun before."""
    assert FeistelOrder(10**9, 1).indices_at(np.arange(4)).tolist() == [
        537310893,
        118284151,
        828805489,
        685393231,
    ]


def test_a_square_number_of_samples_is_divided_into_as_many_rows_as_columns() -> None:
    """Then every pair is a position, so no index is computed twice. Frozen, as above."""
    order = FeistelOrder(10_000, 1)
    assert (order.left_size, order.right_size) == (100, 100)
    assert order.indices_at(np.arange(4)).tolist() == [7424, 6471, 1665, 7293]


def test_a_thousand_million_samples_need_no_list() -> None:
    tracemalloc.start()
    try:
        plan = Plan(10**9, 128, 16)
        plan.indices(7, plan.share(7, 0, 1)[0])
        plan.indices(5_000_000, plan.share(5_000_000, 0, 1)[0])
        assert tracemalloc.get_traced_memory()[1] < 1e6
    finally:
        tracemalloc.stop()


def test_small_data_keeps_the_order_that_it_has_had() -> None:
    small = Plan(MAX_SORTED, 128, 16)
    large = Plan(MAX_SORTED + 1, 128, 16)
    assert (small.shuffle, large.shuffle) == ("sort", "feistel")
    stored = large.as_json()
    assert Plan.from_json(stored) == large
    del stored["shuffle"]  # of a run that was begun before
    assert Plan.from_json(stored).shuffle == "sort"
    assert Plan.from_json(stored).order(0).tolist() != large.order(0).tolist()
    with pytest.raises(InputError, match="shuffle='dice'"):
        Plan(10, 2, 1, shuffle="dice")


# -- as well shuffled: each figure is off by as much as chance allows, one time in a million -------

MANY = 100_000
SIDE = 50


def chi_square(counts: np.ndarray) -> float:
    """In standard deviations from what independent draws give."""
    expected = counts.sum() / counts.size
    freedom = counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))


@BOTH
@pytest.mark.parametrize("seed", range(4))
def test_where_an_index_lands_says_nothing(
    make: Callable[[int, int], IndexArray], seed: int
) -> None:
    order = make(MANY, seed)
    cells = np.arange(MANY) * SIDE // MANY
    grid = np.zeros((SIDE, SIDE))
    np.add.at(grid, (cells, order * SIDE // MANY), 1)  # positions by indices
    assert abs(chi_square(grid)) < 6
    steps = np.diff(order) % MANY * SIDE // MANY  # from one index to the next
    assert abs(chi_square(np.bincount(steps, minlength=SIDE))) < 6
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) * np.sqrt(MANY) < 5
    low = order % 64 * 64 + np.roll(order, 1) % 64  # the lowest bits of neighbours
    assert abs(chi_square(np.bincount(low, minlength=64 * 64))) < 6


@BOTH
def test_the_classes_of_a_batch_vary_as_chance_has_it(
    make: Callable[[int, int], IndexArray],
) -> None:
    """Data sorted by class: how many of the first class are in a batch of 100."""
    first = (make(MANY, 3) < MANY // 10).reshape(-1, 100).sum(1)
    assert abs(first.var() / (100 * 0.1 * 0.9 * (1 - 100 / MANY)) - 1) < 6 * np.sqrt(2 / len(first))


@BOTH
def test_epochs_know_nothing_of_each_other(make: Callable[[int, int], IndexArray]) -> None:
    first_order = make(MANY, 1)
    second_order = make(MANY, 2)
    assert abs(np.corrcoef(first_order, second_order)[0, 1]) * np.sqrt(MANY) < 5
    assert (first_order == second_order).sum() < 15  # one, on average


@BOTH
def test_the_first_place_is_everybodys(make: Callable[[int, int], IndexArray]) -> None:
    """Over many seeds: of so few that a bias of the method would show."""
    firsts = [int(make(23, seed)[position]) for seed in range(2300) for position in (0, 22)]
    assert abs(chi_square(np.bincount(firsts, minlength=23))) < 6
