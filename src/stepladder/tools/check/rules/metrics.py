"""Rules for metrics over several ranks, and for learning-rate schedules."""

from __future__ import annotations

from collections import Counter, defaultdict

from stepladder.tools.check.events import (
    Backward,
    Forward,
    OptimizerStep,
    Print,
    ScheduleStep,
    ScriptCollective,
    Statistic,
)
from stepladder.tools.check.recording import LoaderPass, RankLog
from stepladder.tools.check.rules.evidence import (
    Findings,
    Passes,
    RunEvidence,
    align,
    are_complete,
    rank_rule,
    run_rule,
)
from stepladder.tools.check.rules.samples import shares_of
from stepladder.tools.check.rules.shown_metrics import (
    first_certain,
    line_that_shows,
    shares_shown,
    shown_means_of_means,
    shown_parts_of_all,
    shown_sums_by_own_count,
    shown_sums_of_means,
)
from stepladder.tools.check.rules.shown_numbers import ShownNumber, printed_numbers
from stepladder.tools.probe.events import CodeLine

WITHOUT_RESULT = ("barrier", "reduce", "gather", "gather_object")  # on ranks other than the first
SCHEDULES_WITHOUT_END = ("LinearLR", "ConstantLR", "PolynomialLR")


@run_rule("mean-of-means")
def mean_of_means(evidence: RunEvidence) -> Findings:
    """Find means that are averaged although they are of different numbers of samples."""
    shown = shown_means_of_means(evidence, is_training=False)
    reduced = list(reduced_means(evidence))
    yield from reduced or first_certain(evidence, "mean-of-means", shown)


@run_rule("mean-of-means.training")
def means_of_training(evidence: RunEvidence) -> Findings:
    """Find means of a training pass that are shown, and by their digits are not over its samples.

    This is a note, for weights change from batch to batch, and no mean of their losses is exact.
    """
    shown = shown_means_of_means(evidence, is_training=True)
    yield from first_certain(evidence, "mean-of-means.training", shown)


def reduced_means(evidence: RunEvidence) -> Findings:
    """Find means over values, whose number differs by rank, that are summed over the ranks."""
    for pair in align(map(reductions, evidence.first_ranks)):
        counts = [count_of_mean(log, e) for log, e in zip(evidence.ranks, pair, strict=False)]
        if pair[0].at == pair[-1].at and all(counts) and counts[0] != counts[-1]:
            yield evidence.finding(
                "mean-of-means",
                pair[0].at,
                f"a mean of {counts[0]} values on rank 0 and one of {counts[1]} on rank 1 are "
                f"summed",
            )
            return


def reductions(log: RankLog) -> list[ScriptCollective]:
    return [event for event in log.select(ScriptCollective) if event.op in ("all_reduce", "reduce")]


def count_of_mean(log: RankLog, reduced: ScriptCollective) -> int | None:
    """Return of how many values a reduced number is the mean; None where it is none.

    A quotient is known by its value: a sum over all rows that were evaluated, by their number.
    """
    if reduced.mean_of is not None or len(reduced.value) != 1 or not reduced.value[0] % 1:
        return reduced.mean_of
    rows = 0
    sums: dict[CodeLine | None, float] = defaultdict(float)
    for event in log.select(Forward, Statistic, Backward, ScriptCollective):
        if event.n >= reduced.n:
            break
        if isinstance(event, Backward | ScriptCollective):
            rows = 0
            sums.clear()
        elif isinstance(event, Forward) and not event.grad:
            rows += event.size
        elif isinstance(event, Statistic) and not event.is_mean:
            sums[event.at] += event.value
    number = ShownNumber.exact(reduced.value[0])
    is_quotient = rows > 0 and any(number.is_equal(total / rows) for total in sums.values())
    if is_quotient:
        return rows
    return None


@rank_rule("local-count", "local-count.means")
def local_count(evidence: RunEvidence) -> Findings:
    """Find reduced sums that are divided by the count of one rank, or not at all."""
    means = shown_sums_of_means(evidence)
    sums = shown_sums_by_own_count(evidence)
    found = [
        *first_certain(evidence, "local-count.means", means),
        *first_certain(evidence, "local-count", sums),
    ]
    yield from found[:1]


@rank_rule("one-rank-metric")
def one_rank_metric(evidence: RunEvidence) -> Findings:
    """Find metrics of one rank's share that are shown as those of all."""
    parts = first_certain(evidence, "one-rank-metric", shown_parts_of_all(evidence))
    yield from list(evaluated_shares(evidence)) or parts


def evaluated_shares(evidence: RunEvidence) -> Findings:
    """Find metrics of an evaluation that are of one rank's share."""
    for passes in evaluations_of_shares(evidence):
        has_result = list(map(has_collective_after, evidence.ranks, passes))
        if any(has_result[1:]):
            continue
        if has_result[0]:
            share = shares_shown(evidence.ranks[1:], passes[1:])
            line = line_that_shows(evidence, share)
            shown = "a collective tells rank 0 of all, and other ranks print their shares too"
        else:
            line, shown = line_that_shows_share(evidence, passes)
        if line is not None:
            text = f"{describe_share(passes)}, {shown}"
            yield evidence.finding("one-rank-metric", line, text, 0)
            return


def evaluations_of_shares(evidence: RunEvidence) -> list[Passes]:
    """Return the evaluations in which each rank has read other samples."""
    return [p for p in evidence.evaluation_passes() if are_complete(p) and are_shares(p)]


def line_that_shows_share(evidence: RunEvidence, passes: Passes) -> tuple[CodeLine | None, str]:
    """Return the line that shows the metric of a share as that of all, and how it is shown."""
    prints = list(map(first_print_after, evidence.ranks, passes))
    if prints[0] is not None and not any(prints[1:]):
        return line_that_shows(evidence, prints[0]), "no collective follows, and it prints"
    share = shares_shown(evidence.ranks, passes)
    shown = "and each rank prints the value of its share, not saying whose it is"
    return line_that_shows(evidence, share), shown


def describe_share(passes: Passes) -> str:
    counts = [one_pass.sample_count for one_pass in passes]
    return f"rank 0 evaluates {counts[0]} of {sum(counts)} samples"


def are_shares(passes: Passes) -> bool:
    """Return whether the ranks have read different samples."""
    shares = shares_of(passes)
    if not shares or not shares[0]:
        return False
    first = set(shares[0])
    return len(first.intersection(shares[1])) < 0.5 * len(first)


def has_collective_after(log: RankLog, one_pass: LoaderPass) -> bool:
    """Return whether all ranks get a result in the pass, or after it."""
    events = [*one_pass.events, *log.events_until_training(one_pass)]
    collectives = [event for event in events if isinstance(event, ScriptCollective)]
    without_result = WITHOUT_RESULT if log.rank else ("barrier",)
    return any(event.op not in without_result for event in collectives)


def first_print_after(log: RankLog, one_pass: LoaderPass) -> Print | None:
    """Return what is printed first after a pass, or logged with a number in it."""
    prints = (e for e in log.events_until_training(one_pass) if isinstance(e, Print))
    return next((e for e in prints if not e.logged or any(printed_numbers(e))), None)


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
