"""What a launcher sees of its ranks without asking them: whether one is stopped, and whether
anything moves.

Looks are counted, not seconds: when the launcher itself was stopped, that is nobody's fault.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from stepladder.core.errors import DONE
from stepladder.launcher.diagnose.flight import dumps_of, prefix_for, read_dump, standings
from stepladder.launcher.diagnose.hang import Explanation, explain, mismatched
from stepladder.launcher.diagnose.seen import Rank, State
from stepladder.launcher.local.rest import Rest, children_of, cpu_seconds, is_stopped
from stepladder.rank import progress
from stepladder.rank.open_file import MemoryFile
from stepladder.rank.stacks import last_words, raised_at, stacks_of

SECONDS_BETWEEN_LOOKS = 0.2
LOOKS_UNTIL_NAMED = (
    5  # a second: a Ctrl-Z stops the launcher too, and both go on at about the same time
)
LOOKS_BETWEEN_QUESTIONS = 5  # at the least: to be asked where it is takes a rank's time
SECONDS_UNTIL_EXPLAINED = 60.0
SECONDS_AFTER_TIMEOUT = 5.0  # ranks that wait end by themselves, and say more
CPU_SHARE_OF_WORK = 0.05  # of a rank that shows no words; below it, the rank does nothing


@dataclass(frozen=True)
class Limits:
    """In seconds. timeout: that a rank may stay stopped, or that nothing may move.

    explain_after: without movement until it is said why; None: a minute, or half the timeout if
    that is less. end_after: without movement until ranks that show no words, as a script's, are
    overdue; None: never, for they may be busy."""

    timeout: float = 600.0
    explain_after: float | None = None
    end_after: float | None = None


class Monitor:
    """The ranks of one node, by their local rank.

    dumps: how the names of files begin that NCCL's flight recorder leaves.  world_size: ranks on
    all nodes, where that is more."""

    def __init__(
        self, dumps: Path, ranks: Sequence[int], limits: Limits, world_size: int = 0
    ) -> None:
        self.dumps, self.ranks, self.limits = dumps, list(ranks), limits
        self.words, self.sites = MemoryFile("words"), MemoryFile("sites")
        self.stacks = [MemoryFile("stacks") for _ in ranks]
        given = limits.explain_after
        self.explain_after = (
            min(SECONDS_UNTIL_EXPLAINED, limits.timeout / 2) if given is None else given
        )
        self.all_here = world_size <= len(ranks)
        self.pids: list[int] = []
        self.looks_stopped = [0] * len(ranks)
        self.still = 0  # looks since something moved
        self.rests = [Rest() for _ in ranks]
        self.waiting: dict[
            int, str
        ] = {}  # local ranks that were found to wait for others, and how they rest
        self.unasked = math.inf  # looks since ranks were asked where they are
        self.ended: dict[int, int] = {}  # exit codes of local ranks
        self.speaks = (
            self.all_here
        )  # else nobody here says why ranks wait, unless it is to say it for all nodes
        self.seen = b""
        self.cpu: dict[int, float] = {}
        self.explanation: Explanation | None = None
        self.words.path.write_bytes(bytes(progress.BYTES_PER_RANK * len(ranks)))

    def env(self, rank: int, local_rank: int) -> dict[str, str]:
        """Return what tells a rank its words, and where to answer with its stack."""
        paths = str(self.words.path), str(self.sites.path), str(self.stacks[local_rank].path)
        return {**progress.RankFiles(rank, local_rank, *paths).variable, **prefix_for(self.dumps)}

    def replace(self, local_rank: int, rank: int, pid: int) -> None:
        """Another process in a lost one's place."""
        progress.clear_words(self.words.path, local_rank)
        self.ranks[local_rank], self.pids[local_rank] = rank, pid
        self.rests[local_rank], self.looks_stopped[local_rank] = Rest(), 0
        self.ended.pop(local_rank, None)

    def ask_to_regroup(self, local_rank: int) -> None:
        """After its step: another rank waits to join."""
        progress.write_word(self.words.path, local_rank, progress.REGROUP, 1)

    def look(self, alive: Iterable[int]) -> str | None:
        """Look at the local ranks that are alive, every SECONDS_BETWEEN_LOOKS. Text to show, or
        None.
        """
        alive = list(alive)
        lines = [line for local_rank in alive if (line := self._look_at(local_rank))]
        lasted = self._looks()
        self.still = 0 if self._moved(alive) else self.still + 1
        for local_rank in alive:
            self.rests[local_rank].look(self.pids[local_rank])
        self.unasked += 1
        if self.explanation is not None and not self._looks():
            if self.speaks and len(alive) == len(
                self.ranks
            ):  # else what wakes them may be a lost connection
                lines.append(f"the ranks go on, after {lasted * SECONDS_BETWEEN_LOOKS:.0f} s")
            self.explanation, self.waiting, self.speaks = None, {}, self.all_here
        elif self.explanation is None and alive and (text := self._explain_if_it_hangs(alive)):
            lines.append(text)
        return "\n".join(lines) or None

    def _explain_if_it_hangs(self, alive: list[int]) -> str | None:
        """The sign of a hang: nothing moves, or ranks have waited in one collective, whatever
        others do.
        """
        enough = math.ceil(self.explain_after / SECONDS_BETWEEN_LOOKS)
        is_still = self.still >= enough
        longest = [max(self.rests[r].asleep, self.rests[r].idle) for r in alive]
        pause = LOOKS_BETWEEN_QUESTIONS if enough in longest else enough
        if not is_still and (max(longest) < enough or self.unasked < pause):
            return None
        looks, self.unasked = [(rest.asleep, rest.idle) for rest in self.rests], 0
        found = self.explain(alive)
        waiting = {r: kind for r in alive if (kind := _rests(found.ranks[r], looks[r], enough))}
        if not is_still and not waiting:
            return None
        self.explanation, self.waiting = found, waiting
        return self.text_of(found) if self.speaks else None

    def text_of(self, found: Explanation) -> str:
        """What is said of a hang, here or, with the ranks of other nodes, for all."""
        lead = (
            "other ranks have waited"
            if self.still < self._looks() or not self.all_here
            else "nothing has moved"
        )
        return found.text(lead, self._looks() * SECONDS_BETWEEN_LOOKS)

    def _look_at(self, local_rank: int) -> str | None:
        pid, looks = self.pids[local_rank], self.looks_stopped
        looks[local_rank] = looks[local_rank] + 1 if is_stopped(pid) else 0
        if looks[local_rank] != LOOKS_UNTIL_NAMED:
            return None
        return (
            f"rank {self.ranks[local_rank]} (pid {pid}) is stopped (SIGSTOP): `kill -CONT"
            f" {pid}` within {self.limits.timeout:g} s (--timeout), or all ranks are restarted"
        )

    def _looks(self) -> int:
        """For how many looks ranks have waited in vain, or nothing has moved."""
        return max(
            (getattr(self.rests[r], kind) for r, kind in self.waiting.items()), default=self.still
        )

    def _still_for(self, seconds: float) -> bool:
        return self._looks() * SECONDS_BETWEEN_LOOKS >= seconds

    def _moved(self, alive: list[int]) -> bool:
        """Whether a rank's words have changed since the last look, or one without words has
        computed.
        """
        seen = self.words.path.read_bytes()
        moved, self.seen = seen != self.seen, seen
        phases = memoryview(seen).cast("q")[progress.PHASE :: progress.WORDS]
        silent = (r for r in alive if phases[r] == progress.UNKNOWN)
        spent = {local_rank: cpu_seconds(self.pids[local_rank]) for local_rank in silent}
        idle = (self.still + 1) * SECONDS_BETWEEN_LOOKS
        least = max(CPU_SHARE_OF_WORK * idle, SECONDS_BETWEEN_LOOKS)
        for local_rank, seconds in spent.items():
            moved |= seconds - self.cpu.setdefault(local_rank, seconds) > least
        if moved:
            self.cpu.update(spent)
        return moved

    @property
    def has_begun(self) -> bool:
        """Whether a rank here has got beyond its start: the run directory is open then."""
        phases = memoryview(self.seen).cast("q")[progress.PHASE :: progress.WORDS]
        return any(phase > progress.STARTING for phase in phases)

    @property
    def overdue(self) -> bool:
        """Whether a rank has been stopped for too long, or nothing has moved for too long."""
        if max(self.looks_stopped, default=0) * SECONDS_BETWEEN_LOOKS >= self.limits.timeout:
            return True
        end_after = self.limits.end_after
        if end_after is not None and self.explanation is not None and self._still_for(end_after):
            return True
        # Downloads and compilations have no limit, unless others wait for them, which has its own.
        phases = memoryview(self.seen).cast("q")[progress.PHASE :: progress.WORDS]
        starting = all(phase <= progress.STARTING for phase in phases)
        return not starting and self._still_for(self.limits.timeout + SECONDS_AFTER_TIMEOUT)

    def mismatch(self) -> Explanation | None:
        """What ranks brought to one collective that did not fit: also after it has ended them."""
        seen = zip(self.ranks, self.pids, self._written(), strict=True)
        return mismatched([Rank(rank, pid, State.ENDED, standing) for rank, pid, standing in seen])

    def explain(self, alive: Iterable[int], traces: Mapping[int, str] | None = None) -> Explanation:
        """Why nothing moves, as far as it can be seen from here. traces: of ranks that have raised."""
        return explain(self.look_into(alive, traces), self.all_here)

    def look_into(
        self, alive: Iterable[int], traces: Mapping[int, str] | None = None
    ) -> list[Rank]:
        """The local ranks, asked for their stacks where they are alive."""
        alive, traces, seen = set(alive), traces or {}, []
        host = "" if self.all_here else socket.gethostname()
        for local_rank, standing in enumerate(self._standings()):
            rank, pid = self.ranks[local_rank], self.pids[local_rank]
            file = self.stacks[local_rank].path
            if local_rank in alive:
                state = State.STOPPED if is_stopped(pid) else State.RUNNING
                threads = stacks_of(pid, file)
                workers = {
                    child: found[0]
                    for child in children_of(pid)
                    if (found := stacks_of(child, file))
                }
                seen.append(Rank(rank, pid, state, standing, threads, workers, host))
                self.rests[local_rank].forgive(pid)
            else:
                crashed = last_words(file)
                well = State.DONE if self.ended.get(local_rank) == DONE else State.ENDED
                state = State.ABORTED if crashed else well
                left = crashed or raised_at(traces.get(rank, ""))
                seen.append(Rank(rank, pid, state, standing, left, host=host))
        return seen

    @property
    def has_dumps(self) -> bool:
        """Whether NCCL has given up, and torch's flight recorder left what it saw."""
        return bool(dumps_of(self.dumps, self.ranks))

    def _written(self) -> list[progress.Standing]:
        return progress.read_progress(self.words.path, self.sites.path, self.ranks)

    def _standings(self) -> list[progress.Standing]:
        """What ranks wrote themselves; for scripts, which write nothing, what the flight recorder
        left.
        """
        written = self._written()
        if any(one.count for one in written):
            return written
        dumps = {}
        for rank, path in dumps_of(self.dumps, self.ranks).items():
            with suppress(OSError, ValueError):  # damaged: the rank was killed while it wrote
                dumps[rank] = read_dump(path)
        left = standings(dumps)
        return [left.get(rank, one) for rank, one in zip(self.ranks, written, strict=True)]


def _rests(one: Rank, looks: tuple[int, int], enough: int) -> str:
    """How it rests, as in `Rest`, if it has waited for others for so many looks; else ""."""
    asleep, idle = looks
    if one.waits and asleep >= enough:
        return "asleep"
    return "idle" if one.meets and idle >= enough else ""
