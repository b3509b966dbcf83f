"""Metrics that are wrong by their values: what is shown is another mean than it should be."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

from stepladder.tools.check.events import Print, ScriptCollective
from stepladder.tools.check.recording import LoaderPass, RankLog
from stepladder.tools.check.rules.evidence import Findings, Passes, RunEvidence, align
from stepladder.tools.check.rules.shown_numbers import (
    BatchSeries,
    ShownNumber,
    are_no_coincidence,
    batch_series,
    known_means,
    numbers_after,
    printed_numbers,
    reduced_series,
    shown_numbers,
)
from stepladder.tools.check.rules.source_patterns import prints_its_arguments
from stepladder.tools.probe.events import CodeLine

Recognized = tuple[ShownNumber, str]  # a number, and what it is
SumOfMeans = tuple[ShownNumber, tuple[float, ...]]  # a number, and the means of the ranks
SHARE_OF_ALL = 0.75
DIGITS_OF_SHARE = 2  # of each rank's number
NAMES_RANK = re.compile(r"rank|gpu|cuda|device|worker|process|node|local|shard|replica", re.I)


def passes_with_numbers(
    log: RankLog, passes: Iterable[LoaderPass]
) -> Iterator[tuple[BatchSeries, ShownNumber]]:
    """Yield the series of each complete pass, with each number that is shown after it."""
    for one_pass in passes:
        if one_pass.is_complete:
            shown = list(shown_numbers(log.events[one_pass.index_after :]))
            for series in batch_series(one_pass):
                for number in shown:
                    yield series, number


def first_certain(evidence: RunEvidence, rule: str, recognized: Iterable[Recognized]) -> Findings:
    """Find the first number by which a mistake is no coincidence."""
    numbers: list[ShownNumber] = []
    for number, text in recognized:
        numbers.append(number)
        if are_no_coincidence(numbers):
            line = line_that_shows(evidence, number.event)
            yield evidence.finding(rule, line, f"{number.value:.6g} is {text}")
            return


def shown_means_of_means(evidence: RunEvidence, is_training: bool) -> Iterator[Recognized]:
    """Yield the numbers that are the mean of the means of batches that differ in size.

    Args:
        evidence: The run.
        is_training: Whether the batches are those of training passes, and not of evaluations.
    """
    for log in evidence.ranks:
        passes = log.training_passes if is_training else log.evaluation_passes
        complete = [one_pass for one_pass in log.passes if one_pass.is_complete]
        means = [series.mean_of_samples for each in complete for series in batch_series(each)]
        for series, number in passes_with_numbers(log, passes):
            factor = number.factor_of(series.mean_of_means)
            right = factor * series.mean_of_samples
            if factor and not number.is_any_of(means):
                yield (
                    number,
                    f"the mean of the means of {len(series.values)} batches of "
                    f"{min(series.sizes)} to {max(series.sizes)} samples; over all samples it is "
                    f"{right:.6g}",
                )


def shown_means_by_samples(evidence: RunEvidence) -> Iterator[Recognized]:
    """Yield the numbers that are a sum of batch means by the number of samples."""
    for log in evidence.ranks:
        for series, number in passes_with_numbers(log, log.passes):
            total = sum(series.values)
            for count in {series.count, series.data_length}:
                has_fewer_batches = count > 1.5 * len(series.values)
                if series.are_means and has_fewer_batches and number.factor_of(total / count) == 1:
                    yield (
                        number,
                        f"the sum of {len(series.values)} batch means by {count} samples; their "
                        f"mean is {series.mean_of_means:.6g}",
                    )


def shown_sums_of_means(evidence: RunEvidence) -> Iterator[Recognized]:
    """Yield the numbers that are the sum of the ranks' means, where their average is meant."""
    for number, values in [*shown_totals(evidence), *shown_means_of_totals(evidence)]:
        means = " and ".join(f"{value:.6g}" for value in values[:2])
        yield (
            number,
            f"the sum of the ranks' means {means}; their average is "
            f"{sum(values) / len(values):.6g}",
        )


def shown_totals(evidence: RunEvidence) -> Iterator[SumOfMeans]:
    """Yield the numbers that are shown after a collective, and are a sum of the ranks' means."""
    calls_of_ranks = [sums_by_line(log) for log in evidence.ranks]
    may_be_running_sums = first_calls_of_passes(evidence.rank_0)
    for line, calls_of_first in calls_of_ranks[0].items():
        calls_of_all = align(calls[line] for calls in calls_of_ranks)
        shown_after = numbers_after(evidence.rank_0, calls_of_first)
        for calls, shown in zip(calls_of_all, shown_after, strict=False):
            if calls[0].n in may_be_running_sums:
                continue
            for values in align(call.value for call in calls):
                total = sum(values)
                numbers = [number for number in shown if total and number.is_equal(total)]
                if numbers and are_means(evidence, calls, values):
                    yield numbers[0], values


def first_calls_of_passes(log: RankLog) -> set[int]:
    """Return the collectives in the first batches: a sum over batches begins with their value."""
    first_calls: set[int] = set()
    for one_pass in log.passes:
        first: dict[CodeLine | None, int] = {}
        for event in one_pass.events:
            if isinstance(event, ScriptCollective):
                first.setdefault(event.at, event.n)
        first_calls.update(first.values())
    return first_calls


