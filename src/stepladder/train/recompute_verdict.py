"""Which ranks are wrong about a microbatch that several ranks have computed, and how to say so."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from stepladder.core.numbers import format_ranks
from stepladder.core.plan import Span
from stepladder.train.fingerprints import split_fingerprints
from stepladder.train.replica_check import ReplicasDiffer

Claim = tuple[int, bytes]  # a rank, and the hashes that it computed


class _WrongRanks(NamedTuple):
    """The ranks that are wrong about one microbatch.

    Args:
        ranks: These ranks; all candidates if it cannot be told which of them is wrong.
        correct: The correct hashes; b"" if it cannot be told.
    """

    ranks: list[int]
    correct: bytes


class Mismatch(NamedTuple):
    """What all ranks have computed for a microbatch on which two ranks differ.

    Args:
        owner: The rank that trained on the microbatch.
        span: The microbatch.
        first: What the owner and the rank that checked it computed at first.
        recomputed: The hashes that each rank computed afterwards, in rank order.
        hosts: The host of each rank.
    """

    owner: int
    span: Span
    first: list[Claim]
    recomputed: list[bytes]
    hosts: list[str]


def find_wrong_ranks(first: list[Claim], recomputed: list[bytes]) -> _WrongRanks:
    """Return the ranks whose result, now or at first, is not the majority result.

    If two ranks still differ, a rank that does not repeat its own result is wrong. A single rank
    that never repeats it may have a job that cannot.

    Args:
        first: What the owner and the rank that checked it computed at first.
        recomputed: The hashes that each rank computed afterwards, in rank order.

    Returns:
        The wrong ranks and the correct hashes.
    """
    value, votes = Counter(recomputed).most_common(1)[0]
    is_majority = 2 * votes > len(recomputed)
    is_repeated = len(recomputed) > 1 or value in [claim for _, claim in first]
    if is_majority and is_repeated:
        claims = [*first, *enumerate(recomputed)]
        return _WrongRanks(sorted({rank for rank, claim in claims if claim != value}), value)
    unsteady = [rank for rank, claim in first if claim != recomputed[rank]]
    if len(recomputed) == 2 and len(unsteady) == 1:
        return _WrongRanks(unsteady, recomputed[1 - unsteady[0]])
    return _WrongRanks(sorted({rank for rank, _ in first}), b"")


@dataclass(frozen=True)
class MismatchReport:
    """The text of the error about a mismatch.

    Args:
        step: Steps done before the step of the mismatch.
        mismatch: What the ranks have computed.
        wrong: The wrong ranks.
        state: How the ranks' weights or optimizer state differ; None if they are equal.
        items: What the hashes are of, in order.
        members: The numbers of the ranks in the launch.
    """

    step: int
    mismatch: Mismatch
    wrong: _WrongRanks
    state: ReplicasDiffer | None
    items: list[str]
    members: list[int]

    def describe_wrong_rank(self, rank: int) -> str:
        """Return the error of a rank that is wrong, in one line."""
        mismatch = self.mismatch
        correct = self.wrong.correct
        recomputed = mismatch.recomputed[rank]
        claims = [claim for claimant, claim in mismatch.first if claimant == rank]
        wrong_claim = next(claim for claim in [*claims, recomputed] if claim != correct)
        trained_by = ""
        if rank != mismatch.owner:
            trained_by = f" (which rank {self.members[mismatch.owner]} had trained)"
        item = self._first_difference(wrong_claim, correct)
        host = mismatch.hosts[rank]
        advice = f"leave {host} out, and test its memory and processor"
        if recomputed == correct or self.state is not None:
            advice = f"if {host} is named again, {advice}"
        return (
            f"{self._name_ranks([rank])} on {host} is wrong at step {self.step + 1}: in microbatch"
            f" {mismatch.span.number + 1}{trained_by} {item} differs from"
            f" {self._describe_agreement(rank)}. {self._guess_cause(rank)}. HINT: {advice}; if the"
            " job computes by rank, `stepladder verify` says so"
        )

    def _describe_agreement(self, rank: int) -> str:
        """Return who has computed the correct result."""
        claims = enumerate(self.mismatch.recomputed)
        agreeing = sum(claim == self.wrong.correct for peer, claim in claims if peer != rank)
        if agreeing == 0:
            return "what it has now"
        if agreeing == 1:
            return "what the other rank has"
        return f"what {agreeing} other ranks have"

    def _guess_cause(self, rank: int) -> str:
        recomputed = self.mismatch.recomputed
        if self.state is not None and (rank in self.state.ranks or len(recomputed) == 2):
            return f"Its {self.state.what} differs too: wrong in its memory, or wrongly updated"
        if recomputed[rank] != self.wrong.correct:
            return "Recomputed, it is wrong again: a permanent fault"
        return "Recomputed, it is right: a transient fault, or a fault in what was sent"

    def describe_doubt(self) -> str:
        """Return the error if it cannot be told which rank is wrong, in one line."""
        mismatch = self.mismatch
        ranks = self.wrong.ranks
        (_, owner_claim), (_, checker_claim) = mismatch.first
        hosts = dict.fromkeys(mismatch.hosts[rank] for rank in ranks)
        differ = "differ" if len(ranks) > 1 else "differs from itself"
        difference = (
            f"{self._name_ranks(ranks)} on {' and '.join(hosts)} {differ} at step {self.step + 1}:"
            f" in microbatch {mismatch.span.number + 1}, by"
            f" {self._first_difference(owner_claim, checker_claim)}"
        )
        is_steady = all(claim == mismatch.recomputed[rank] for rank, claim in mismatch.first)
        if len(mismatch.recomputed) == 2 and is_steady:
            state = (
                f"Their {self.state.what} differs too" if self.state else "Their weights are equal"
            )
            return (
                f"{difference}. {state}. Two ranks cannot tell which is wrong. HINT: --nproc 3, or"
                " more, can"
            )
        return (
            f"{difference}. Recomputed, no majority has the same. HINT: `stepladder verify` says"
            " whether the job gives the same bits each time; if it does, more than one rank is"
            " wrong"
        )

    def _name_ranks(self, ranks: list[int]) -> str:
        """Return the ranks by their numbers in the launch."""
        return format_ranks([self.members[rank] for rank in ranks])

    def _first_difference(self, hashes: bytes, correct: bytes) -> str:
        """Return the first item whose hash differs."""
        pairs = zip(split_fingerprints(hashes), split_fingerprints(correct), strict=True)
        differs = [first != second for first, second in pairs]
        return self.items[differs.index(True)]
