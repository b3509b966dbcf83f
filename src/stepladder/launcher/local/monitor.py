"""What a launcher sees of its ranks without asking them: whether one is stopped, and whether anything moves.

Looks are counted, not seconds: when the launcher itself was stopped, that is nobody's fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from stepladder.launcher.diagnose.flight import dumps_of, prefix_for, read_dump, standings
from stepladder.launcher.diagnose.hang import Explanation, explain, mismatched
from stepladder.launcher.diagnose.seen import Rank, State
from stepladder.rank import progress
from stepladder.rank.stacks import last_words, raised_at, stacks_of

if TYPE_CHECKING:
    import psutil

T = TypeVar("T")
SECONDS_BETWEEN_LOOKS = 0.2
LOOKS_UNTIL_NAMED = 5  # a second: a Ctrl-Z stops the launcher too, and both go on at about the same time
SECONDS_UNTIL_EXPLAINED = 60.0
SECONDS_AFTER_TIMEOUT = 5.0  # ranks that wait end by themselves, and say more
CPU_SHARE_OF_WORK = 0.05  # of a rank that shows no words; below it, the rank does nothing


@dataclass(frozen=True)
class Limits:
    """In seconds. timeout: that a rank may stay stopped, or that nothing may move.

    explain_after: without movement until it is said why; None: a minute, or half the timeout if that is less.
    end_after: without movement until ranks that show no words, as a script's, are overdue; None: never, for they
    may be busy.
    """

    timeout: float = 600.0
    explain_after: float | None = None
    end_after: float | None = None


def told(pid: int, ask: Callable[[psutil.Process], T], gone: T) -> T:
    """What there is to be told of a process; `gone` where it has ended."""
    import psutil  # late: it would be a third of the time that `train --help` takes

    with suppress(psutil.NoSuchProcess):
        return ask(psutil.Process(pid))
    return gone


def is_stopped(pid: int) -> bool:
    """Whether SIGSTOP or Ctrl-Z holds the process; one under a debugger is not meant."""
    return told(pid, lambda process: process.status() == "stopped", False)


def cpu_seconds(pid: int) -> float:
    """Time that a process has computed, in user and system mode."""
    return told(pid, lambda process: sum(process.cpu_times()[:2]), 0.0)


def children_of(pid: int) -> list[int]:
    return told(pid, lambda process: sorted(child.pid for child in process.children()), [])


class Monitor:
    """The ranks of one node, by their local rank. world_size: ranks on all nodes, where that is more."""

    def __init__(self, file: Path, ranks: Sequence[int], limits: Limits, world_size: int = 0) -> None:
        self.file, self.ranks, self.limits = file, ranks, limits
        given = limits.explain_after
        self.explain_after = min(SECONDS_UNTIL_EXPLAINED, limits.timeout / 2) if given is None else given
        self.all_here = world_size <= len(ranks)
        self.pids: list[int] = []
        self.looks_stopped = [0] * len(ranks)
        self.still = 0  # looks since something moved
        self.seen = b""
        self.cpu: dict[int, float] = {}
        self.explanation: Explanation | None = None
        progress.clear_progress(file, len(ranks))

    def env(self, local_rank: int) -> dict[str, str]:
        """What tells a rank its words, and where to answer with its stack."""
        return {progress.PROGRESS: f"{self.file}:{local_rank}", **prefix_for(self.file)}

    def look(self, alive: Iterable[int]) -> str | None:
        """Look at the local ranks that are alive, every SECONDS_BETWEEN_LOOKS. Text to show, or None."""
        alive = list(alive)
        lines = [line for local_rank in alive if (line := self._look_at(local_rank))]
        if self._moved(alive):
            if self.explanation is not None and self._still_for(self.explain_after):
                lines.append(f"the ranks go on, after {self.still * SECONDS_BETWEEN_LOOKS:.0f} s")
            self.still, self.explanation = 0, None
        else:
            self.still += 1
            if alive and self.explanation is None and self._still_for(self.explain_after):
                self.explanation = self.explain(alive)
                lines.append(self.explanation.text(self.still * SECONDS_BETWEEN_LOOKS))
        return "\n".join(lines) or None

    def _look_at(self, local_rank: int) -> str | None:
        pid, looks = self.pids[local_rank], self.looks_stopped
        looks[local_rank] = looks[local_rank] + 1 if is_stopped(pid) else 0
        if looks[local_rank] != LOOKS_UNTIL_NAMED:
            return None
        return (
            f"rank {self.ranks[local_rank]} (pid {pid}) is stopped (SIGSTOP): `kill -CONT"
            f" {pid}` within {self.limits.timeout:g} s (--timeout), or all ranks are restarted"
        )

    def _still_for(self, seconds: float) -> bool:
        return self.still * SECONDS_BETWEEN_LOOKS >= seconds

    def _moved(self, alive: list[int]) -> bool:
        """Whether a rank's words have changed since the last look, or one without words has computed."""
        seen = self.file.read_bytes()
        moved, self.seen = seen != self.seen, seen
        size = progress.BYTES_PER_RANK
        silent = (r for r in alive if not any(seen[r * size : (r + 1) * size]))
        spent = {local_rank: cpu_seconds(self.pids[local_rank]) for local_rank in silent}
        idle = (self.still + 1) * SECONDS_BETWEEN_LOOKS
        least = max(CPU_SHARE_OF_WORK * idle, SECONDS_BETWEEN_LOOKS)
        for local_rank, seconds in spent.items():
            moved |= seconds - self.cpu.setdefault(local_rank, seconds) > least
        if moved:
            self.cpu.update(spent)
        return moved

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
        seen = zip(self.ranks, self.pids, progress.read_progress(self.file, len(self.ranks)), strict=True)
        return mismatched([Rank(rank, pid, State.ENDED, standing) for rank, pid, standing in seen])

    def explain(self, alive: Iterable[int], traces: Mapping[int, str] | None = None) -> Explanation:
        """Why nothing moves: asks the ranks that are alive for their stacks. traces: of ranks that have raised."""
        alive, traces, seen = set(alive), traces or {}, []
        for local_rank, standing in enumerate(self._standings()):
            rank, pid = self.ranks[local_rank], self.pids[local_rank]
            file = progress.file_beside(self.file, local_rank, "stacks")
            if local_rank in alive:
                state = State.STOPPED if is_stopped(pid) else State.RUNNING
                threads = stacks_of(pid, file)
                workers = {child: found[0] for child in children_of(pid) if (found := stacks_of(child, file))}
                seen.append(Rank(rank, pid, state, standing, threads, workers))
            else:
                crashed = last_words(file)
                state = State.ABORTED if crashed else State.ENDED
                seen.append(Rank(rank, pid, state, standing, crashed or raised_at(traces.get(rank, ""))))
        return explain(seen, self.all_here)

    @property
    def has_dumps(self) -> bool:
        """Whether NCCL has given up, and torch's flight recorder left what it saw."""
        return bool(dumps_of(self.file, self.ranks))

    def _standings(self) -> list[progress.Standing]:
        """What ranks wrote themselves; for scripts, which write nothing, what the flight recorder left."""
        written = progress.read_progress(self.file, len(self.ranks))
        if any(one.count for one in written):
            return written
        dumps = {}
        for rank, path in dumps_of(self.file, self.ranks).items():
            with suppress(OSError, ValueError):  # damaged: the rank was killed while it wrote
                dumps[rank] = read_dump(path)
        left = standings(dumps)
        return [left.get(rank, one) for rank, one in zip(self.ranks, written, strict=True)]
