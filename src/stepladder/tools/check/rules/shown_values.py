"""Numbers that a script shows after a pass: which mean or sum over its batches each of them is."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from operator import mul
from pathlib import PurePath
from statistics import fmean

from stepladder.tools.check.events import (
    Backward,
    Batch,
    Forward,
    PassStart,
    ScriptCollective,
    ShownText,
    Statistic,
    WrittenText,
)
from stepladder.tools.check.recording import LoaderPass, RankLog
from stepladder.tools.check.rules.evidence import Findings, RunEvidence, align, rank_rule, run_rule
from stepladder.tools.probe.events import CodeLine, ProbeEvent

NUMBER = re.compile(r"(?<![\w.])\d+\.\d+(?:[eE][+-]?\d+)?")
NAMES_RANK = re.compile(r"rank|gpu|cuda|device|worker|process|node|local|shard|replica", re.I)
ROUNDING_OF_SUMS = 3e-6  # of single precision, relative
EXACT_DIGITS = 6
ENOUGH_DIGITS = 4  # of one number, that is no coincidence
ENOUGH_DIGITS_OF_SEVERAL = 6
DIGITS_OF_LOSSES = 5  # losses of all ranks are close to each other
FACTORS = (1, 100)  # a share may be shown in percent
SHARE_OF_ALL = 0.75
MULTIPLES = range(1, 33)  # of a loss that is divided by the number of micro-batches
SHOWN_VALUES = (
    "mean-of-means",
    "mean-of-means.training",
    "local-count",
    "local-count.means",
    "mean-divided-twice",
    "one-rank-metric",
    "one-rank-loss",
)
Shown = ShownText | ScriptCollective


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
    event: Shown

    def is_any_of(self, values: Iterable[float], factors: Sequence[int] = FACTORS) -> bool:
        expected = [factor * value for value in values if value for factor in factors]
        return any(abs(self.value - value) <= self.tolerance for value in expected)


def numbers_of(event: ProbeEvent) -> Iterator[ShownNumber]:
    """Yield the numbers with a fraction that an event shows; others may be counts."""
    if not isinstance(event, Shown):
        return
    exact = [f"{value:.12f}" for value in getattr(event, "value", ()) if value % 1]
    for text in exact or NUMBER.findall(getattr(event, "text", "")):
        value = float(text)
        _, digits, exponent = Decimal(text).as_tuple()
        tolerance = max(0.51 * 10.0 ** int(exponent), ROUNDING_OF_SUMS * abs(value))
        if value:  # any small number is shown as 0
            yield ShownNumber(value, tolerance, min(len(digits), EXACT_DIGITS), event)


@dataclass(frozen=True)
class BatchSeries:
    """A number of each batch of a pass.

    Args:
        values: The numbers.
        sizes: The number of samples of each batch.
        are_means: Whether each is a mean over its batch, and not a sum.
        data_length: The number of samples of the whole data set.
    """

    values: list[float]
    sizes: list[int]
    are_means: bool
    data_length: int

    @property
    def totals(self) -> list[float]:
        """The sum over the samples of each batch."""
        return list(map(mul, self.values, self.sizes)) if self.are_means else self.values

    @property
    def total(self) -> float:
        return sum(self.totals)

    @property
    def count(self) -> int:
        """The number of samples."""
        return sum(self.sizes)

    @property
    def mean(self) -> float:
        return self.total / self.count

    @property
    def mean_of_means(self) -> float:
        means = [total / size for total, size in zip(self.totals, self.sizes, strict=True)]
        return sum(means) / len(means)


def batch_series(one_pass: LoaderPass) -> dict[Hashable, BatchSeries]:
    """Return the losses, means and sums that are computed once in each batch of a pass.

    They are keyed by line, by their order in a batch, and by whether they are means.
    """
    values: dict[tuple[CodeLine | None, int, bool], list[float]] = defaultdict(list)
    counts: Counter[CodeLine | None] = Counter()  # of a line in a batch, which may compute several
    for event in one_pass.events:
        if isinstance(event, Batch):
            counts.clear()
        elif isinstance(event, Statistic):
            values[event.at, counts[event.at], event.is_mean].append(event.value)
            counts[event.at] += 1
    sizes = [batch.size for batch in one_pass.batches]
    length = one_pass.start.length or 0
    return {
        key: BatchSeries(numbers, sizes, key[2], length)
        for key, numbers in values.items()
        if len(numbers) == len(sizes) and all(sizes)
    }


@dataclass(frozen=True)
class WrongValue:
    """A value that is a mistake where a script shows it.

    Args:
        rule: The rule that has its texts.
        name: What it is.
        value: The value.
        right: Values that would be right; a number that may be one of them proves nothing.
        factors: By which it may be multiplied.
        is_of_one: Whether it is right where its text says of which rank it is.
    """

    rule: str
    name: str
    value: float
    right: set[float]
    factors: Sequence[int] = FACTORS
    is_of_one: bool = False

    def fits(self, number: ShownNumber, rank: int) -> bool:
        is_said = isinstance(number.event, ShownText) and not names_rank(number.event, rank)
        return (is_said or not self.is_of_one) and number.is_any_of([self.value], self.factors)


def wrong_values(
    ranks: list[BatchSeries], is_training: bool, own_means: set[float]
) -> Iterator[WrongValue]:
    """Yield the values of a series that are mistakes.

    Args:
        ranks: The series on each rank, first on the one that shows a number.
        is_training: Whether the pass trains.
        own_means: The means over the samples of each pass of that rank.
    """
    own = ranks[0]
    size = len(ranks)
    total = sum(series.total for series in ranks)
    mean = total / sum(series.count for series in ranks)
    right = {*own_means, mean}
    of_batches = "the mean of the batches' means"
    kind = "mean-of-means.training" if is_training else "mean-of-means"
    yield WrongValue(kind, of_batches, own.mean_of_means, right)
    means = [series.mean for series in ranks]
    batch_means = [series.mean_of_means for series in ranks]
    for values in (means, batch_means) if size > 1 else ():
        yield WrongValue(
            "local-count.means", "the sum of the ranks' means", sum(values), right, (1,)
        )
        if not is_training:
            average = "the average of the ranks' means"
            yield WrongValue("mean-of-means", average, sum(values) / size, right)
    if total > own.total:
        by_one = "the sum over all ranks by the samples of one"
        yield WrongValue("local-count", by_one, total / own.count, right)
    for count in {own.count, own.data_length}:
        if own.are_means and count > 1.5 * len(own.values):
            by_samples = f"the sum of the batch means, divided by {count} samples,"
            by_count = sum(own.values) / count
            yield WrongValue("mean-divided-twice", by_samples, by_count, right, (1,))
    if own.count < SHARE_OF_ALL * own.data_length:
        part = own.total / own.data_length
        by_all = "the sum over the share, by the length of the whole data set,"
        yield WrongValue("one-rank-metric", by_all, part, set(), is_of_one=True)
    yield from values_of_one(ranks, is_training, mean)


def values_of_one(ranks: list[BatchSeries], is_training: bool, mean: float) -> Iterator[WrongValue]:
    """Yield the values of one rank's share, which may be shown as those of all."""
    values = {"the mean over the samples": [series.mean for series in ranks]}
    if is_training:
        values["the mean over the batches"] = [series.mean_of_means for series in ranks]
    if is_training and ranks[0].are_means:
        values["the sum of the batch losses"] = [sum(series.values) for series in ranks]
    rule = "one-rank-loss" if is_training else "one-rank-metric"
    for name, of_ranks in values.items():
        of_all = {sum(of_ranks) / len(ranks), mean}
        yield WrongValue(rule, name, of_ranks[0], of_all, is_of_one=True)


