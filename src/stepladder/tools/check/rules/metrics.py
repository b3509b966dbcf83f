"""Rules for metrics over several ranks, and for learning-rate schedules."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace

from stepladder.tools.check.events import (
    Backward,
    Forward,
    OptimizerStep,
    Print,
    ScheduleStep,
    ScriptCollective,
)
from stepladder.tools.check.recording import LoaderPass, RankLog
from stepladder.tools.check.rules.batch_means import averages_of_batch_means, line_divided_by_length
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
from stepladder.tools.check.rules.shown_numbers import printed_numbers
from stepladder.tools.check.rules.source_patterns import local_quotients, reduced_quotients
from stepladder.tools.findings.finding import Location
from stepladder.tools.probe.events import CodeLine

WITHOUT_RESULT = ("barrier", "reduce", "gather", "gather_object")  # on ranks other than the first
SCHEDULES_WITHOUT_END = ("LinearLR", "ConstantLR", "PolynomialLR")


@run_rule("mean-of-means")
def mean_of_means(evidence: RunEvidence) -> Findings:
    """Find means that are averaged although they are of different numbers of samples."""
    in_source = [*reduced_means(evidence), *batch_means(evidence), *reduced_shares(evidence)]
    shown = shown_means_of_means(evidence, is_training=False)
    yield from in_source or first_certain(evidence, "mean-of-means", shown)


@run_rule("mean-of-means.training")
def means_of_training(evidence: RunEvidence) -> Findings:
    """Find means of a training pass that are shown, and by their digits are not over its samples.

    This is a note, for weights change from batch to batch, and no mean of their losses is exact.
    """
    shown = shown_means_of_means(evidence, is_training=True)
    for finding in first_certain(evidence, "mean-of-means.training", shown):
        for one_pass in evidence.rank_0.training_passes:
            line = line_that_averages(evidence, one_pass.line)
            if line is not None:
                finding = replace(finding, location=evidence.location(line))
                break
        yield finding


def batch_means(evidence: RunEvidence) -> Findings:
    """Find loops over uneven batches that add up a mean of each, and divide by their number."""
    for loop_line, unevenness in uneven_evaluations(evidence):
        line = line_that_averages(evidence, loop_line)
        if line is not None:
            text = f"means of batches are averaged, and {unevenness}"
            yield evidence.finding("mean-of-means", line, text)
            return


def line_that_averages(evidence: RunEvidence, recorded: CodeLine | None) -> CodeLine | None:
    """Return the line that averages the means of batches which a recorded loop adds up."""
    loop = evidence.location(recorded)
    file = evidence.source_file(recorded)
    for means, line in averages_of_batch_means(file) if file else ():
        if loop.line in means.lines:
            return CodeLine(loop.file, line)
    return None


def reduced_shares(evidence: RunEvidence) -> Findings:
    """Find quotients of the ranks' shares that are summed although the shares differ in size."""
    lines = {
        Location(file.name, line)
        for file in evidence.source.files
        for line in reduced_quotients(file)
    }
    calls = [
        [event for event in log.select(ScriptCollective) if evidence.location(event.at) in lines]
        for log in evidence.first_ranks
    ]
    for pair in align(calls) if evidence.has_several_ranks else ():
        rows = list(map(count_evaluated_rows, evidence.first_ranks, pair))
        if all(rows) and rows[0] != rows[1]:
            yield evidence.finding(
                "mean-of-means",
                pair[0].at,
                f"means of {rows[0]} samples on rank 0 and {rows[1]} on rank 1 are averaged",
            )
            return


def count_evaluated_rows(log: RankLog, collective: ScriptCollective) -> int:
    """Return how many rows models evaluated between the last training and a collective."""
    calls = [call.n for one_pass in log.evaluation_passes for call in one_pass.evaluated_calls]
    evaluated = set(calls)
    rows = 0
    for event in log.select(Forward, Backward, ScriptCollective):
        if event.n >= collective.n:
            break
        if not isinstance(event, Forward):
            rows = 0
        elif not event.grad or event.n in evaluated:
            rows += event.size
    return rows


def uneven_evaluations(evidence: RunEvidence) -> Iterator[tuple[CodeLine, str]]:
    """Yield the evaluations of any rank whose batches differ in size: the line, and how."""
    for rank, log in enumerate(evidence.ranks):
        for one_pass in log.evaluation_passes:
            sizes = Counter(batch.size for batch in one_pass.batches)
            if one_pass.line and len(sizes) > 1:
                text = ", ".join(f"{count} of {size}" for size, count in sizes.most_common(3))
                yield one_pass.line, f"batches of rank {rank} have different sizes: {text} samples"


def reduced_means(evidence: RunEvidence) -> Findings:
    """Find means over values, whose number differs by rank, that are summed over the ranks."""
    for pair in align(map(reductions_of_means, evidence.first_ranks)):
        counts = [event.mean_of for event in pair]
        if pair[0].at == pair[-1].at and counts[0] != counts[-1]:
            yield evidence.finding(
                "mean-of-means",
                pair[0].at,
                f"a mean of {counts[0]} values on rank 0 and one of {counts[1]} on rank 1 are "
                f"summed",
            )
            return


def reductions_of_means(log: RankLog) -> list[ScriptCollective]:
    return [
        event
        for event in log.select(ScriptCollective)
        if event.mean_of is not None and event.op in ("all_reduce", "reduce")
    ]


@rank_rule("local-count", "local-count.means")
def local_count(evidence: RunEvidence) -> Findings:
    """Find reduced sums that are divided by the count of one rank, or not at all."""
    means = shown_sums_of_means(evidence)
    sums = shown_sums_by_own_count(evidence)
    found = [
        *sums_by_local_counts(evidence),
        *first_certain(evidence, "local-count.means", means),
        *first_certain(evidence, "local-count", sums),
    ]
    yield from found[:1]


def sums_by_local_counts(evidence: RunEvidence) -> Findings:
    """Find reduced sums that the source divides by the count of one rank."""
    lines = evidence.locations(ScriptCollective)
    for file in evidence.source.files:
        for reduction_line, line, text in local_quotients(file):
            if Location(file.name, reduction_line) in lines:
                yield evidence.finding("local-count", CodeLine(file.name, line), text)
                return


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
    line = line_divided_by_all(evidence, passes[0])
    divided = "and its sum is divided by the length of the whole data set"
    if prints[0] is not None and not any(prints[1:]):
        shown = f"no collective follows, and it prints{f'; {divided}' if line else ''}"
        return line_that_shows(evidence, prints[0]), shown
    if line is not None and prints[0] is not None:
        return line, divided
    share = shares_shown(evidence.ranks, passes)
    shown = "and each rank prints the value of its share, not saying whose it is"
    return line_that_shows(evidence, share), shown


def describe_share(passes: Passes) -> str:
    counts = [one_pass.sample_count for one_pass in passes]
    return f"rank 0 evaluates {counts[0]} of {sum(counts)} samples"


def line_divided_by_all(evidence: RunEvidence, one_pass: LoaderPass) -> CodeLine | None:
    """Return the line after an evaluation that divides by the length of the whole data set."""
    loop = one_pass.line
    file = evidence.source_file(loop)
    line = line_divided_by_length(file, loop.line) if loop and file else None
    return CodeLine(loop.file, line) if loop and line else None


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
