"""The rule for ranks that hold other samples under the same indices."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import correlation, pstdev

from stepladder.tools.check.events import Draw
from stepladder.tools.check.recording import LoaderPass, RankLog
from stepladder.tools.check.rules.evidence import Findings, RunEvidence, rank_rule
from stepladder.tools.probe.events import CodeLine

MIN_READ_AGAIN = 10  # samples that are read twice by one rank, and that are read by both
MAX_CORRELATION = 0.5  # of samples that have no more in common than their index


@rank_rule("own-task")
def own_samples(evidence: RunEvidence) -> Findings:
    """Find a data set of which two ranks hold unrelated samples under the same indices.

    A sample that is drawn anew each time it is read says nothing of the data set. Numbers that the
    script draws stand in for data, so for them this is a note.
    """
    first, second = map(constant_samples, evidence.first_ranks)
    common = first.keys() & second.keys()
    sums = [[samples[index][1] for index in common] for samples in (first, second)]
    if are_unrelated(*sums):
        log = evidence.rank_0
        first_pass = log.training_passes[0]
        drawn = {event.fn for event in log.select(Draw) if event.n < first_pass.start.n}
        yield evidence.finding(
            "own-task",
            line_of_draws(log, first_pass),
            f"rank 0 and rank 1 have read {len(common)} samples by the same index in training, and "
            f"each time other ones",
            severity="note" if drawn - {"randperm"} else None,
        )


@rank_rule("own-task")
def own_held_samples(evidence: RunEvidence) -> Findings:
    """Find a data set in memory of which two ranks hold unrelated samples under the same indices.

    It needs no sample that both ranks have read: without set_epoch there is none.
    """
    if any(own_samples(evidence)):
        return
    for first, second, *_ in evidence.training_passes()[:1]:
        is_divided = first.is_divided and second.is_divided
        if is_divided and are_unrelated(first.start.held, second.start.held):
            yield evidence.finding(
                "own-task",
                line_of_draws(evidence.rank_0, first),
                f"rank 0 and rank 1 hold {first.start.base_length} samples each, and other ones "
                f"by the same index",
                severity="note",
            )


def are_unrelated(first: Sequence[float], second: Sequence[float]) -> bool:
    """Return whether sums of samples have no more in common than their index."""
    if len(first) != len(second) or len(first) < MIN_READ_AGAIN:
        return False
    if not pstdev(first) or not pstdev(second):
        return False
    return correlation(first, second) < MAX_CORRELATION


def constant_samples(log: RankLog) -> dict[int, tuple[str, float]]:
    """Return the hash and the sum of each sample in the passes that a sampler divides.

    There are none if a sample has changed, or if too few were read twice.
    """
    samples: dict[int, tuple[str, float]] = {}
    read_again = 0
    for one_pass in log.training_passes:
        if not one_pass.is_divided:
            continue
        for batch in one_pass.batches:
            rows = zip(batch.rows, batch.sums, strict=False)
            for index, (row, total) in zip(batch.indices or (), rows, strict=False):
                if index not in samples:
                    samples[index] = (row, total)
                    continue
                read_again += 1
                if samples[index][0] != row:
                    return {}
    if read_again < MIN_READ_AGAIN:
        return {}
    return samples


def line_of_draws(log: RankLog, one_pass: LoaderPass) -> CodeLine | None:
    """Return the last line before a pass that draws numbers; that of the loader if none does."""
    line = one_pass.loader_line
    for event in log.select(Draw):
        if event.n < one_pass.start.n:
            line = event.at
    return line
