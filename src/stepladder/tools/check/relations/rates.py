"""R4: after the same samples the learning rate is that of one process, or a scaled one."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator

from stepladder.tools.check.events import OptimizerStep, ScheduleStep
from stepladder.tools.check.recording import RankLog
from stepladder.tools.check.relations.frozen_runs import FrozenRuns, Violation

CLEAR_FACTOR = 1.5  # a warm-up of a fixed number of steps moves the rest of a schedule a little

Rates = dict[int, list[float]]  # by the number of the optimizer: of each step


def violations(runs: FrozenRuns) -> Iterator[Violation]:
    """Yield the optimizers whose learning rate falls, or rises, at another speed.

    It is compared where the run ends by itself, as a multiple of the one that the optimizer was
    made with. A loop of a fixed number of steps makes as many on all ranks, and is not compared.
    """
    if runs.compared.was_cut_short:  # perhaps it is such a loop
        return
    reference, compared = (read_rates(run.ranks[0]) for run in (runs.reference, runs.compared))
    for number in reference.keys() & compared.keys():
        expected, found = reference[number], compared[number]
        if len(expected) == len(found):
            continue
        # While several ranks make their last step, one process makes these.
        last = expected[-math.ceil(len(expected) / len(found)) :]
        scale = max(1.0, max(found) / max(expected))  # a larger batch may have a larger rate
        if lies_in(found[-1] / scale, last):
            continue
        line = next((event.at for event in runs.compared.ranks[0].select(ScheduleStep)), None)
        text = (
            f"on {runs.base} the learning rate is {last[-1]:.3g} times the first one after "
            f"{len(expected)} steps; on {len(runs.compared.ranks)} ranks {found[-1]:.3g} times "
            f"after {len(found)} steps of the same samples"
        )
        yield Violation("learning-rate", line, math.inf, text)


def read_rates(log: RankLog) -> Rates:
    rates: Rates = defaultdict(list)
    for event in log.select(OptimizerStep):
        if event.first_lr:
            rates[event.optimizer].append(event.lr[0] / event.first_lr)
    return rates


def lies_in(rate: float, rates: list[float]) -> bool:
    return min(rates) / CLEAR_FACTOR <= rate <= max(rates) * CLEAR_FACTOR


def count_compared(runs: FrozenRuns) -> int:
    """Return how many optimizers can be compared whose learning rate changes."""
    if runs.compared.was_cut_short:
        return 0
    return sum(len(set(rates)) > 1 for rates in read_rates(runs.reference.ranks[0]).values())
