"""Series keep their shape in little memory; the times of many ranks are told by their spread and
the slowest.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from stepladder.core.jsonl import Line
from stepladder.rank.progress import TIMING_KEYS
from stepladder.rank.timing import (
    MAX_NAMED_RANKS,
    SPREAD,
    get_timing_rows,
    is_timing_line,
    make_timing_line,
)
from stepladder.tools.report.record import group_timing_lines
from stepladder.tools.report.report import compare_ranks
from stepladder.tools.report.series import (
    MAX_CURVE_POINTS,
    MAX_SHOWN_RANKS,
    MAX_TIME_COLUMNS,
    Curve,
    RankTimes,
)


def line_of(step: int, busy: list[float], steps: int = 10) -> Line:
    """A flush in which each rank computed for `own` seconds a step, and waited for the slowest."""
    seconds = [[0.0, steps * own_s, steps * (max(busy) - own_s), 0.0, 0.25] for own_s in busy]
    line = json.loads(json.dumps(make_timing_line(step, steps, np.array(seconds))))
    assert is_timing_line(line)
    return dict(line)


def times_of(lines: list[Line]) -> RankTimes:
    times = RankTimes(TIMING_KEYS)
    for window in group_timing_lines(iter(lines)):
        times.add(window.last_step, window.steps, window.rows, window.world_size)
    return times


@pytest.mark.parametrize("count", [1, 7, MAX_CURVE_POINTS - 1, MAX_CURVE_POINTS, 12_345, 100_000])
def test_a_curve_of_any_length_is_few_means(count: int) -> None:
    curve = Curve()
    for x in range(count):
        curve.add(x, 2.0 * x)
    assert curve.newest == (count - 1, 2.0 * (count - 1))
    assert len(curve.points) <= MAX_CURVE_POINTS
    xs, ys = np.array(curve.points).T
    assert (ys == 2 * xs).all() and (np.diff(xs) > 0).all()
    assert (
        xs[0] <= 2 * count / MAX_CURVE_POINTS and xs[-1] >= count - 1 - 2 * count / MAX_CURVE_POINTS
    )


def test_a_line_has_the_same_length_for_any_number_of_ranks() -> None:
    few_ranks, many_ranks = (line_of(100, [0.123456] * ranks) for ranks in (MAX_NAMED_RANKS, 4096))
    assert len(json.dumps(many_ranks)) < len(json.dumps(few_ranks)) + 100 < 1600


def test_a_line_names_all_ranks_or_the_slowest_and_the_spread() -> None:
    assert set(get_timing_rows(line_of(10, [1.0] * MAX_NAMED_RANKS))) == set(range(MAX_NAMED_RANKS))
    busy = [1.0 + (rank == 70) + rank / 1e4 for rank in range(100)]
    rows = get_timing_rows(line_of(10, busy))
    assert set(rows) == {*SPREAD, 70, *range(100 - MAX_NAMED_RANKS + 1, 100)}
    compute = TIMING_KEYS.index("compute")
    assert [rows[name][compute] for name in SPREAD] == pytest.approx(
        [10.0, 10 * np.median(busy), 10 * busy[70]]
    )


@pytest.mark.parametrize(
    ("flushes", "ranks"),
    [
        (3, 2),
        (3 * MAX_TIME_COLUMNS, 2),
        (3, MAX_NAMED_RANKS),
        (3, MAX_NAMED_RANKS + 1),
        (3 * MAX_TIME_COLUMNS, 40),
        (3, 1024),
    ],
)
def test_a_slow_rank_is_named_among_any_number(flushes: int, ranks: int) -> None:
    noise = np.random.default_rng(0)
    lines = [
        line_of(
            10 * n,
            (1 + 0.05 * noise.random(ranks) + 0.5 * (np.arange(ranks) == ranks - 1)).tolist(),
        )
        for n in range(1, flushes + 1)
    ]
    times = times_of(lines)
    ((rank, factor),) = times.find_stragglers()
    assert rank == ranks - 1 and 1.3 < factor < 1.6
    assert len(times.last_steps) <= MAX_TIME_COLUMNS and times.last_steps[-1] == 10 * flushes
    steps = times.get_cells([rank])[0, :, 0].sum()
    assert steps == 10 * flushes


def test_ranks_of_equal_speed_are_not_named_where_few_of_them_are_known() -> None:
    noise = np.random.default_rng(0)
    times = times_of(
        [line_of(10 * n, (1 + 0.05 * noise.random(40)).tolist()) for n in range(1, 30)]
    )
    assert times.find_stragglers() == []


def test_lines_as_they_were_with_one_for_each_rank_are_read() -> None:
    lines = [
        {
            "step": 10 * flush,
            "steps": 10,
            "rank": rank,
            **dict.fromkeys(TIMING_KEYS, 0.0),
            "compute": 1.0 + rank,
        }
        for flush in range(1, 4)
        for rank in range(3)
    ]
    assert all(map(is_timing_line, lines))
    times = times_of(lines)
    assert (times.world_size, times.last_steps, [rank for rank, _ in times.find_stragglers()]) == (
        3,
        [10, 20, 30],
        [2],
    )
    assert [speed for _, speed in times.speeds.points] == [pytest.approx(10 / 3)] * 3


@pytest.mark.parametrize("ranks", [MAX_SHOWN_RANKS, MAX_SHOWN_RANKS + 1, 1024])
def test_of_many_ranks_the_page_shows_the_spread_and_the_slowest(ranks: int) -> None:
    times = RankTimes(TIMING_KEYS)
    for flush in range(1, 5):
        busy = [[0.0, 1.0 + rank / ranks, 0.0, 0.0, 0.0] for rank in range(ranks)]
        times.add(flush, 1, dict(enumerate(busy)), ranks)
    comparison = compare_ranks(times)
    assert comparison is not None
    labels = [row[0] for row in comparison["rows"]]  # type: ignore[index]
    if ranks <= MAX_SHOWN_RANKS:
        assert labels == [f"rank {rank}" for rank in range(ranks)]
    else:
        assert labels == [*SPREAD, *(f"rank {rank}" for rank in range(ranks - 8, ranks))]


@pytest.mark.parametrize(
    "change",
    [
        {"step": -1},
        {"steps": 0},
        {"steps": True},
        {"world_size": "2"},
        {"world_size": 0},
        {"ranks": {}},
        {"ranks": []},
        {"ranks": {"²": [0.0] * 5}},
        {"ranks": {"9" * 5000: [0.0] * 5}},
        {"ranks": {"0": [0.0] * 4}},
        {"data": 1.0},
        {"ranks": {"0": [float("nan")] * 5}},
        {"data": [1, 2]},
        {"snapshot": None},
        {"wait": [0, 0, 10**400]},
        {"ranks": {str(rank): [0.0] * 5 for rank in range(1000)}},
        {"rank": 0},
    ],
)
def test_a_line_with_a_wrong_value_is_none(change: dict[str, object]) -> None:
    assert not is_timing_line(line_of(10, [1.0] * (MAX_NAMED_RANKS + 1)) | change)
