"""The rule for learning-rate schedules that do not fit the steps of the optimizer."""

from __future__ import annotations

from collections import Counter, defaultdict

from stepladder.tools.check.events import Backward, OptimizerStep, ScheduleStep
from stepladder.tools.check.recording import RankLog
from stepladder.tools.check.rules.evidence import Findings, RunEvidence, run_rule

SCHEDULES_WITHOUT_END = ("LinearLR", "ConstantLR", "PolynomialLR")


@run_rule("schedule-per-rank")
def schedule_per_rank(evidence: RunEvidence) -> Findings:
    """Find learning-rate schedules that do not fit the number of optimizer steps."""
    log = evidence.rank_0
    steps = len(log.select(OptimizerStep))
    calls_by_schedule: dict[int, list[ScheduleStep]] = defaultdict(list)
    for event in log.select(ScheduleStep):
        if event.at and event.direct:
            calls_by_schedule[event.schedule].append(event)
    for schedule, calls in calls_by_schedule.items():
        per_step = count_calls_per_step(log, schedule)
        if per_step > 1 and evidence.has_several_ranks:
            yield evidence.finding(
                "schedule-per-rank",
                calls[0].at,
                f"{calls[0].cls}.step is called {per_step} times per optimizer step, on each "
                f"of {evidence.run.world_size} ranks",
            )
            return
        yield from wrongly_sized_schedule(evidence, log, calls, steps)


def count_calls_per_step(log: RankLog, schedule: int) -> int:
    """Return the usual number of calls of a schedule between two optimizer steps, at least 1."""
    frequencies: Counter[int] = Counter()
    calls = -1  # before the first step
    for event in log.select(OptimizerStep, ScheduleStep):
        if isinstance(event, OptimizerStep):
            if calls >= 0:
                frequencies[calls] += 1
            calls = 0
        elif isinstance(event, ScheduleStep) and event.schedule == schedule and calls >= 0:
            calls += 1
    if calls > 0:
        frequencies[calls] += 1
    if not frequencies:
        return 1
    usual = frequencies.most_common(1)[0][0]
    intervals = sum(frequencies.values())
    is_one_step_without_backward = intervals == 1 and usual > 1 and not log.select(Backward)
    if intervals >= 2 or is_one_step_without_backward:
        return usual
    return 1


def wrongly_sized_schedule(
    evidence: RunEvidence, log: RankLog, calls: list[ScheduleStep], steps: int
) -> Findings:
    """Compare the calls of a schedule with its horizon, the number of steps it is sized for.

    Too many calls are certain at any time, too few only where the script has ended by itself.
    """
    name = calls[0].cls
    horizon = calls[0].horizon
    if not horizon or name in SCHEDULES_WITHOUT_END:
        return
    count = len(calls)
    epochs = len(log.training_passes)
    world_size = evidence.run.world_size
    is_called_each_step = count >= 0.9 * steps and steps > 2
    has_ended = evidence.run.has_finished and not evidence.run.was_cut_short
    is_sized_for_all_ranks = (
        abs(horizon - world_size * count) <= epochs * world_size + 1 and horizon > 1.5 * count
    )
    is_called_each_epoch = count == epochs and epochs > 0
    is_sized_for_steps = steps >= 3 * epochs and abs(horizon - steps) <= epochs
    texts = []
    if is_called_each_step and count > horizon + 1:
        texts.append(
            f"{name} is sized for {horizon} steps and has been stepped {count} times in {epochs} "
            f"epochs"
        )
    elif (
        has_ended
        and evidence.has_several_ranks
        and epochs
        and count > 3
        and is_called_each_step
        and is_sized_for_all_ranks
    ):
        texts.append(
            f"{name} is sized for {horizon} steps, {world_size} times the {count} that each of "
            f"{world_size} ranks makes: it ends half way"
        )
    if has_ended and is_called_each_epoch and is_sized_for_steps:
        texts.append(
            f"{name} is sized for {horizon} steps (there are {steps}), and is stepped once per "
            f"epoch: {count} times"
        )
    for text in texts:
        yield evidence.finding("schedule-per-rank", calls[0].at, text)
