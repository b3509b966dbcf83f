"""Rules for the samples that the ranks read."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from itertools import pairwise
from operator import and_
from statistics import correlation, pstdev

from stepladder.tools.check.events import Draw, Forward, PassStart, SetEpoch, SharedFile
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
from stepladder.tools.findings.finding import Finding

MIN_COMMON_ROWS = 8
DEVIATIONS_OF_CHANCE = 5
MIN_HELD = 10
ROUNDING_OF_SAMPLES = 1e-4  # relative to the largest sum
MAX_CORRELATION = 0.5  # of samples that have no more in common than their index
MIN_LEAKED_SAMPLES = 2
MIN_LEAKED_SHARE = 0.05
MIN_DISTINCT_SHARE = 0.9  # of rows: data with equal rows cannot be told apart
Samples = set[Hashable]
Share = list[object]  # what one rank reads in a pass: indices, or hashes of rows


@run_rule("set-epoch")
def set_epoch(evidence: RunEvidence) -> Findings:
    """Find passes of one line that read the same samples in the same order."""
    passes_by_line: dict[str, list[LoaderPass]] = defaultdict(list)
    for one_pass in evidence.rank_0.passes:
        shuffles_for_training = one_pass.calls_no_model and one_pass.start.distributed
        if one_pass.is_training or shuffles_for_training:
            line = str(one_pass.start.way or one_pass.line)
            passes_by_line[line].append(one_pass)
    for passes in passes_by_line.values():
        for first, second in pairwise(passes):
            if repeats_order(first, second):
                yield repeated_order(evidence, first, second)
                break


def repeated_order(evidence: RunEvidence, first: LoaderPass, second: LoaderPass) -> Finding:
    samplers = {first.start.sampler_id, second.start.sampler_id}
    calls = [event for event in evidence.rank_0.select(SetEpoch) if event.sampler in samplers]
    line = first.line
    description = "set_epoch was never called"
    if calls:
        line = calls[0].at
        values = ", ".join(str(event.value) for event in calls[:4])
        description = f"set_epoch was called {len(calls)} times, with {values}"
    count = len(first.samples or ())
    return evidence.finding(
        "set-epoch",
        line,
        f"passes {first.number} and {second.number} read the same {count} samples in the same "
        f"order; {description}",
    )


def repeats_order(first: LoaderPass, second: LoaderPass) -> bool:
    """Return whether a sampler that depends on set_epoch shuffled two passes alike."""
    if not depends_on_set_epoch(first.start) or not are_complete((first, second)):
        return False
    if first.start.length != second.start.length or first.samples != second.samples:
        return False
    has_one_epoch = first.start.epoch is not None and first.start.epoch == second.start.epoch
    return len(set(first.samples or ())) > (1 if has_one_epoch else 3)  # few agree by chance


def depends_on_set_epoch(start: PassStart) -> bool:
    has_shuffling_sampler = start.settable and start.shuffle
    has_iterable_data = start.iterable and start.data_settable
    return bool(has_shuffling_sampler or has_iterable_data)


def shares_of(passes: Passes) -> list[Share] | None:
    """Return what each rank read in a pass.

    These are indices if all ranks have the same data set, else hashes of rows, or None where
    neither was recorded.
    """
    indices = [one_pass.indices for one_pass in passes]
    rows = [one_pass.rows for one_pass in passes]
    shares = indices if have_same_data(passes) and None not in indices else rows
    return None if None in shares else [list(share or ()) for share in shares]


def have_same_data(passes: Passes) -> bool:
    return len({one_pass.start.fingerprint for one_pass in passes}) == 1


def has_replacement(share: Share) -> bool:
    """Return whether samples were drawn with replacement: more than 2 % repeat."""
    return len(share) - len(set(share)) > max(1, len(share) // 50)


@rank_rule("same-samples", "overlapping-shards")
def same_samples(evidence: RunEvidence) -> Findings:
    """Find ranks that read the same samples, or shards that overlap."""
    for passes in evidence.training_passes():
        shares = shares_of(passes)
        if shares is None or any(one_pass.end is None for one_pass in passes):
            continue
        finding = compare_shares(evidence, passes, shares)
        if finding is not None:
            yield finding
            return
    yield from same_inputs(evidence)


def compare_shares(evidence: RunEvidence, passes: Passes, shares: list[Share]) -> Finding | None:
    """Return the finding of two ranks that read the same samples, or of shards that overlap."""
    sets = [set(share) for share in shares]
    sizes = [len(samples) for samples in sets]
    if min(sizes) < 4:
        return None
    common = sets[0] & sets[1]
    draws_with_replacement = any(map(has_replacement, shares))
    is_nearly_equal = len(common) >= 0.95 * max(sizes) and not draws_with_replacement
    if shares[0] == shares[1] or is_nearly_equal:
        return evidence.finding(
            "same-samples",
            passes[0].loader_line,
            f"in pass {passes[0].number} rank 0 and rank 1 read {sizes[0]} and {sizes[1]} "
            f"samples, {len(common)} of them the same{describe_sampler_rank(evidence, passes)}",
        )
    if draws_with_replacement:
        return None
    return overlapping_shards(evidence, passes, sets)


def describe_sampler_rank(evidence: RunEvidence, passes: Passes) -> str:
    """Return that both samplers take the share of one rank, and that it is the local rank."""
    start = passes[0].start
    if not start.distributed or start.sampler_rank != passes[1].start.sampler_rank:
        return ""
    text = f"; both samplers take the share of rank {start.sampler_rank}"
    if not evidence.run.is_single_process and evidence.run.asks_for_local_rank:
        text += ", the local rank of each: each rank plays a node of its own"
    return text


def overlapping_shards(
    evidence: RunEvidence, passes: Passes, sets: list[set[object]]
) -> Finding | None:
    """Return the finding of samples that two ranks read, while no rank reads some others.

    Padding, which fills up the last batches, repeats only the first samples.
    """
    first = passes[0]
    common = len(sets[0] & sets[1])
    length = None if first.indices is None else first.start.length
    unread = max(0, length - len(set.union(*sets))) if length else 0
    rank_count = len(passes)
    leaves_samples_out = unread > rank_count and common > rank_count
    if common <= padding_limit(passes) and not leaves_samples_out:
        return None
    if not unread and common <= rank_count * largest_batch(passes):
        return None
    text = f"in pass {first.number} {common} samples are read by rank 0 and by rank 1"
    if length:
        text += f", {unread} of {length} are read by none"
    else:
        text += f", of {len(sets[0])} and {len(sets[1])}"
    return evidence.finding("overlapping-shards", first.sampler_line, text)


def padding_limit(passes: Passes) -> int:
    """Return the number of samples that ranks may read in common because of padding."""
    start = passes[0].start
    if start.loader_class == "DataLoader" and start.distributed:
        return len(passes)
    return len(passes) * largest_batch(passes)


def largest_batch(passes: Passes) -> int:
    return max((batch.size for one_pass in passes for batch in one_pass.batches), default=1)


def same_inputs(evidence: RunEvidence) -> Findings:
    """Compare what goes into the model, batch by batch, for loops without a loader."""
    if any(log.training_passes for log in evidence.ranks):
        return
    calls = list(map(recorded_training_calls, evidence.ranks))
    pairs = align(calls)[:12]
    if len(pairs) < 3:
        return
    if all(a.rows == b.rows and len(set(a.rows)) > 1 for a, b, *_ in pairs):
        first = pairs[0][0]
        yield evidence.finding(
            "same-samples",
            first.at,
            f"in {len(pairs)} of {len(pairs)} steps the model gets the same {first.size} rows "
            f"on rank 0 and rank 1",
        )
        return
    yield from overlapping_inputs(evidence, *map(rows_of_first_epoch, calls[:2]))


def overlapping_inputs(evidence: RunEvidence, first: list[str], second: list[str]) -> Findings:
    """Find rows that two ranks train in their first epochs, in loops without a loader.

    What is common only later may be of the next epoch, with other shares.
    """
    first_half = first[: len(first) // 2]
    second_half = second[: len(second) // 2]
    begins_with_common = not set(first_half).isdisjoint(second_half)
    common = len(set(first) & set(second))
    if begins_with_common and common >= max(MIN_COMMON_ROWS, 0.25 * len(first)):
        calls = recorded_training_calls(evidence.rank_0)
        yield evidence.finding(
            "overlapping-shards",
            calls[0].at,
            f"before a row comes again on a rank, {common} of {len(first)} rows of rank 0 are "
            f"trained on rank 1 too",
        )


def rows_of_first_epoch(calls: list[Forward]) -> list[str]:
    """Return the rows before the first that comes again; none if that is not known."""
    rows: list[str] = []
    for call in calls:
        if len(call.rows) != call.size:  # it has more than are hashed
            return []
        if not set(rows).isdisjoint(call.rows):
            return rows
        rows += call.rows
    return []


def recorded_training_calls(log: RankLog) -> list[Forward]:
    """Return the forward passes with a gradient whose inputs were hashed."""
    return [event for event in log.select(Forward) if event.rows and event.grad]


@run_rule("workers-repeat")
def workers_repeat(evidence: RunEvidence) -> Findings:
    """Find a stream from which each worker of a loader reads every row."""
    for one_pass in evidence.rank_0.training_passes:
        workers = one_pass.start.workers
        if not one_pass.start.iterable or workers < 2 or not one_pass.rows:
            continue
        counts = Counter(one_pass.rows)
        # Not all of them, because the data may have equal rows.
        repeated = sum(count == workers for count in counts.values())
        if len(counts) >= 4 and repeated >= 0.9 * len(counts):
            yield evidence.finding(
                "workers-repeat",
                one_pass.loader_line,
                f"{repeated} of {len(counts)} samples of rank 0 come {workers} times in pass "
                f"{one_pass.number}; there are {workers} workers",
            )
            return


@run_rule("samples-lost")
def samples_lost(evidence: RunEvidence) -> Findings:
    """Find samples that no rank reads in any pass, or in one pass."""
    training_passes = evidence.training_passes()
    unread_by_pass = []
    for passes in training_passes:
        unread = unread_samples(passes, evidence.evaluation_passes())
        if unread is None:
            return
        unread_by_pass.append(unread)
    if not training_passes:
        return
    last = training_passes[-1]
    length = last[0].start.length or 0
    count = len(set.intersection(*unread_by_pass))
    if len(training_passes) == 1:
        is_by_chance = bool(last[0].start.shuffle and describe_drop_last(last[0]))
    else:
        is_by_chance = can_miss_by_chance(count, length, list(map(len, unread_by_pass)))
    if not count or is_by_chance:
        yield from samples_lost_by_epoch(evidence, last)
        return
    if len(training_passes) > 1 or count > 0.02 * length:
        yield evidence.finding(
            "samples-lost",
            last[0].loader_line,
            f"{count} of {length} samples ({100 * count / length:.1f} %) are read by no rank, in "
            f"any of {len(training_passes)} passes{describe_drop_last(last[0])}",
        )


def can_miss_by_chance(count: int, length: int, unread_counts: list[int]) -> bool:
    """Return whether passes in random order may all leave out the same samples.

    Args:
        count: The samples that every pass leaves out.
        length: The samples of the data set.
        unread_counts: The samples that each pass leaves out.
    """
    expected = length * math.prod(unread / length for unread in unread_counts)
    return count <= expected + DEVIATIONS_OF_CHANCE * math.sqrt(expected) + 3


def samples_lost_by_epoch(evidence: RunEvidence, passes: Passes) -> Findings:
    """Find a shuffled remainder that is dropped: other samples in each pass."""
    unread = unread_samples(passes, evidence.evaluation_passes())
    if unread:
        first = passes[0]
        yield evidence.finding(
            "samples-lost",
            first.loader_line,
            f"{len(unread)} of {first.start.length} samples are read by no rank in an epoch, "
            f"others in each{describe_drop_last(first)}",
            severity="note",
        )


def describe_drop_last(one_pass: LoaderPass) -> str:
    owners = ["the loader"] if one_pass.start.drop_last else []
    owners += ["its sampler"] if one_pass.start.sampler_drop else []
    return f"; {' and '.join(owners)} has drop_last" if owners else ""


def unread_samples(passes: Passes, evaluations: list[Passes]) -> set[object] | None:
    """Return the indices that no rank has read; None where that is not known.

    Those of an evaluation without a sample of this pass are held out, as in cross-validation.
    """
    start = passes[0].start
    has_indices = all(one_pass.indices is not None for one_pass in passes)
    if not has_indices or not have_same_data(passes) or start.length != start.base_length:
        return None
    shares = shares_of(passes) or []
    if not are_complete(passes) or not start.length or any(map(has_replacement, shares)):
        return None
    unread = set[object](range(start.length)).difference(*shares)
    for evaluated in evaluations:
        indices = {index for one_pass in evaluated for index in one_pass.indices or []}
        if have_same_data(passes + evaluated) and indices <= unread:
            unread -= indices
    return unread


@run_rule("file-over-fork")
def file_over_fork(evidence: RunEvidence) -> Findings:
    """Find a file of the data set that is open when the loader forks its workers."""
    for rank, event in evidence.run.select(SharedFile):
        yield evidence.finding(
            "file-over-fork",
            event.at,
            f"{event.path} is an open {event.type} when the loader's workers are forked",
            rank,
        )
        return


@rank_rule("own-task", "own-task.values")
def own_samples(evidence: RunEvidence) -> Findings:
    """Find a data set that a sampler divides, and of which two ranks hold other samples.

    Numbers that the script draws may stand in for data, so for them this is a note.
    """
    for first, second, *_ in evidence.training_passes()[:1]:
        held = first.start.held, second.start.held
        if not (first.is_divided and second.is_divided) or hold_the_same(*held):
            continue
        draws, others = [
            [e for e in log.select(Draw) if e.n < one_pass.start.n]
            for log, one_pass in zip(evidence.first_ranks, (first, second), strict=True)
        ]
        counts = f"rank 0 and rank 1 hold {first.start.base_length} samples each"
        if are_unrelated(*held):
            is_drawn = any(event.fn != "randperm" for event in draws)
            yield evidence.finding(
                "own-task",
                draws[-1].at if draws else first.loader_line,
                f"{counts}, and other ones by the same index",
                severity="note" if is_drawn else None,
            )
        elif [event.state for event in draws] == [event.state for event in others]:
            # No rank has added noise of its own.
            text = f"{counts}, with other values in the same ones"
            yield evidence.finding("own-task.values", first.loader_line, text)


def hold_the_same(first: Sequence[float], second: Sequence[float]) -> bool:
    """Return whether sums of samples are equal but for rounding, or too few, or not of the same."""
    if len(first) != len(second) or len(first) < MIN_HELD:
        return True
    tolerance = ROUNDING_OF_SAMPLES * max(map(abs, [*first, *second]))
    return all(abs(a - b) <= tolerance for a, b in zip(first, second, strict=True))


def are_unrelated(first: Sequence[float], second: Sequence[float]) -> bool:
    """Return whether sums of samples have no more in common than their index."""
    if not (pstdev(first) and pstdev(second)):
        return False
    return correlation(first, second) < MAX_CORRELATION


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
        like: A pass whose samples these are compared with.
    """
    _, *shares = shares_of((like, *passes)) or [[]]
    samples: Samples = set().union(*shares)
    count = max(map(len, shares), default=0)
    return samples if len(samples) >= MIN_DISTINCT_SHARE * count else set()
