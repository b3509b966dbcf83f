"""The rule for splits that differ by rank: what one rank trains on, another one evaluates."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from operator import and_

from stepladder.tools.check.recording import LoaderPass
from stepladder.tools.check.rules.evidence import Findings, RunEvidence, are_complete, rank_rule

MIN_LEAKED_SAMPLES = 2
MIN_LEAKED_SHARE = 0.05
MIN_DISTINCT_SHARE = 0.9  # of rows: data with equal rows cannot be told apart

Samples = set[Hashable]


@rank_rule("leaked-split")
def leaked_split(evidence: RunEvidence) -> Findings:
    """Find samples that one rank evaluates and another trains on, where each rank separates them.

    A rank that evaluates what it trains on itself does so on purpose.
    """
    trained_passes = [log.training_passes for log in evidence.ranks]
    for passes in filter(are_complete, evidence.evaluation_passes()):
        evaluated = [samples_of([one_pass], passes[0]) for one_pass in passes]
        trained = [samples_of(of_rank, passes[0]) for of_rank in trained_passes]
        if not all(evaluated) or not all(trained) or any(map(and_, evaluated, trained)):
            continue
        for rank, samples in enumerate(evaluated):
            leaked = samples & set().union(*trained)
            if len(leaked) >= max(MIN_LEAKED_SAMPLES, MIN_LEAKED_SHARE * len(samples)):
                yield evidence.finding(
                    "leaked-split",
                    passes[0].loader_line,
                    f"{len(leaked)} of the {len(samples)} samples that rank {rank} evaluates are "
                    f"trained on another rank",
                )
                return


def samples_of(passes: Sequence[LoaderPass], like: LoaderPass) -> Samples:
    """Return the samples of passes; an empty set where they cannot be told apart.

    Args:
        passes: The passes.
        like: A pass whose data set says how samples are named: by index, if all have it, or by row.
    """
    uses_indices = like.indices is not None
    samples: Samples = set()
    count = 0
    for one_pass in passes:
        if uses_indices and one_pass.start.fingerprint != like.start.fingerprint:
            return set()
        read: Sequence[Hashable] | None = one_pass.indices if uses_indices else one_pass.rows
        if read is None:
            return set()
        samples.update(read)
        count = max(count, len(read))
    return samples if len(samples) >= MIN_DISTINCT_SHARE * count else set()
