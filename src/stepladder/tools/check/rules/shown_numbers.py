"""Numbers that a script shows, by value: which mean or sum of its batches each of them is."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise
from operator import mul

from stepladder.tools.check.events import Backward, Batch, Print, ScriptCollective, Statistic
from stepladder.tools.check.recording import LoaderPass, RankLog
from stepladder.tools.probe.events import CodeLine, ProbeEvent

NUMBER = re.compile(r"(?<![\w.])\d+\.\d+(?:[eE][+-]?\d+)?")
ROUNDING_OF_SUMS = 3e-6  # of single precision, relative
EXACT_DIGITS = 6
ENOUGH_DIGITS = 4  # of one number, that is no coincidence
ENOUGH_DIGITS_OF_SEVERAL = 6
FACTORS = (1, 100)  # a share may be shown in percent
RECENT_STATISTICS = 8
RECENT_PASSES = 2
# The numbers of a line, the first of a batch or a later one, which are means or not.
Numbers = dict[tuple[CodeLine | None, int, bool], list[float]]


@dataclass(frozen=True)
class ShownNumber:
    """A number that is printed, logged or given to a collective.

    Args:
        value: The number.
        tolerance: How far the true value may be from it.
        digits: How many digits are known.
        event: What shows it.
    """

    value: float
    tolerance: float
    digits: int
    event: Print | ScriptCollective | None

    @classmethod
    def exact(cls, value: float, event: ScriptCollective | None = None) -> ShownNumber:
        return cls(value, ROUNDING_OF_SUMS * abs(value), EXACT_DIGITS, event)

    def is_equal(self, value: float) -> bool:
        return abs(self.value - value) <= self.tolerance

    def factor_of(self, value: float) -> int:
        """Return by which factor a value is shown, 1 or 100; 0 where it is not."""
        factors = (factor for factor in FACTORS if value and self.is_equal(factor * value))
        return next(factors, 0)

    def is_any_of(self, values: Iterable[float]) -> bool:
        return any(map(self.factor_of, values))


def shown_numbers(events: Iterable[ProbeEvent]) -> Iterator[ShownNumber]:
    """Yield the numbers with a fraction that are shown until the next backward pass."""
    for event in events:
        if isinstance(event, Backward):
            return
        if isinstance(event, Print):
            yield from printed_numbers(event)
        elif isinstance(event, ScriptCollective):
            fractions = (value for value in event.value if value % 1)  # others may be counts
            for value in fractions:
                yield ShownNumber.exact(value, event)


def printed_numbers(shown: Print) -> Iterator[ShownNumber]:
    for text in NUMBER.findall(shown.text):
        value = float(text)
        if value == 0:  # any small number is shown so
            continue
        _, digits, exponent = Decimal(text).as_tuple()
        half_of_last_digit = 0.51 * 10.0 ** int(exponent)
        tolerance = max(half_of_last_digit, ROUNDING_OF_SUMS * abs(value))
        yield ShownNumber(value, tolerance, min(len(digits), EXACT_DIGITS), shown)


def are_no_coincidence(numbers: list[ShownNumber]) -> bool:
    """Return whether numbers that were recognized have enough digits.

    A number that is shown again proves nothing more.
    """
    digits = {number.value: number.digits for number in numbers}.values()
    return max(digits, default=0) >= ENOUGH_DIGITS or sum(digits) >= ENOUGH_DIGITS_OF_SEVERAL


@dataclass(frozen=True)
class BatchSeries:
    """A number of each batch of a pass.

    Args:
        values: The numbers.
        sizes: The number of samples of each batch.
        are_means: Whether each is a mean over its batch, and not a sum.
        data_length: The number of samples of the whole data set.
        line: The line that computes it.
    """

    values: list[float]
    sizes: list[int]
    are_means: bool
    data_length: int
    line: CodeLine | None

    def is_like(self, other: BatchSeries) -> bool:
        """Return whether another series is of the same line, on another rank."""
        return self.line == other.line and self.are_means == other.are_means

    @property
    def totals(self) -> list[float]:
        """The sum over the samples of each batch."""
        if self.are_means:
            return list(map(mul, self.values, self.sizes))
        return self.values

    @property
    def mean_of_means(self) -> float:
        means = [total / size for total, size in zip(self.totals, self.sizes, strict=True)]
        return sum(means) / len(means)

    @property
    def sum_of_samples(self) -> float:
        return sum(self.totals)

    @property
    def mean_of_samples(self) -> float:
        return self.sum_of_samples / self.count

    @property
    def count(self) -> int:
        """The number of samples."""
        return sum(self.sizes)


def batch_series(one_pass: LoaderPass) -> list[BatchSeries]:
    """Return the losses, means and sums that are computed once in each batch of a pass."""
    values: Numbers = defaultdict(list)
    counts: Counter[CodeLine | None] = Counter()  # of a line in a batch, which may compute several
    for event in one_pass.events:
        if isinstance(event, Batch):
            counts.clear()
        elif isinstance(event, Statistic):
            values[event.at, counts[event.at], event.is_mean].append(event.value)
            counts[event.at] += 1
    return series_of(one_pass, values)


def reduced_series(one_pass: LoaderPass) -> list[BatchSeries]:
    """Return the means that a rank gives a collective once in each batch of a pass."""
    values: Numbers = defaultdict(list)
    means: list[float] = []
    for event in one_pass.events:
        if isinstance(event, Statistic) and event.is_mean:
            means.append(event.value)
        elif isinstance(event, ScriptCollective) and event.sums and len(event.value) == 1:
            number = ShownNumber.exact(event.value[0])
            if any(map(number.is_equal, means[-RECENT_STATISTICS:])):
                values[event.at, 0, True].append(number.value)
    return series_of(one_pass, values)


def series_of(one_pass: LoaderPass, values: Numbers) -> list[BatchSeries]:
    """Return the series of those numbers of which each batch of a pass has one."""
    sizes = [batch.size for batch in one_pass.batches]
    return [
        BatchSeries(numbers, sizes, are_means, one_pass.start.length or 0, line)
        for (line, _, are_means), numbers in values.items()
        if len(numbers) == len(sizes) and all(sizes)
    ]


def known_means(log: RankLog, collective: ScriptCollective) -> Iterator[float]:
    """Yield the means that a rank has computed shortly before a collective."""
    before = [event for event in log.select(Statistic) if event.n < collective.n]
    for event in before[-RECENT_STATISTICS:]:
        if event.is_mean:
            yield event.value
    passes = [p for p in log.passes if p.end and p.end.n < collective.n]
    for one_pass in passes[-RECENT_PASSES:]:
        for series in batch_series(one_pass):
            yield series.mean_of_means
            yield series.mean_of_samples


def numbers_after(log: RankLog, calls: list[ScriptCollective]) -> Iterator[list[ShownNumber]]:
    """Yield what is shown after each of some collectives, until the next of them."""
    positions = {event.n: index for index, event in enumerate(log.events)}
    starts = [positions[call.n] + 1 for call in calls]
    for first, after in pairwise([*starts, len(log.events)]):
        yield list(shown_numbers(log.events[first:after]))
