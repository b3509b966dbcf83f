"""Rules for random numbers that several ranks or workers draw alike."""

from __future__ import annotations

from stepladder.tools.check.events import (
    Backward,
    Batch,
    Draw,
    Fetch,
    Forward,
    ModelDivided,
    OptimizerStep,
    PassEnd,
    PassStart,
    Seeding,
)
from stepladder.tools.check.rules.evidence import Findings, RunEvidence, align, rank_rule, run_rule
from stepladder.tools.probe.events import CodeLine, ProbeEvent

MIN_EQUAL_DRAWS = 3


@run_rule("same-augmentation")
def same_augmentation(evidence: RunEvidence) -> Findings:
    """Find equal random numbers for different samples, on two ranks or two workers."""
    fetches: dict[tuple[str, str], tuple[int, Fetch]] = {}
    for rank, event in fetch_events(evidence):
        for generator, state in event.used.items():
            first_rank, first = fetches.setdefault((generator, state), (rank, event))
            is_same_process = (first_rank, first.worker) == (rank, event.worker)
            if not is_same_process and first.indices != event.indices:
                yield evidence.finding(
                    "same-augmentation",
                    drawing_line(evidence) or event.at,
                    f"{name_process(first_rank, first)} and {name_process(rank, event)} draw the "
                    f"same random numbers ({generator} generator) for samples {first.indices[:3]} "
                    f"and {event.indices[:3]}",
                )
                return
    yield from same_draws(evidence)


def name_process(rank: int, fetch: Fetch) -> str:
    """Return the name of a process that has fetched samples: a rank, or a worker of its loader."""
    if rank < 0:  # of a script that knows no ranks
        return f"worker {fetch.worker}"
    return f"rank {rank}'s worker {fetch.worker}" if fetch.worker >= 0 else f"rank {rank}"


@rank_rule("same-augmentation.dropout")
def same_dropout(evidence: RunEvidence) -> Findings:
    """Find models whose dropout draws the same numbers for different samples on two ranks.

    One whole pass is enough: what one rank draws alone after it, such as the seed of a test's
    loader, comes from the CPU's generator, which dropout on a GPU does not share.
    """
    if evidence.run.select(ModelDivided):
        return
    spans = [tuple(log.events for log in evidence.first_ranks)]
    spans += [(a.events, b.events) for a, b, *_ in evidence.training_passes()]
    for events in spans:
        pairs = [(a, b) for a, b in align(map(calls_with_dropout, events)) if a.rows != b.rows]
        equal = [a for a, b in pairs if a.random == b.random]
        if len(equal) >= MIN_EQUAL_DRAWS and len(equal) == len(pairs):
            yield evidence.finding(
                "same-augmentation.dropout",
                seeding_line(evidence, equal[0]) or equal[0].at,
                f"in {len(equal)} of {len(pairs)} calls of the model, {equal[0].drops} layers of "
                f"dropout begin at the same random state on rank 0 and rank 1",
            )
            return


def calls_with_dropout(events: list[ProbeEvent]) -> list[Forward]:
    """Return the calls of models whose random state was recorded."""
    return [event for event in events if isinstance(event, Forward) and event.random]


def seeding_line(evidence: RunEvidence, call: Forward) -> CodeLine | None:
    """Return the line that has seeded torch's own generator last before a call on rank 0."""
    earlier = [event for event in evidence.rank_0.select(Seeding) if event.n < call.n]
    return earlier[-1].at if earlier else None


def fetch_events(evidence: RunEvidence) -> list[tuple[int, Fetch]]:
    """Return the fetches of all ranks and of their workers, with the rank."""
    return [
        (log.rank, event)
        for log in evidence.ranks
        for event in [*log.events, *log.worker_events]
        if isinstance(event, Fetch)
    ]


def drawing_line(evidence: RunEvidence) -> CodeLine | None:
    """Return the line that draws for a sample, else the line that makes the loader."""
    for log in evidence.ranks:
        for event in [*log.select(Draw), *log.worker_events]:
            if isinstance(event, Draw) and event.for_sample:
                return event.at
    passes = (one_pass for log in evidence.ranks for one_pass in log.training_passes)
    first_pass = next(passes, None)
    return first_pass.loader_line if first_pass else None


def same_draws(evidence: RunEvidence) -> Findings:
    """Find equal draws in the training loops of two ranks."""
    if not evidence.has_several_ranks:
        return
    draws = align(draws_for_batches(log.events) for log in evidence.first_ranks)
    pairs = [(a, b) for a, b in draws if a.at == b.at]
    equal = [a for a, b in pairs if a.state and a.state == b.state]
    if len(equal) >= MIN_EQUAL_DRAWS and len(equal) == len(pairs):
        yield evidence.finding(
            "same-augmentation",
            equal[0].at,
            f"rank 0 and rank 1 draw the same random numbers in {len(equal)} of {len(pairs)} draws",
        )


def draws_for_batches(events: list[ProbeEvent]) -> list[Draw]:
    """Return the draws between a batch and its backward pass that may change what is trained.

    Those before a model is given the rows of the batch as they are do not change its input.
    """
    draws: list[Draw] = []
    pending: list[Draw] = []
    batch: Batch | None = None
    for event in events:
        if isinstance(event, Batch):
            batch = event
        elif isinstance(event, Backward | PassStart | PassEnd | OptimizerStep):
            draws += pending
            pending = []
            batch = None
        elif batch and isinstance(event, Draw) and event.fn != "randperm":
            pending.append(event)
        elif batch and isinstance(event, Forward) and event.sums and event.sums == batch.sums:
            pending = []
    return draws
