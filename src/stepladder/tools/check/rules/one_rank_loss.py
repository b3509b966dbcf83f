"""The rule for values of one rank's training that are shown after each pass as those of all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from stepladder.tools.check.events import Print
from stepladder.tools.check.rules.evidence import (
    Findings,
    Passes,
    RunEvidence,
    align,
    are_complete,
    rank_rule,
)
from stepladder.tools.check.rules.shown_metrics import line_that_shows, names_rank
from stepladder.tools.check.rules.shown_numbers import (
    ENOUGH_DIGITS,
    BatchSeries,
    ShownNumber,
    batch_series,
    shown_numbers,
)
from stepladder.tools.probe.events import CodeLine

Position = tuple[CodeLine | None, int]  # a line, and a number of what it shows
# What a number may be, by how it is called.
VALUES: dict[str, Callable[[BatchSeries], float]] = {
    "the mean over the samples": lambda series: series.mean_of_samples,
    "the mean over the batches": lambda series: series.mean_of_means,
    "the sum of the batch losses": lambda series: sum(series.values),
    "the loss of the last batch": lambda series: series.values[-1],
}
VALUES_OF_SUMS = list(VALUES)[:2]  # where there is a sum over each batch, as of hits


@dataclass(frozen=True)
class ShownValue:
    """A number that is shown after a pass, and what it may be.

    Args:
        number: The number.
        name: The value that it may be, one of VALUES.
        series: The numbers of which each rank may have made it.
    """

    number: ShownNumber
    name: str
    series: tuple[BatchSeries, ...]

    @property
    def is_of_rank_0(self) -> bool:
        return self.number.factor_of(VALUES[self.name](self.series[0])) > 0

    @property
    def is_of_all(self) -> bool:
        """Whether it may be a value of all ranks, by the digits that are shown."""
        average = sum(map(VALUES[self.name], self.series)) / len(self.series)
        return self.number.is_any_of((average, self.mean_of_all))

    @property
    def count_of_all(self) -> int:
        return sum(series.count for series in self.series)

    @property
    def mean_of_all(self) -> float:
        return sum(series.sum_of_samples for series in self.series) / self.count_of_all

    def describe(self) -> str:
        first = self.series[0]
        return (
            f"{self.number.value:.6g} is {self.name} of rank 0, which has trained on "
            f"{first.count} of {self.count_of_all} samples (batches: {len(first.values)}); the "
            f"mean over all samples is {self.mean_of_all:.6g}"
        )


@rank_rule("one-rank-loss")
def one_rank_loss(evidence: RunEvidence) -> Findings:
    """Find values of rank 0's batches that are shown after each training pass, not saying so."""
    for values_of_series in shown_values(evidence):
        if any(map(are_of_all, values_of_series)):
            continue
        for values in values_of_series:
            of_one = [value for value in values if not value.is_of_all]
            if all(value.is_of_rank_0 for value in values) and are_certain(of_one):
                yield evidence.finding(
                    "one-rank-loss",
                    line_that_shows(evidence, of_one[0].number.event),
                    of_one[0].describe(),
                    0,
                )
                return


def are_of_all(values: list[ShownValue]) -> bool:
    """Return whether the value of all ranks is shown after each pass."""
    of_all = [value for value in values if value.is_of_all and not value.is_of_rank_0]
    return len(of_all) == len(values) and are_certain(of_all)


def are_certain(values: list[ShownValue]) -> bool:
    """Return whether numbers have enough digits: losses of all ranks are close to each other."""
    digits = [value.number.digits for value in values]
    return sum(digits) > ENOUGH_DIGITS and max(digits) >= ENOUGH_DIGITS


def shown_values(evidence: RunEvidence) -> Iterator[list[list[ShownValue]]]:
    """Yield what is shown after the passes, for each line that computes a number of each batch.

    Each list has one value at one position, after each of the passes that show it.
    """
    values: dict[int, dict[tuple[Position, str], list[ShownValue]]] = {}
    for passes in filter(are_complete, evidence.training_passes()):
        shown = numbers_by_position(evidence, passes)
        for index, series in enumerate(align(map(batch_series, passes))):
            if not all(other.is_like(series[0]) for other in series):
                continue
            of_series = values.setdefault(index, defaultdict(list))
            for position, number in shown.items():
                for name in VALUES if series[0].are_means else VALUES_OF_SUMS:
                    of_series[position, name].append(ShownValue(number, name, series))
    for of_series in values.values():
        yield list(of_series.values())


def numbers_by_position(evidence: RunEvidence, passes: Passes) -> dict[Position, ShownNumber]:
    """Return the numbers that rank 0 shows once after a pass, not saying of which rank."""
    numbers: dict[CodeLine | None, list[ShownNumber]] = defaultdict(list)
    log = evidence.rank_0
    for number in shown_numbers(log.events[passes[0].index_after :]):
        event = number.event
        if isinstance(event, Print) and not names_rank(event, log.rank):
            numbers[event.at].append(number)
    return {
        (line, index): number
        for line, of_line in numbers.items()
        for index, number in enumerate(of_line)
        if of_line[0].event is of_line[-1].event
    }