@run_rule(*SHOWN_VALUES)
def shown_values(evidence: RunEvidence) -> Findings:
    """Find numbers that are a wrong value after each pass, the first of each rule."""
    named: set[str] = set()
    for log in evidence.ranks:
        for found in recognize(evidence, log):
            wrong = [each for each in found if not each.number.is_any_of(each.value.right)]
            rule = found[0].value.rule
            if rule not in named and are_certain(rule, [each.number for each in wrong]):
                named.add(rule)
                line = line_that_shows(evidence, wrong[0].number.event)
                yield evidence.finding(rule, line, wrong[0].describe(log.rank), log.rank)
    if "one-rank-loss" not in named:
        yield from losses_of_one_rank(evidence)


@dataclass(frozen=True)
class Recognized:
    """A number that is shown, the wrong value that it is, and the series of all ranks."""

    number: ShownNumber
    value: WrongValue
    ranks: list[BatchSeries]

    def describe(self, rank: int) -> str:
        own = self.ranks[0]
        count = sum(series.count for series in self.ranks)
        mean = sum(series.total for series in self.ranks) / count
        return (
            f"{self.number.value:.6g} is {self.value.name} of rank {rank}, which has read "
            f"{own.count} of {count} samples (batches: {len(own.values)}); the mean over all "
            f"samples is {mean:.6g}"
        )


