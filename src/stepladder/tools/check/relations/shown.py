"""R5: with frozen weights each number that a line shows is that of one process.

A number of a line is compared by its mean over the calls of the line. What differs between the
reference and the shuffled run, and between the calls of one run, may differ. A number that is the
same with other weights is a setting or a counter, and is not compared.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from statistics import fmean, pstdev

from stepladder.tools.check.events import Forward, ShownText
from stepladder.tools.check.recording import RankLog, Recording
from stepladder.tools.check.relations.frozen_runs import FrozenRuns, Violation
from stepladder.tools.check.relations.samples_read import are_of_one_data_set
from stepladder.tools.probe.events import CodeLine

# Parts of a time of day, of a date, or of the shape of a tensor, are none.
SHOWN_NUMBER = re.compile(
    r"(?<![\w.])(?<!\d-)(?!\d\d:\d\d(?![\d.]))(?!(?<=\d:)\d\d(?![\d.]))"
    r"[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?%?(?![\w])(?![\d, ]*\]\))"
)
NOISE_FACTOR = 5.0
STANDARD_ERRORS = 5.0
MIN_RELATIVE_DIFFERENCE = 1e-3

Place = tuple[CodeLine | None, CodeLine | None, int]  # the line, its caller, which of its numbers


@dataclass(frozen=True)
class Series:
    """The values of one number of a line, in the order of its calls.

    Args:
        values: The values.
        resolution: Half of the last digit that is shown.
    """

    values: tuple[float, ...]
    resolution: float

    @property
    def mean(self) -> float:
        return fmean(self.values)

    @property
    def standard_error(self) -> float:
        if not math.isfinite(self.mean):
            return math.nan
        return pstdev(self.values) / math.sqrt(len(self.values))


def read_series(log: RankLog, with_settings: bool = False) -> dict[Place, Series]:
    """Return the numbers that each line shows on one rank.

    Args:
        log: The log of the rank.
        with_settings: Whether those before the first call of a model are among them.
    """
    values: dict[Place, list[float]] = defaultdict(list)
    resolutions: dict[Place, float] = defaultdict(float)
    begin = next((event.n for event in log.select(Forward)), 0)
    for event in log.select(ShownText):
        if event.n < begin and not with_settings:  # an address, a setting or a time
            continue
        for index, text in enumerate(SHOWN_NUMBER.findall(event.text)):
            place = (event.at, event.caller, index)
            values[place].append(float(text.rstrip("%")))
            resolutions[place] = max(resolutions[place], resolution_of(text))
    return {place: Series(tuple(v), resolutions[place]) for place, v in values.items()}


def series_of_run(run: Recording) -> dict[Place, Series]:
    """Return the numbers that each line shows on any rank; those of a line on several are one."""
    merged: dict[Place, Series] = {}
    for log in run.ranks:
        for place, series in read_series(log).items():
            known = merged.get(place, Series((), 0.0))
            resolution = max(known.resolution, series.resolution)
            merged[place] = Series(known.values + series.values, resolution)
    return merged


def resolution_of(text: str) -> float:
    """Return half of the last digit that is shown; 0 of an integer."""
    if "." not in text:
        return 0.0
    return 0.5 * 10.0 ** int(Decimal(text.rstrip("%")).as_tuple().exponent)


@dataclass(frozen=True)
class ComparedNumber:
    """One number of a line, in all runs with frozen weights."""

    place: Place
    reference: Series
    shuffled: Series | None
    shown: dict[int, Series]  # by rank


def compared_numbers(runs: FrozenRuns) -> Iterator[ComparedNumber]:
    """Yield the numbers that are shown in all runs, and may be made of the model's outputs."""
    if not are_of_one_data_set(runs):
        return
    reference = series_of_run(runs.reference)
    shuffled = series_of_run(runs.shuffled) if runs.shuffled else None
    reweighted = series_of_run(runs.reweighted) if runs.reweighted else None
    compared = [read_series(log) for log in runs.compared.ranks]
    for place, series in reference.items():
        shown = {
            rank: by_place[place] for rank, by_place in enumerate(compared) if place in by_place
        }
        if not shown or not math.isfinite(series.mean):
            continue
        if reweighted and (place not in reweighted or reweighted[place].values == series.values):
            continue
        if shuffled is None:
            yield ComparedNumber(place, series, None, shown)
        elif place in shuffled:
            yield ComparedNumber(place, series, shuffled[place], shown)


def count_compared(runs: FrozenRuns) -> int:
    """Return how many lines show numbers that can be compared."""
    return len({number.place[:2] for number in compared_numbers(runs)})


def violations(runs: FrozenRuns) -> Iterator[Violation]:
    """Yield the numbers that are not those of one process, the first of each line."""
    named: set[CodeLine | None] = set()
    for number in compared_numbers(runs):
        line = number.place[0]
        violation = None if line in named else compare(number, runs.base)
        if violation:
            named.add(line)
            yield violation


def compare(number: ComparedNumber, base: str = "one process") -> Violation | None:
    """Return how a number on several ranks differs from that on one process, or as `base` says."""
    expected = number.reference.mean
    series_of_ranks = number.shown.values()
    spreads = [series.standard_error for series in (number.reference, *series_of_ranks)]
    noise = abs(number.shuffled.mean - expected) if number.shuffled else 0.0
    resolution = number.reference.resolution
    allowed = (
        NOISE_FACTOR * noise
        + STANDARD_ERRORS * max(spreads)
        + 2 * resolution
        + MIN_RELATIVE_DIFFERENCE * abs(expected)
    )
    means = {rank: series.mean for rank, series in number.shown.items()}
    difference = max(abs(mean - expected) for mean in means.values())
    # Each rank may show what its own share gives, if all together give what one process shows.
    are_shares = len(means) > 1 and abs(fmean(means.values()) - expected) <= allowed
    if difference <= allowed or are_shares:
        return None
    rows = [f"on {base} {expected:.6g}; other random numbers change it by {noise:.1g}"]
    for rank, mean in means.items():
        row = f"on rank {rank}        {mean:.6g}"
        if expected:
            row += f", {mean / expected:.3g} times as much"
        rows.append(row)
    return Violation(
        "shown-numbers",
        number.place[0],
        difference / allowed if allowed else math.inf,
        "\n".join(["with the same weights", *rows]),
        next(iter(means.values())) / expected if expected else math.nan,
    )
