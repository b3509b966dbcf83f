"""Finds the first collective that two ranks did not call alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stepladder.launcher.diagnose import causes
from stepladder.launcher.diagnose.explanation import Explanation
from stepladder.launcher.diagnose.rank_status import RankStatus
from stepladder.rank.progress import BLOCK_SEPARATOR, RING_SIZE, VARYING_SIZE, CallSite


@dataclass(frozen=True)
class _CollectiveCall:
    """One rank's call of a collective.

    Args:
        status: The rank.
        site: The line that has called it, with its name.
        size: How many numbers the rank passes to it; VARYING_SIZE if ranks may pass different
            ones.
    """

    status: RankStatus
    site: CallSite
    size: int


def select_newest_group(statuses: Sequence[RankStatus]) -> Sequence[RankStatus]:
    """Return the ranks of the newest group.

    No rank waits for the others: they were lost, or have not joined yet.
    """
    newest = max((status.progress.group for status in statuses), default=0)
    return [status for status in statuses if status.progress.group == newest]


def describe_step(statuses: Iterable[RankStatus]) -> str:
    """Return " of step N", for the first step that a rank is in, or "" before the first step."""
    step = min(status.progress.step for status in statuses)
    if not step:
        return ""
    return f" of step {step}"


def find_mismatch(statuses: Sequence[RankStatus]) -> Explanation | None:
    """Return the first collective that two ranks did not call alike, if there is one.

    Ranks call their collectives in one order, so the calls with the same number are compared.
    """
    with_calls = [
        status for status in select_newest_group(statuses) if status.progress.num_collectives
    ]
    last = min((status.progress.num_collectives for status in with_calls), default=0)
    for number in range(max(1, last - RING_SIZE + 1), last + 1):
        calls = _list_calls(with_calls, number)
        # The step is only known of the last collective.
        step = describe_step(statuses) if number == last else ""
        for call in calls[1:]:
            explanation = _compare(calls[0], call, number, step, statuses)
            if explanation is not None:
                return explanation
    return None


def _list_calls(statuses: Iterable[RankStatus], number: int) -> list[_CollectiveCall]:
    calls = []
    for status in statuses:
        recorded = status.progress.find_collective(number)
        if recorded is not None:
            site, size = recorded
            calls.append(_CollectiveCall(status, site, size))
    return calls


def _compare(
    first: _CollectiveCall,
    second: _CollectiveCall,
    number: int,
    step: str,
    statuses: Sequence[RankStatus],
) -> Explanation | None:
    """Return the difference of two calls, or None if they are alike."""
    if first.site.name != second.site.name:
        sentence = (
            f"{second.status} calls {second.site.name} ({second.site}) where {first.status} calls"
            f" {first.site.name} ({first.site}): collective {number}{step}"
        )
        is_of_block = BLOCK_SEPARATOR in first.site.name or BLOCK_SEPARATOR in second.site.name
        cause = causes.SKIPPED_BLOCK if is_of_block else causes.DIFFERENT_ORDER
        return Explanation(second.status.rank, sentence, cause, statuses)
    has_sizes = VARYING_SIZE not in (first.size, second.size)
    if has_sizes and first.size != second.size:
        sentence = (
            f"{second.status} passes {second.size} numbers to {first.site.name} {number}{step}"
            f" ({second.site}), {first.status} passes {first.size}"
        )
        return Explanation(second.status.rank, sentence, causes.DIFFERENT_SHAPES, statuses)
    return None