def shown_means_of_totals(evidence: RunEvidence) -> Iterator[SumOfMeans]:
    """Yield the numbers after a pass that are a mean of what a collective summed in each batch."""
    for passes in align(log.passes for log in evidence.ranks):
        shown = list(shown_numbers(evidence.rank_0.events[passes[0].index_after :]))
        for values in reduced_means(passes):
            for number in shown:
                if len(passes[0].batches) > 1 and number.factor_of(sum(values)) == 1:
                    yield number, values


def reduced_means(passes: Passes) -> Iterator[tuple[float, ...]]:
    """Yield the ranks' means of a batch mean that a collective adds up in each batch of a pass."""
    means_of_ranks = [
        {series.line: series.mean_of_means for series in reduced_series(one_pass)}
        for one_pass in passes
    ]
    for line in means_of_ranks[0]:
        means = tuple(by_line[line] for by_line in means_of_ranks if line in by_line)
        if len(means) == len(passes):
            yield means


def sums_by_line(log: RankLog) -> dict[CodeLine | None, list[ScriptCollective]]:
    """Return the collectives of few numbers that add up, by their line."""
    calls: dict[CodeLine | None, list[ScriptCollective]] = defaultdict(list)
    for event in log.select(ScriptCollective):
        if event.op in ("all_reduce", "reduce") and event.sums and event.value:
            calls[event.at].append(event)
    return calls


def are_means(
    evidence: RunEvidence, calls: tuple[ScriptCollective, ...], values: tuple[float, ...]
) -> bool:
    """Return whether each rank's value is a mean that it has computed shortly before."""
    return all(
        value != round(value) and ShownNumber.exact(value).is_any_of(known_means(log, call))
        for log, call, value in zip(evidence.ranks, calls, values, strict=False)
    )


def line_that_shows(
    evidence: RunEvidence, shown: Print | ScriptCollective | None
) -> CodeLine | None:
    """Return the line that shows a number, or that calls a function which only prints it."""
    line = shown.at if shown else None
    file = evidence.source_file(line)
    if isinstance(shown, Print) and shown.caller and line and file:
        return shown.caller if prints_its_arguments(file, line.line) else line
    return line


def shares_shown(logs: list[RankLog], passes: Passes) -> Print | None:
    """Return where each rank prints the mean over its own share, without a word for its rank."""
    shown = list(map(print_of_share, logs, passes))
    lines = {event.at if event else None for event in shown}
    return shown[0] if len(lines) == 1 else None


def print_of_share(log: RankLog, one_pass: LoaderPass) -> Print | None:
    """Return the first print after a pass that shows one of its means, and not the rank."""
    means = [series.mean_of_samples for series in batch_series(one_pass)]
    for event in unnamed_prints(log, one_pass):
        numbers = printed_numbers(event)
        if not event.logged and any(
            n.is_any_of(means) for n in numbers if n.digits >= DIGITS_OF_SHARE
        ):
            return event
    return None


def unnamed_prints(log: RankLog, one_pass: LoaderPass) -> Iterator[Print]:
    """Yield what is shown after a pass, until training goes on, that does not name the rank."""
    for event in log.events_until_training(one_pass):
        if isinstance(event, Print) and not names_rank(event, log.rank):
            yield event


def names_rank(shown: Print, rank: int) -> bool:
    """Return whether a text says of which rank it is."""
    is_first = shown.text.lstrip(" [(<#").startswith(str(rank))
    return is_first or NAMES_RANK.search(shown.text) is not None


def shown_parts_of_all(evidence: RunEvidence) -> Iterator[Recognized]:
    """Yield the sums over one rank's share that are divided by the length of the data set."""
    for log in evidence.ranks:
        for series, number in passes_with_numbers(log, log.passes):
            if series.count >= SHARE_OF_ALL * series.data_length:
                continue
            part = series.sum_of_samples / series.data_length
            event = number.event
            is_printed = isinstance(event, Print) and not names_rank(event, log.rank)
            if is_printed and number.factor_of(part):
                yield (
                    number,
                    f"the sum over the {series.count} samples of rank {log.rank}, divided by the "
                    f"length of all {series.data_length}",
                )


def shown_sums_by_own_count(evidence: RunEvidence) -> Iterator[Recognized]:
    """Yield the sums over all ranks that are divided by the number of samples of one."""
    if not evidence.rank_0.select(ScriptCollective):
        return
    for passes in align(log.passes for log in evidence.ranks):
        series_of_ranks = [series for one_pass in passes for series in batch_series(one_pass)]
        for series, number in passes_with_numbers(evidence.rank_0, passes[:1]):
            alike = [other for other in series_of_ranks if other.is_like(series)]
            total = sum(other.sum_of_samples for other in alike)
            is_of_all = len(alike) == len(passes) and total > series.sum_of_samples
            if is_of_all and number.factor_of(total / series.count):
                count = sum(other.count for other in alike)
                yield (
                    number,
                    f"a sum over all ranks by the {series.count} samples of one; all have read "
                    f"{count}",
                )