def recognize(evidence: RunEvidence, log: RankLog) -> Iterator[list[Recognized]]:
    """Yield the wrong values that a number of one place is after each pass."""
    finished = [one_pass for one_pass in log.passes if one_pass.is_complete]
    own_means = {series.mean for each in finished for series in batch_series(each).values()}
    found: dict[Hashable, list[Recognized]] = defaultdict(list)
    failed: set[Hashable] = set()
    logs = [log, *(other for other in evidence.ranks if other is not log)]
    for is_training in (False, True):
        passes_of = [x.training_passes if is_training else x.evaluation_passes for x in logs]
        for number, one_pass in enumerate(passes_of[0]):
            shown = numbers_by_position(log, one_pass) if one_pass.is_complete else {}
            aligned = [each[number] for each in passes_of if number < len(each)]
            complete = [each for each in aligned if each.is_complete]
            first, *others = map(batch_series, complete) if complete else [{}]
            is_share = is_training or not have_same_samples(complete)
            for key, own in first.items() if shown else ():
                ranks = [own, *(other[key] for other in others if key in other)]
                for value in wrong_values(ranks, is_training, own_means):
                    if value.is_of_one and (shows_all(shown, value) or not is_share):
                        continue
                    for position, numbers in shown.items():
                        place = value.rule, value.name, key, position, one_pass.start.fingerprint
                        if all(value.fits(each, log.rank) for each in numbers):
                            found[place] += [Recognized(each, value, ranks) for each in numbers]
                        else:
                            failed.add(place)
    yield from (recognized for place, recognized in found.items() if place not in failed)


def have_same_samples(passes: list[LoaderPass]) -> bool:
    """Return whether several ranks have read the same samples, and none of them a share."""
    first, *others = [Counter(each.samples or []) for each in passes] or [Counter()]
    return bool(first and others) and all(other == first for other in others)


# By position: a line, its caller, and which of its numbers.
Numbers = dict[Hashable, list[ShownNumber]]


def numbers_by_position(log: RankLog, one_pass: LoaderPass) -> Numbers:
    """Return what is shown at each position after a pass, until another one or training begins.

    What a position shows only after the next passes counts as well.
    """
    shown: Numbers = {}
    of_pass: Numbers = defaultdict(list)
    for event in log.events_until_training(one_pass):
        if isinstance(event, PassStart):
            shown = of_pass | shown
            of_pass = defaultdict(list)
        caller = event.caller if isinstance(event, ShownText) else None
        for index, number in enumerate(numbers_of(event)):
            of_pass[event.at, caller, index].append(number)
    return of_pass | shown


def shows_all(shown: Numbers, value: WrongValue) -> bool:
    """Return whether a value of all ranks is shown too, which is told from that of one."""
    numbers = [each for numbers in shown.values() for each in numbers]
    long = [each for each in numbers if each.digits >= ENOUGH_DIGITS]
    return any(n.is_any_of(value.right) and not n.is_any_of([value.value]) for n in long)


def names_rank(shown: ShownText, rank: int) -> bool:
    """Return whether a text says of which rank it is."""
    is_first = shown.text.lstrip(" [(<#").startswith(str(rank))
    file = PurePath(shown.path).name if isinstance(shown, WrittenText) else ""
    is_own_file = str(rank) in re.findall(r"\d+", file)
    return is_first or is_own_file or NAMES_RANK.search(f"{file} {shown.text}") is not None


