"""R1: with frozen weights all ranks together read the samples that one process reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from stepladder.tools.check.recording import LoaderPass, RankLog, Recording
from stepladder.tools.check.relations.frozen_runs import FrozenRuns, Violation

KNOWN_SHARE = 0.5  # of the rows: random augmentation makes others of them in each run


@dataclass(frozen=True)
class SamplesRead:
    """The samples of the passes of one kind, over all ranks of a run.

    Args:
        counts: How often each was read, by its index or by the hash of its row; None where neither
            is known.
        rows: The hashes of the rows.
        data_sets: The fingerprints of the data sets.
    """

    counts: Counter[int | str] | None
    rows: frozenset[str]
    data_sets: frozenset[str]

    @classmethod
    def read(cls, passes: Iterable[LoaderPass]) -> SamplesRead:
        passes = list(passes)
        read = [one_pass.samples for one_pass in passes]
        counts: Counter[int | str] = Counter()
        for samples in read:
            counts.update(samples or ())
        rows = frozenset(row for one_pass in passes for row in one_pass.rows or ())
        data_sets = frozenset(one_pass.start.fingerprint for one_pass in passes)
        is_known = bool(read) and None not in read
        return cls(counts if is_known else None, rows, data_sets)

    def is_of(self, reference: SamplesRead) -> bool:
        """Return whether these samples are of the reference's data, and not of a rank's own."""
        if self.data_sets <= reference.data_sets:
            return True
        known = len(self.rows & reference.rows)
        return bool(self.rows) and known >= KNOWN_SHARE * len(self.rows)

    def share_moved(self, reference: SamplesRead) -> float | None:
        """Return the share of samples that were read more or less often; None if unknown."""
        if self.counts is None or reference.counts is None:
            return None
        moved = (self.counts - reference.counts) + (reference.counts - self.counts)
        return moved.total() / max(1, reference.counts.total())


def are_of_one_data_set(runs: FrozenRuns) -> bool:
    """Return whether no rank reads data that one process does not, in training and in between."""
    return trains_one_data_set(runs) and is_part(runs, passes_without_training)


def trains_one_data_set(runs: FrozenRuns) -> bool:
    return is_part(runs, passes_of_training)


def is_part(runs: FrozenRuns, passes_of: Callable[[RankLog], list[LoaderPass]]) -> bool:
    """Return whether the samples of these passes are those of one process, on each rank."""
    reference = SamplesRead.read(p for log in runs.reference.ranks for p in passes_of(log))
    return all(SamplesRead.read(passes_of(log)).is_of(reference) for log in runs.compared.ranks)


def training_samples(run: Recording) -> SamplesRead:
    return SamplesRead.read(one_pass for log in run.ranks for one_pass in passes_of_training(log))


def passes_of_training(log: RankLog) -> list[LoaderPass]:
    return [one_pass for one_pass in log.all_passes if one_pass.is_training]


def passes_without_training(log: RankLog) -> list[LoaderPass]:
    return [one_pass for one_pass in log.all_passes if not one_pass.is_training]


def violations(runs: FrozenRuns) -> Iterator[Violation]:
    """Yield the samples that one process trains, and of several ranks none does.

    Where a pass is not finished on any rank, its rest may have held them.
    """
    reference, compared = training_samples(runs.reference), training_samples(runs.compared)
    if reference.counts is None or compared.counts is None or not trains_one_data_set(runs):
        return
    passes = [p for log in runs.compared.ranks for p in passes_of_training(log)]
    if not any(one_pass.end for one_pass in passes):
        return
    missing = sorted(reference.counts.keys() - compared.counts.keys(), key=str)
    # A remainder that makes shares equal is left out in each pass, another one each time.
    remainder = len(runs.compared.ranks) * max(b.size for p in passes for b in p.batches)
    if len(missing) > remainder:
        shown = ", ".join(str(sample) for sample in missing[:3])
        yield Violation(
            "samples",
            passes[0].loader_line,
            len(missing) / remainder,
            f"{len(missing)} of the {len(reference.counts)} samples that are trained on "
            f"{runs.base} are read by none of {len(runs.compared.ranks)} ranks, such as {shown}",
        )
