"""Rules for evaluations: samples that count twice, training mode, graphs that are kept."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from operator import ne
from pathlib import PurePath
from typing import Literal

from stepladder.tools.check.events import (
    Backward,
    Forward,
    PassStart,
    Save,
    ScriptCollective,
    ShownText,
    Statistic,
)
from stepladder.tools.check.recording import LoaderPass, RankLog
from stepladder.tools.check.rules.evidence import (
    Findings,
    Passes,
    RunEvidence,
    are_complete,
    rank_rule,
    run_rule,
)
from stepladder.tools.check.rules.samples import (
    describe_drop_last,
    have_same_data,
    shares_of,
    unread_samples,
)
from stepladder.tools.probe.events import ProbeEvent

# Collectives without a result on ranks other than the first.
WITHOUT_RESULT = ("barrier", "reduce", "gather", "gather_object")
ReducedCount = Literal["padded", "corrected", "unknown"]
EVENTS_AFTER_PASS = 200  # that are searched for the reduction of an evaluation's counts


@rank_rule("padded-evaluation", "overlapping-shards")
def padded_evaluation(evidence: RunEvidence) -> Findings:
    """Find evaluations that count samples twice: shares are filled up, or overlap."""
    for passes in filter(is_shared_evaluation, evidence.evaluation_passes()):
        indices = [index for one_pass in passes for index in one_pass.indices or []]
        count = len(indices)
        distinct = len(set(indices))
        if count == distinct or not have_same_data(passes):
            continue
        # DistributedSampler adds fewer than that to make shares equal.
        if passes[0].start.distributed and count - distinct >= len(passes):
            yield evidence.finding(
                "overlapping-shards",
                passes[0].sampler_line,
                f"in evaluation pass {passes[0].number} {count - distinct} of {count} samples are "
                f"read more than once, where a sampler pads fewer than {len(passes)}",
                severity="warning",
            )
            return
        reduced = find_reduced_count(evidence, passes, count, distinct)
        # What each rank shows of its share counts no sample twice.
        is_reduced = reduced == "padded" or any(map(has_collective_after, evidence.ranks, passes))
        if is_reduced and reduced != "corrected":
            detail = f"; the reduced count is {count}" if reduced == "padded" else ""
            yield evidence.finding(
                "padded-evaluation",
                passes[0].sampler_line,
                f"{distinct} samples are counted as {count}, so a mean moves by up to "
                f"{100 * (count - distinct) / count:.2g} %{detail}",
            )
            return


def is_shared_evaluation(passes: Passes) -> bool:
    """Return whether a sampler divides the evaluated samples among the ranks."""
    first = passes[0]
    has_indices = all(one_pass.indices is not None for one_pass in passes)
    is_known = has_indices and first.start.length is not None
    return are_complete(passes) and is_known and first.is_divided


@run_rule("samples-lost.evaluation")
def samples_never_evaluated(evidence: RunEvidence) -> Findings:
    """Find samples that no rank reads in any evaluation, since drop_last drops a remainder."""
    passes_by_data: dict[str, list[LoaderPass]] = defaultdict(list)
    for log in evidence.ranks:
        for one_pass in log.evaluation_passes:
            passes_by_data[one_pass.start.fingerprint].append(one_pass)
    for log in evidence.ranks:
        for one_pass in log.training_passes:
            passes_by_data.pop(one_pass.start.fingerprint, None)
    for passes in passes_by_data.values():
        first = passes[0]
        unread = unread_samples(tuple(passes), [])
        if unread and describe_drop_last(first):
            yield evidence.finding(
                "samples-lost.evaluation",
                first.loader_line,
                f"{len(unread)} of {first.start.length} samples are read by no rank in any "
                f"evaluation{describe_drop_last(first)}",
            )


@run_rule("augmented-evaluation")
def augmented_evaluation(evidence: RunEvidence) -> Findings:
    """Find samples that are drawn anew each time they are evaluated.

    Equal batches are compared: among other samples one may be filled up to another length.
    """
    batches: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for one_pass in evidence.rank_0.evaluation_passes:
        for batch in one_pass.batches:
            key = (one_pass.start.fingerprint, tuple(batch.indices or ()))
            rows = batches.setdefault(key, batch.rows)
            changed = sum(map(ne, rows, batch.rows))
            if batch.indices and changed > len(rows) / 2:
                yield evidence.finding(
                    "augmented-evaluation",
                    one_pass.loader_line,
                    f"{changed} of {len(rows)} samples of a batch have other values in pass "
                    f"{one_pass.number} than when they were evaluated before",
                )
                return


@run_rule("no-eval-mode")
def no_eval_mode(evidence: RunEvidence) -> Findings:
    """Find evaluations with dropout or batch norm in training mode."""
    for one_pass in evidence.rank_0.evaluation_passes:
        calls = [event for event in one_pass.evaluated_calls if event.live]
        if calls and one_pass.is_complete:
            yield evidence.finding(
                "no-eval-mode",
                calls[0].at,
                f"in pass {one_pass.number}, which trains nothing, {calls[0].live} layers "
                f"(dropout, batch norm) are in training mode",
            )
            return


@run_rule("eval-keeps-graph")
def eval_keeps_graph(evidence: RunEvidence) -> Findings:
    """Find evaluations that build graphs without a backward pass, which costs memory and time."""
    log = evidence.rank_0
    for one_pass in filter(log.evaluates_with_graph, log.passes):
        calls = [call for call in one_pass.select(Forward) if call.grad]
        if len(calls) >= 2:
            yield evidence.finding(
                "eval-keeps-graph",
                calls[0].at,
                f"in pass {one_pass.number}, which trains nothing, {len(calls)} calls of the model "
                f"build a graph",
            )
            return


def find_reduced_count(
    evidence: RunEvidence, passes: Passes, padded: int, distinct: int
) -> ReducedCount:
    """Return which number of samples the ranks added up in a pass and after it."""
    sums: Counter[int] = Counter()
    collectives: list[ScriptCollective] = []
    for log, one_pass in zip(evidence.ranks, passes, strict=True):
        of_rank = [
            e for e in events_of_evaluation(log, one_pass) if isinstance(e, ScriptCollective)
        ]
        collectives += of_rank
        for index, value in enumerate(value for event in of_rank for value in event.value):
            sums[index] += int(value) if abs(value) < 1e15 else 0
    numbers = {number for event in collectives for number in event.numbers}
    if len(numbers) == distinct:  # gathered by sample number, so that each sample counts once
        return "corrected"
    if padded in sums.values():
        return "padded"
    if distinct in sums.values():
        return "corrected"
    if any("gather" in event.op for event in collectives):
        counts = counts_of_sums(events_of_evaluation(evidence.rank_0, passes[0]))
        return "padded" if padded in counts and distinct not in counts else "corrected"
    return "unknown"


def counts_of_sums(events: list[ProbeEvent]) -> Iterable[int]:
    """Return how many values each line has added up, as in sums of what was gathered."""
    counts: Counter[object] = Counter()
    for event in events:
        if isinstance(event, Statistic):
            counts[event.at] += event.count
    return counts.values()


def events_of_evaluation(log: RankLog, one_pass: LoaderPass) -> list[ProbeEvent]:
    """Return what happens in a pass, and after it before the next pass or training."""
    events = list(one_pass.events)
    for event in log.events[one_pass.index_after : one_pass.index_after + EVENTS_AFTER_PASS]:
        if isinstance(event, PassStart | Backward):
            break
        events.append(event)
    return events


@rank_rule("one-rank-metric.best")
def best_of_one_rank(evidence: RunEvidence) -> Findings:
    """Find weights that are saved after an evaluation of one rank's share that nothing shows.

    What is shown has its own finding. What is not shown decides whether they are saved.
    """
    evaluations = [p for p in evidence.evaluation_passes() if are_complete(p) and are_shares(p)]
    for passes in evaluations:
        if any(map(has_collective_after, evidence.ranks, passes)):
            continue
        following = list(evidence.rank_0.events_until_training(passes[0]))
        saves = [event for event in following if isinstance(event, Save) and event.model]
        is_shown = any(isinstance(event, ShownText) for event in following)
        if saves and not is_shown:
            counts = [sum(batch.size for batch in one_pass.batches) for one_pass in passes]
            yield evidence.finding(
                "one-rank-metric.best",
                saves[0].at,
                f"rank 0 evaluates {counts[0]} of {sum(counts)} samples, no collective follows, "
                f"and it writes {PurePath(saves[0].path).name}",
                0,
            )
            return


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