def are_certain(rule: str, numbers: list[ShownNumber]) -> bool:
    """Return whether numbers have enough digits; one that is shown again proves nothing more."""
    digits = {number.value: number.digits for number in numbers}.values()
    is_long = max(digits, default=0) >= ENOUGH_DIGITS
    if rule == "one-rank-loss":
        return is_long and sum(digits) >= DIGITS_OF_LOSSES
    return is_long or sum(digits) >= ENOUGH_DIGITS_OF_SEVERAL


def losses_of_one_rank(evidence: RunEvidence) -> Findings:
    """Find a line that shows the loss of its rank's own batch each time."""
    ranks = evidence.ranks
    losses = [[event.loss or 0.0 for event in log.select(Backward)] for log in ranks]
    means = [fmean(column) for column in zip(*losses, strict=False)]
    for log, own in zip(ranks, losses, strict=True):
        shown: dict[Hashable, list[tuple[ShownNumber, bool, bool]]] = defaultdict(list)
        count = 0
        for event in log.select(Backward, ShownText):
            count += isinstance(event, Backward)
            near = slice(max(0, count - 1), count + 1)  # the losses before and after
            numbers = list(numbers_of(event))
            is_right = any(number.is_any_of(means[near], MULTIPLES) for number in numbers)
            is_said = isinstance(event, ShownText) and not names_rank(event, log.rank)
            for index, number in enumerate(numbers):
                is_own = is_said and number.is_any_of(own[near], MULTIPLES)
                place = event.at, getattr(event, "caller", None), index
                shown[place].append((number, is_own, is_right))
        for values in shown.values():
            # By chance a loss is as that of all.
            wrong = [number for number, _, is_right in values if not is_right]
            is_each = all(is_own for _, is_own, _ in values) and 2 * len(wrong) > len(values) > 1
            if is_each and are_certain("one-rank-loss", wrong):
                line = line_that_shows(evidence, wrong[0].event)
                text = f"{wrong[0].value:.6g} is the loss of one batch of rank {log.rank}, and so "
                text += f"are all {len(values)} numbers that this line shows"
                yield evidence.finding("one-rank-loss", line, text, log.rank)
                return


def line_that_shows(evidence: RunEvidence, shown: Shown) -> CodeLine | None:
    """Return the line that shows a number, or that calls a function which prints for several."""
    if not isinstance(shown, ShownText):
        return shown.at
    prints = [event for _, event in evidence.run.select(type(shown)) if event.at == shown.at]
    callers = {event.caller for event in prints}
    return shown.caller if len(callers) > 1 else shown.at


@rank_rule("mean-of-means")
def reduced_means(evidence: RunEvidence) -> Findings:
    """Find means of which each rank has other numbers of values, and that a collective adds up."""
    reductions = [
        [event for event in log.select(ScriptCollective) if event.op in ("all_reduce", "reduce")]
        for log in evidence.first_ranks
    ]
    for pair in align(reductions):
        counts = list(map(count_of_mean, evidence.first_ranks, pair))
        if pair[0].at == pair[1].at and all(counts) and counts[0] != counts[1]:
            text = f"a mean of {counts[0]} values on rank 0 and one of {counts[1]} on rank 1"
            yield evidence.finding("mean-of-means", pair[0].at, f"{text} are summed")
            return


def count_of_mean(log: RankLog, reduced: ScriptCollective) -> int:
    """Return of how many values a reduced number is the mean; 0 where it is none.

    It is one that was computed as such, or the quotient of a sum and the rows that were evaluated.
    """
    rows = 0
    sums: dict[CodeLine | None, float] = defaultdict(float)
    means: dict[float, int] = {}
    for event in log.select(Forward, Statistic, Backward, ScriptCollective):
        if event.n >= reduced.n:
            break
        if isinstance(event, Backward | ScriptCollective):
            rows = 0
            sums.clear()
        elif isinstance(event, Forward) and not event.grad:
            rows += event.size
        elif isinstance(event, Statistic) and event.is_mean:
            means[event.value] = event.count
        elif isinstance(event, Statistic):
            sums[event.at] += event.value
    means |= {total / rows: rows for total in sums.values() if rows}
    numbers = list(numbers_of(reduced))
    if len(reduced.value) != 1 or not numbers:
        return 0
    return next((means[mean] for mean in means if numbers[0].is_any_of([mean], (1,))), 0)
