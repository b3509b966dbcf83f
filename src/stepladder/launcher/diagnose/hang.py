"""Explains why ranks make no progress, from the progress and the stacks of all ranks.

All ranks call their collectives in one order. So the others wait for the rank that has begun the
fewest. If all ranks have begun equally many, then either one of them is not in a collective, or
they are in different ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from stepladder.launcher.diagnose import causes
from stepladder.launcher.diagnose.explanation import Explanation
from stepladder.launcher.diagnose.mismatch import describe_step, find_mismatch, select_newest_group
from stepladder.launcher.diagnose.rank_status import (
    QUEUE_FILES,
    ProcessState,
    RankStatus,
    is_in_queue,
)
from stepladder.rank.progress import READING, STARTING

MAX_RANKS_NAMED = 3
MAX_LOCK_DEPTH = 3  # of the innermost calls, in which a lock shows
LOCK_FILES = ("threading.py", "multiprocessing/synchronize.py", *QUEUE_FILES)
# In the line that waits. A `with` on a bare name is seldom anything but a lock.
LOCK_CODE = re.compile(
    r"lock|acquire|semaphore|condition|\.(join|wait|get)\(|^with [\w.]+:$", re.IGNORECASE
)


def explain_hang(statuses: Sequence[RankStatus], has_all_ranks: bool = True) -> Explanation:
    """Return why ranks make no progress: the result of the first rule that applies.

    Args:
        statuses: The ranks that can be inspected from this node.
        has_all_ranks: False if other nodes have ranks too, which cannot be inspected.
    """
    newest = select_newest_group(statuses)
    return find_rank_to_blame(statuses) or _explain_common_position(newest, has_all_ranks)


def find_rank_to_blame(statuses: Sequence[RankStatus]) -> Explanation | None:
    """Return which rank the others wait for; None if none of them stands out."""
    statuses = select_newest_group(statuses)
    for rule in RULES:
        explanation = rule(statuses)
        if explanation is not None:
            return explanation
    return _explain_ended_ranks(statuses)


def _find_stopped(statuses: Sequence[RankStatus]) -> Explanation | None:
    """Return the first rank that was stopped by a signal."""
    for status in statuses:
        if status.state is ProcessState.STOPPED:
            position = _describe_last_position(status)
            sentence = f"{status} is stopped (SIGSTOP){position}; the others wait for it"
            cause = causes.SUSPENDED_CAUSE.format(pid=status.pid)
            return Explanation(status.rank, sentence, cause, statuses)
    return None


def _describe_last_position(status: RankStatus) -> str:
    step = _describe_own_step(status)
    if status.frame:
        return f"{step}, {status.describe_position()}"
    count = status.progress.num_collectives
    site = status.progress.find_call(count)
    if site is None:
        return step
    return f"{step}, after {site.name} {count} ({site})"


def _describe_own_step(status: RankStatus, suffix: str = "") -> str:
    step = status.progress.step
    if not step:
        return ""
    return f" in step {step}{suffix}"


def _find_early_end(statuses: Sequence[RankStatus]) -> Explanation | None:
    """Return the ranks that have finished while others were in a collective, or still are."""
    finished = [status for status in statuses if status.state is ProcessState.DONE]
    waiting = [
        status for status in statuses if status.state is not ProcessState.DONE and status.is_waiting
    ]
    if not finished or not waiting:
        return None
    finished_steps = finished[0].progress.step - 1
    after = ""
    if finished_steps > 0:
        after = f" after {finished_steps} steps"
    witness = waiting[0]
    verb = "is" if witness.state is ProcessState.RUNNING else "was"
    step = _describe_own_step(witness, ",")
    position = _as_running(witness).describe_position()
    sentence = (
        f"{_name_ranks(finished)} ended well (exit code 0){after};"
        f" {witness} {verb}{step} {position}"
    )
    return Explanation(finished[0].rank, sentence, causes.ENDED_EARLY, statuses, left_early=True)


def _as_running(status: RankStatus) -> RankStatus:
    """Return the status of a rank that has ended, as it was before its end."""
    return replace(status, state=ProcessState.RUNNING)


def _find_abort(statuses: Sequence[RankStatus]) -> Explanation | None:
    """Return the first rank that was aborted in a collective.

    gloo aborts a rank that receives more than it waits for, as from another collective or from a
    tensor of another shape.
    """
    in_collective = [status for status in statuses if status.collective]
    aborted = next((s for s in in_collective if s.state is ProcessState.ABORTED), None)
    if aborted is None:
        return None
    position = aborted.describe_position()
    sentence = f"{aborted} was aborted {position}"
    peers = [_as_running(status) for status in in_collective if status is not aborted]
    different = next((peer for peer in peers if peer.describe_position() != position), None)
    if different is not None:
        sentence += f", while {different} was {different.describe_position()}"
        # gloo aborts where sizes differ, in the call of one line too: then the other rank is later.
        cause = f"{causes.DIFFERENT_ORDER}; or {causes.DIFFERENT_SHAPES}"
    elif peers:
        sentence += f", where {peers[0]} was too"
        cause = causes.DIFFERENT_SHAPES
    else:
        cause = f"{causes.DIFFERENT_ORDER}; or {causes.DIFFERENT_SHAPES}"
    return Explanation(aborted.rank, sentence, cause, statuses, is_abort=True)


def _find_behind(statuses: Sequence[RankStatus]) -> Explanation | None:
    """Return the ranks that have begun fewer collectives than others."""
    counts = [status.progress.num_collectives for status in statuses]
    min_count = min(counts)
    max_count = max(counts)
    if min_count == max_count:
        return None
    behind = [status for status in statuses if status.progress.num_collectives == min_count]
    # If all of them are in a collective that the others have completed, no rank is missing.
    if all(status.progress.awaited for status in behind):
        return None
    ahead = next(status for status in statuses if status.progress.num_collectives == max_count)
    site = ahead.progress.find_call(min_count + 1)
    name = "collective"
    if site is not None:
        name = site.name
    verb = _inflect(behind, "has", "have")
    sentence = (
        f"{_name_ranks(behind)} {verb} not reached {name} {min_count + 1}"
        f"{describe_step(statuses)}: {_describe_positions(behind)}; the others wait"
    )
    return Explanation(behind[0].rank, sentence, _find_cause(behind[0]), statuses)


def _find_missing(statuses: Sequence[RankStatus]) -> Explanation | None:
    """Return the ranks that are not in the collective in which others wait.

    Collectives that our trainer calls are counted; those that a job calls by itself are not.
    """
    in_counted = [status for status in statuses if status.progress.awaited]
    in_uncounted = [
        status for status in statuses if status.collective and not status.progress.awaited
    ]
    alive_states = (ProcessState.RUNNING, ProcessState.SILENT)
    in_none = [
        status for status in statuses if not status.is_waiting and status.state in alive_states
    ]
    if in_none and (in_counted or in_uncounted):
        missing = in_none
    elif in_counted and in_uncounted:
        missing = in_uncounted
    else:
        return None
    if in_counted:
        awaited = f"in {_describe_awaited(in_counted[0])}"
    else:
        awaited = in_uncounted[0].describe_position()
    sentence = (
        f"{_name_ranks(missing)}{_describe_own_step(missing[0])}:"
        f" {_describe_positions(missing)}; the others wait {awaited}"
    )
    return Explanation(missing[0].rank, sentence, _find_cause(missing[0]), statuses)


def _find_different_collectives(statuses: Sequence[RankStatus]) -> Explanation | None:
    """Return two ranks that a job has called different collectives on.

    Where ranks form different groups, the others wait for them.
    """
    waiting = [status for status in statuses if status.collective and not status.progress.awaited]
    forming = [status for status in waiting if status.is_forming_group]
    for candidates, cause in ((forming, causes.GROUP_ORDER), (waiting, causes.DIFFERENT_ORDER)):
        for status in candidates[1:]:
            position = status.describe_position()
            first_position = candidates[0].describe_position()
            if position != first_position:
                sentence = (
                    f"{status} waits {position}, while {candidates[0]} waits {first_position}"
                )
                return Explanation(status.rank, sentence, cause, statuses)
    return None


def _explain_ended_ranks(statuses: Sequence[RankStatus]) -> Explanation | None:
    """Return the ranks that have ended, if others still run."""
    ended = [status for status in statuses if status.state is ProcessState.ENDED]
    if not ended or len(ended) == len(statuses):
        return None
    verb = _inflect(ended, "has", "have")
    sentence = f"{_name_ranks(ended)} {verb} ended; the others still run"
    return Explanation(ended[0].rank, sentence, causes.ENDED, statuses)


def _explain_common_position(statuses: Sequence[RankStatus], has_all_ranks: bool) -> Explanation:
    """Return what all ranks do, where none of them stands out."""
    first = statuses[0]
    if len(statuses) == 1:
        subject = str(first)
    elif has_all_ranks:
        subject = "all ranks"
    else:
        subject = "all ranks of this node"
    if first.is_waiting:
        awaited = first.describe_position().removeprefix("in ")
        if first.progress.awaited:
            awaited = _describe_awaited(first)
        sentence = f"{subject} {_inflect(statuses, 'waits', 'wait')} in {awaited}"
        cause = _find_cause_of_common_wait(first) if has_all_ranks else causes.OTHER_NODE
        return Explanation(None, sentence, cause, statuses)
    position = first.describe_position()
    if any(status.describe_position() != position for status in statuses):
        sentence = f"no rank waits for another: {_describe_positions(statuses)}"
        return Explanation(None, sentence, causes.SLOW, statuses)
    if len(statuses) == 1 or is_in_queue(first.stack):
        cause = _find_cause(first)
    elif first.progress.phase == STARTING:
        cause = causes.STARTING
    else:
        cause = causes.SLOW
    verb = _inflect(statuses, "is", "are")
    sentence = f"{subject} {verb}{_describe_own_step(first, ',')} {position}"
    return Explanation(first.rank, sentence, cause, statuses)


def _find_cause_of_common_wait(status: RankStatus) -> str:
    """Return why all ranks wait in one collective; a script may wait in several groups."""
    is_past_first_group = not status.progress.awaited and not status.is_connecting
    return causes.OTHER_GROUPS if is_past_first_group else causes.NETWORK


def _describe_awaited(status: RankStatus) -> str:
    """Return the collective that a rank waits in, with its number, step and line."""
    number = status.progress.awaited
    step = describe_step([status])
    site = status.progress.find_call(number)
    if site is None:
        return f"collective {number}{step}"
    return f"{site.name} {number}{step} ({site})"


def _inflect(statuses: Sequence[RankStatus], singular: str, plural: str) -> str:
    return singular if len(statuses) == 1 else plural


def _name_ranks(statuses: Sequence[RankStatus]) -> str:
    if len(statuses) == 1:
        return str(statuses[0])
    numbers = [str(status.rank) for status in statuses[:MAX_RANKS_NAMED]]
    if len(statuses) > MAX_RANKS_NAMED:
        numbers.append("...")
    return f"ranks {', '.join(numbers)}"


def _describe_positions(statuses: Sequence[RankStatus]) -> str:
    if len(statuses) == 1:
        return f"it is {statuses[0].describe_position()}"
    shown = statuses[:MAX_RANKS_NAMED]
    return "; ".join(f"rank {status.rank} is {status.describe_position()}" for status in shown)


def _find_cause(status: RankStatus) -> str:
    """Return what usually makes others wait for a rank in this status."""
    if status.state is not ProcessState.RUNNING:
        return causes.STATE_CAUSES[status.state].format(pid=status.pid)
    if status.collective:
        return causes.EXTRA_COLLECTIVE
    if status.progress.phase == READING or status.is_loading_data:
        return causes.DATA_LOADER
    if is_in_queue(status.stack):
        producer = " and ".join(dict.fromkeys(status.ended)) or causes.PRODUCER
        return causes.QUEUE.format(producer=producer)
    if is_in_queue(status.stack, "put"):
        return causes.FULL_QUEUE
    if is_in_lock(status):
        return causes.LOCK
    if status.progress.phase == STARTING and status.progress.num_collectives == 0:
        return causes.STARTING
    return causes.BUSY


def is_in_lock(status: RankStatus) -> bool:
    """Return whether a rank waits for a lock, a queue, a thread or a process of its own."""
    code = ""
    if status.frame is not None:
        code, _, _ = status.frame.source.partition("  #")
    if "sleep(" in code:
        return False
    calls = status.stack[:MAX_LOCK_DEPTH]
    has_lock_call = any(frame.file.endswith(LOCK_FILES) for frame in calls)
    return has_lock_call or LOCK_CODE.search(code) is not None


# From the clearest evidence to the weakest.
RULES: tuple[Callable[[Sequence[RankStatus]], Explanation | None], ...] = (
    _find_stopped,
    _find_early_end,
    find_mismatch,
    _find_abort,
    _find_behind,
    _find_missing,
    _find_different_collectives,
)
