"""Why nothing moves: one sentence from what every rank shows of itself, what usually causes it, and
stacks.

Ranks make their collectives in one order. So the one that has begun the fewest is what the others
wait for; where all have begun as many, one that is not in a collective is, or they are in different
ones."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from stepladder.launcher.diagnose.seen import Rank, State, in_code
from stepladder.rank.progress import OF_BLOCK, PHASES, READING, RING, STARTING
from stepladder.rank.stacks import Stack, users_frame

FRAMES_SHOWN, RANKS_NAMED, RANKS_SHOWN = 8, 3, 8
LOCK_FILES = (
    "threading.py",
    "queue.py",
    "multiprocessing/synchronize.py",
    "multiprocessing/queues.py",
)
# In the line that waits: also a `with` on a bare name, which is seldom anything but a lock.
LOCK_CODE = re.compile(
    r"lock|acquire|semaphore|condition|\.(join|wait|get)\(|^with [\w.]+:$", re.IGNORECASE
)

ABORTED = (
    "an abort in compiled code, whose reason stands above; NCCL's watchdog ends a rank like this"
)
USUAL = {
    "stopped": "Ctrl-Z, `kill -STOP`, a debugger, or a suspended machine. It goes on after `kill -CONT {pid}`",
    "data": "a data loader that does not deliver: a file system that does not answer, a worker that waits for a"
    " lock taken before it was forked, or one slow sample. With num_workers=0 the place shows itself",
    "lock": "a deadlock: two locks taken in different orders, one taken twice, or one that was held when this"
    " process was forked. The stacks show which line waits",
    "extra": "a collective that only some ranks make: an `if rank == 0:`, a loss or an exception around it that"
    " not all ranks share. Let every rank make it, or none",
    "order": "ranks that go different ways: an `if` on a value that is not the same on every rank, or"
    " parameters that only some ranks used",
    "size": "tensors of different shapes: a model, a vocabulary or a last batch that differs by rank",
    "block": "a block of --shard full that not all ranks call, as where layers are dropped at random. Call each"
    " block on every rank, or --shard optimizer",
    "busy": "work that only this rank does (evaluation, a download, a compile, printing), or an endless loop."
    " Let all ranks do it, or let the others go on meanwhile",
    "network": "a rank on another node that was lost, or a network that lost packets: see the other nodes'"
    " output, and `stepladder doctor --comm`",
    "here": "the network between the ranks, or a library's deadlock: see the stacks; `stepladder doctor --comm`",
    "early": "a download, a file system, a first compilation, or a port that does not answer. It may be slow only",
    "ended well": "fewer batches than the others have: DistributedSampler gives all as many, drop_last=True drops"
    " the rest, and `with Join([model]):` lets a rank end early. Or a return, sys.exit() or a swallowed exception"
    " on this rank alone",
    "ended": "the rank was ended from outside or crashed; its error is shown when the group ends",
    "aborted": ABORTED,
    "silent": "work in compiled code that only this rank does, or a lost machine. Look there, with py-spy",
    "slow": "slow work that all ranks do at once, or the same deadlock in all of them",
}  # fmt: skip


@dataclass(frozen=True)
class Explanation:
    """rank: the one to look at, or None where no single one is.  sentence, cause: without a full
    stop.

    is_abort: compiled code aborted the rank within a collective.  is_early: the rank left others
    that needed it."""

    rank: int | None
    sentence: str
    cause: str
    ranks: Sequence[Rank]
    is_abort: bool = False
    is_early: bool = False

    @property
    def with_cause(self) -> str:
        return f"{self.sentence}. Usual cause: {self.cause}"

    def text(self, lead: str, seconds: float) -> str:
        """All of it, for a terminal. lead: what has lasted so long."""
        lines = [
            f"stepladder: {lead} for {seconds:.0f} s: {self.sentence}",
            f"  usual cause: {self.cause}",
        ]
        first = sorted(self.ranks, key=lambda r: (r.rank != self.rank, r.rank))
        for one in first[:RANKS_SHOWN]:
            lines += described(one)
        if len(first) > RANKS_SHOWN:
            lines.append(f"  ... and {len(first) - RANKS_SHOWN} more ranks")
        return "\n".join(lines)


def described(one: Rank) -> list[str]:
    """A rank's place and its main thread's stack, its other threads and workers in a line each."""
    s = one.standing
    facts = [str(one.state)] if one.state != State.RUNNING else []
    facts += [f"step {s.step}"] if s.step else []
    facts += [PHASES[s.phase]] if s.phase else []
    facts += [f"{s.count} collectives begun"] if s.count else []
    lines = [f"  [rank {one.rank}] pid {one.pid}{''.join(f', {fact}' for fact in facts)}"]
    lines += [f"    {in_code(f)}" for f in shown(one.stack)]
    if not one.stack and one.state not in (State.DONE, State.ENDED):
        lines.append("    no stack: it did not answer")
    for thread in one.threads[1:]:
        if (place := users_frame(thread)) and not (place.is_library or place.is_own):
            lines.append(f"    another thread: {in_code(place)}")
    for pid, stack in sorted(one.workers.items()):
        if place := users_frame(stack):
            lines.append(f"    worker {pid}: {in_code(place)}")
    return lines


def shown(stack: Stack) -> Stack:
    """The calls that tell something: the innermost, the user's own, and the one of this package
    that made them.
    """
    stack = [f for n, f in enumerate(stack) if n == 0 or not f.is_library]
    end = next(
        (n for n, f in enumerate(stack) if n > 0 and f.is_own and not stack[n - 1].is_own),
        FRAMES_SHOWN,
    )
    return stack[: min(end + 1, FRAMES_SHOWN)]


def explain(ranks: Sequence[Rank], all_here: bool = True) -> Explanation:
    """all_here: False where other nodes have ranks too, which cannot be seen from here."""
    ranks = _of_one_group(ranks)
    return (
        _stopped(ranks)
        or _early(ranks)
        or mismatched(ranks)
        or _aborted(ranks)
        or _behind(ranks)
        or _apart(ranks)
        or _together(ranks, all_here)
    )


def _of_one_group(ranks: Sequence[Rank]) -> Sequence[Rank]:
    """The newest. The others were lost, or are yet to join: nobody waits for them."""
    newest = max((one.standing.group for one in ranks), default=0)
    return [one for one in ranks if one.standing.group == newest]


def _stopped(ranks: Sequence[Rank]) -> Explanation | None:
    for one in ranks:
        if one.state == State.STOPPED:
            sentence = f"{one} is stopped (SIGSTOP){_last(one)}; the others wait for it"
            return Explanation(one.rank, sentence, USUAL["stopped"].format(pid=one.pid), ranks)
    return None


def _early(ranks: Sequence[Rank]) -> Explanation | None:
    """Ranks that ended well while others were in a collective, or still are."""
    left = [r for r in ranks if r.state == State.DONE]
    others = [r for r in ranks if r not in left and r.waits]
    if not left or not others:
        return None
    one, made = others[0], left[0].standing.step - 1
    after = f" after {made} steps" if made > 0 else ""
    be = "is" if one.state == State.RUNNING else "was"
    at = f" in step {one.standing.step}," if one.standing.step else ""
    place = replace(one, state=State.RUNNING).where()
    sentence = f"{_names(left)} ended well (exit code 0){after}; {one} {be}{at} {place}"
    return Explanation(left[0].rank, sentence, USUAL["ended well"], ranks, is_early=True)


def _aborted(ranks: Sequence[Rank]) -> Explanation | None:
    """gloo ends a rank that gets more than it waits for: of another collective, or of another
    shape.
    """
    one = next((r for r in ranks if r.state == State.ABORTED and r.collective), None)
    if one is None:
        return None
    others = [
        replace(r, state=State.RUNNING) for r in ranks if r is not one and r.collective
    ]  # where they were
    apart = next((other for other in others if other.where() != one.where()), None)
    sentence = f"{one} was aborted {one.where()}"
    if apart is not None:
        return Explanation(
            one.rank, f"{sentence}, while {apart} was {apart.where()}", USUAL["order"], ranks, True
        )
    if others:
        return Explanation(
            one.rank, f"{sentence}, where {others[0]} was too", USUAL["size"], ranks, True
        )
    return Explanation(one.rank, sentence, f"{USUAL['order']}; or {USUAL['size']}", ranks, True)


def _last(one: Rank) -> str:
    s = one.standing
    at = f" in step {s.step}" if s.step else ""
    if one.frame:
        return f"{at}, {one.where()}"
    seen = s.collective(s.count)
    return f"{at}, after {seen[0].name} {s.count} ({seen[0]})" if seen else at


def mismatched(ranks: Sequence[Rank]) -> Explanation | None:
    """The first collective that two ranks did not make alike."""
    counted = [r for r in _of_one_group(ranks) if r.standing.count]
    last = min((r.standing.count for r in counted), default=0)
    for number in range(max(1, last - RING + 1), last + 1):
        seen = [(r, found) for r in counted if (found := r.standing.collective(number))]
        if len(seen) < 2:
            continue
        at = _of_step(ranks) if number == last else ""  # else the step was another one
        (_, (site, size)), *rest = seen
        for one, (other, others_size) in rest:
            if other.name != site.name:
                sentence = (
                    f"{one} makes {other.name} ({other}) where {seen[0][0]} makes {site.name} ({site}):"
                    f" collective {number}{at}"
                )
                cause = "block" if OF_BLOCK in other.name or OF_BLOCK in site.name else "order"
                return Explanation(one.rank, sentence, USUAL[cause], ranks)
            if -1 not in (size, others_size) and size != others_size:
                sentence = (
                    f"{one} brings {others_size} numbers to {site.name} {number}{at}"
                    f" ({other}), {seen[0][0]} brings {size}"
                )
                return Explanation(one.rank, sentence, USUAL["size"], ranks)
    return None


def _of_step(ranks: Iterable[Rank]) -> str:
    step = min(r.standing.step for r in ranks)
    return f" of step {step}" if step else ""


def _behind(ranks: Sequence[Rank]) -> Explanation | None:
    """Ranks that have begun fewer collectives than others have."""
    most, least = max(r.standing.count for r in ranks), min(r.standing.count for r in ranks)
    if most == least:
        return None
    late = [r for r in ranks if r.standing.count == least]
    if all(
        r.standing.waits for r in late
    ):  # for one that the others have left behind: nobody is missing
        return None
    ahead = next(r for r in ranks if r.standing.count == most)
    known = ahead.standing.collective(least + 1)
    what = f"{known[0].name if known else 'collective'} {least + 1}{_of_step(ranks)}"
    verb = "has" if len(late) == 1 else "have"
    sentence = f"{_names(late)} {verb} not reached {what}: {_each(late)}; the others wait"
    return Explanation(late[0].rank, sentence, cause_of(late[0]), ranks)


def _apart(ranks: Sequence[Rank]) -> Explanation | None:
    """All have begun as many of the job's collectives; some wait in one, some do not, or in another
    one.
    """
    by_job = [r for r in ranks if r.standing.waits]
    by_itself = [r for r in ranks if r.collective and not r.standing.waits]
    free = [r for r in ranks if not r.waits and r.state in (State.RUNNING, State.SILENT)]
    if blamed := (free and (by_job or by_itself) and free) or (by_job and by_itself):
        place = f"in {_awaited(by_job[0])}" if by_job else by_itself[0].where()
        step = f" in step {blamed[0].standing.step}" if blamed[0].standing.step else ""
        sentence = f"{_names(blamed)}{step}: {_each(blamed)}; the others wait {place}"
        return Explanation(blamed[0].rank, sentence, cause_of(blamed[0]), ranks)
    for one in by_itself[1:]:
        if one.where() != by_itself[0].where():
            sentence = (
                f"{one} waits {one.where()}, while {by_itself[0]} waits {by_itself[0].where()}"
            )
            return Explanation(one.rank, sentence, USUAL["order"], ranks)
    return None


def _together(ranks: Sequence[Rank], all_here: bool) -> Explanation:
    """All ranks that can be seen are in the same place."""
    one = ranks[0]
    gone = [r for r in ranks if r.state == State.ENDED]
    who = "all ranks" if all_here else "all ranks of this node"
    if len(ranks) == 1:
        who = str(one)
    elif gone and len(gone) < len(ranks):
        sentence = f"{_names(gone)} {'has' if len(gone) == 1 else 'have'} ended; the others are still there"
        return Explanation(gone[0].rank, sentence, USUAL["ended"], ranks)
    if one.waits:
        what = _awaited(one) if one.standing.waits else one.where().removeprefix("in ")
        sentence = f"{who} wait{'s' if len(ranks) == 1 else ''} in {what}"
        return Explanation(None, sentence, USUAL["here" if all_here else "network"], ranks)
    if any(other.where() != one.where() for other in ranks):
        return Explanation(None, f"no rank waits for another: {_each(ranks)}", USUAL["slow"], ranks)
    cause = (
        USUAL["early" if one.standing.phase == STARTING else "slow"]
        if len(ranks) > 1
        else cause_of(one)
    )
    be = "is" if len(ranks) == 1 else "are"
    at = f" in step {one.standing.step}," if one.standing.step else ""
    return Explanation(one.rank, f"{who} {be}{at} {one.where()}", cause, ranks)


def _awaited(one: Rank) -> str:
    number = one.standing.waits
    known = one.standing.collective(number)
    name, place = (known[0].name, f" ({known[0]})") if known else ("collective", "")
    return f"{name} {number}{_of_step([one])}{place}"


def _names(some: Sequence[Rank]) -> str:
    if len(some) == 1:
        return str(some[0])
    shown = [str(one.rank) for one in some[:RANKS_NAMED]] + ["..."] * (len(some) > RANKS_NAMED)
    return "ranks " + ", ".join(shown)


def _each(some: Sequence[Rank]) -> str:
    if len(some) == 1:
        return f"it is {some[0].where()}"
    return "; ".join(f"rank {one.rank} is {one.where()}" for one in some[:RANKS_NAMED])


def cause_of(one: Rank) -> str:
    """What usually keeps a rank that others wait for."""
    if one.state != State.RUNNING:
        return USUAL[one.state].format(pid=one.pid)
    if one.collective:
        return USUAL["extra"]
    if one.standing.phase == READING or one.loads:
        return USUAL["data"]
    code = one.frame.source.partition("  #")[0] if one.frame else ""
    in_lock = any(f.file.endswith(LOCK_FILES) for f in one.stack[:3]) or LOCK_CODE.search(code)
    if in_lock and "sleep(" not in code:
        return USUAL["lock"]
    return USUAL["early" if one.standing.phase == STARTING and one.standing.count == 0 else "busy"]
