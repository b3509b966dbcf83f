"""The rule for values of one rank's training that are shown after each pass as those of all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from stepladder.tools.check.recording import LoaderPass, RankLog
from stepladder.tools.check.rules.evidence import (
    Findings,
    RunEvidence,
    align,
    are_complete,
    rank_rule,
)
from stepladder.tools.check.rules.shown_metrics import line_that_shows, unnamed_prints
from stepladder.tools.check.rules.shown_numbers import (
    ENOUGH_DIGITS,
    BatchSeries,
    ShownNumber,
    batch_series,
    printed_numbers,
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
        value = VALUES[self.name](self.series[0])
        return self.number.factor_of(value) > 0

    @property
    def is_of_all(self) -> bool:
        """Whether it may be a value of all ranks, by the digits that are shown."""
        values = map(VALUES[self.name], self.series)
        average = sum(values) / len(self.series)
        return self.number.is_any_of((average, self.mean_of_all))

    @property
    def is_reduced(self) -> bool:
        """Whether it certainly is a value of all ranks."""
        is_of_others = self.is_of_all and not self.is_of_rank_0
        return is_of_others and self.number.digits >= ENOUGH_DIGITS

    @property
    def count_of_all(self) -> int:
        return sum(series.count for series in self.series)

    @property
    def mean_of_all(self) -> float:
        total = sum(series.sum_of_samples for series in self.series)
        return total / self.count_of_all

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
    for values in shown_values(evidence):
        of_one = [value for value in values if not value.is_of_all]
        if are_certain(of_one) and all(value.is_of_rank_0 for value in values):
            yield evidence.finding(
                "one-rank-loss",
                line_that_shows(evidence, of_one[0].number.event),
                of_one[0].describe(),
                0,
            )
            return


def are_certain(values: list[ShownValue]) -> bool:
    """Return whether numbers have enough digits: losses of all ranks are close to each other."""
    digits = [value.number.digits for value in values]
    return sum(digits) > ENOUGH_DIGITS and max(digits) >= ENOUGH_DIGITS


def shown_values(evidence: RunEvidence) -> list[list[ShownValue]]:
    """Return what the numbers at each position may be, one number after each of the passes."""
    values: dict[tuple[int, Position, str], list[ShownValue]] = defaultdict(list)
    for passes in filter(are_complete, evidence.training_passes()):
        shown = numbers_by_position(evidence.rank_0, passes[0])
        for index, series in enumerate(align(map(batch_series, passes))):
            of_pass = {
                (index, position, name): ShownValue(number, name, series)
                for position, number in shown.items()
                for name in (VALUES if series[0].are_means else VALUES_OF_SUMS)
            }
            if not any(value.is_reduced for value in of_pass.values()):
                for key, value in of_pass.items():
                    values[key].append(value)
    return list(values.values())


def numbers_by_position(log: RankLog, one_pass: LoaderPass) -> dict[Position, ShownNumber]:
    """Return the numbers that a rank shows last after a pass, not saying of which rank."""
    return {
        (event.at, index): number
        for event in unnamed_prints(log, one_pass)
        for index, number in enumerate(printed_numbers(event))
    }
