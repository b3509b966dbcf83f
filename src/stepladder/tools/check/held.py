"""What held in the runs of a script, a line for each relation: facts, no judgement."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from stepladder.core.numbers import format_count
from stepladder.tools.check.events import (
    BeforeStep,
    Digests,
    FileWrite,
    NotFinite,
    OptimizerStep,
    ScriptCollective,
)
from stepladder.tools.check.rules.evidence import RunEvidence, align, are_complete
from stepladder.tools.check.rules.model import is_sharded
from stepladder.tools.check.rules.samples import shares_of


def describe_run(evidence: RunEvidence) -> Iterator[str]:
    """Yield what held in the run of the script as it is."""
    if not evidence.ranks:
        return
    for describe in DESCRIBED:
        if line := describe(evidence):
            yield line


def describe_samples(evidence: RunEvidence) -> str:
    """Return how often the samples of a training pass are read, over all ranks."""
    known = [
        shares
        for passes in evidence.training_passes()
        if are_complete(passes) and (shares := shares_of(passes))
    ]
    if not known:
        return ""
    counts = [Counter(sample for share in shares for sample in share) for shares in known]
    times = {number for count in counts for number in count.values()}
    often = f"{min(times)} to {max(times)} times" if len(times) > 1 else f"{min(times)} times"
    if times == {1}:
        often = "once"
    count, length = len(counts[0]), evidence.training_passes()[0][0].start.length or 0
    samples = format_count(max(count, length), "sample")
    if count < length:
        samples = f"{count} of {samples}"
    return f"samples: {samples}, each {often} an epoch, in {format_count(len(known), 'epoch')}"


def describe_weights(evidence: RunEvidence) -> str:
    """Return before how many steps all ranks hold the same weights."""
    steps = align(log.select(BeforeStep) for log in evidence.ranks)
    if not evidence.has_several_ranks or not steps:
        return ""
    if is_sharded(evidence.ranks):
        return "weights: each rank holds a part of them"
    same = sum(all(event.before == events[0].before for event in events) for events in steps)
    ranks = len(evidence.ranks)
    return f"weights: the same on {ranks} ranks before {same} of {len(steps)} recorded steps"


def describe_rates(evidence: RunEvidence) -> str:
    rates = [rates_of(log.select(OptimizerStep)) for log in evidence.ranks]
    if not rates[0]:
        return ""
    path = f"{rates[0][0]:g}"
    if len(set(rates[0])) > 1:
        path += f" to {rates[0][-1]:g}"
    if rates.count(rates[0]) == len(rates):
        return f"learning rate: {path}, the same on all ranks"
    return f"learning rate: {path} on rank 0"


def rates_of(steps: Sequence[OptimizerStep]) -> list[float]:
    return [rate for event in steps for rate in event.lr[:1]]


def describe_calls(evidence: RunEvidence) -> str:
    calls = [[event.op for event in log.select(ScriptCollective)] for log in evidence.ranks]
    if not evidence.has_several_ranks or not calls[0] or calls.count(calls[0]) != len(calls):
        return ""
    return f"calls: {format_count(len(calls[0]), 'collective')} in the same order on all ranks"


def describe_files(evidence: RunEvidence) -> str:
    writers: dict[str, set[int]] = {}
    for rank, event in evidence.run.select(FileWrite):
        writers.setdefault(event.path, set()).add(rank)
    if not writers or any(len(ranks) > 1 for ranks in writers.values()):
        return ""
    return f"files: {format_count(len(writers), 'file')}, each written by one rank"


def describe_learning(evidence: RunEvidence) -> str:
    """Return how many weights have changed since the first step, and whether all is finite."""
    before: Digests = {}
    for earlier in reversed(evidence.rank_0.select(BeforeStep)):
        before |= earlier.before
    after: Digests = {}
    for step in evidence.rank_0.select(OptimizerStep):
        after |= step.after
    # What is divided among ranks has no hash.
    compared = [name for name in before.keys() & after.keys() if after[name]]
    if not compared:
        return ""
    changed = sum(before[name] != after[name] for name in compared)
    line = f"training: {changed} of {format_count(len(compared), 'weight tensor')} changed"
    if not evidence.run.select(NotFinite):
        line += "; no loss or gradient is nan"
    return line


DESCRIBED = (
    describe_samples,
    describe_weights,
    describe_rates,
    describe_calls,
    describe_files,
    describe_learning,
)
