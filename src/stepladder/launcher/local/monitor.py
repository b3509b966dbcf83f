"""What a launcher sees of its ranks without asking them: whether one is stopped, and whether anything moves.

Looks are counted, not seconds: when the launcher itself was stopped, that is nobody's fault.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from stepladder.launcher.diagnose.flight import dumps_of, prefix_for, read_dump, standings
from stepladder.launcher.diagnose.hang import Explanation, Rank, explain, mismatched
from stepladder.rank.progress import PHASE, PROGRESS, SLOT_BYTES, STARTING, WORDS, Standing, make_slots, read_slots
from stepladder.rank.stacks import children_of, last_words, raised_at, stacks_file, stacks_of

SECONDS_BETWEEN_LOOKS = 0.2
LOOKS_UNTIL_NAMED = 5  # a second: a Ctrl-Z stops the launcher too, and both go on at about the same time
SECONDS_UNTIL_EXPLAINED = 60.0
SECONDS_AFTER_TIMEOUT = 5.0  # ranks that wait end by themselves, and say more
CPU_SHARE_OF_WORK = 0.05  # of a rank that shows no words; below it, the rank does nothing


def is_stopped(pid: int) -> bool:
    """Whether SIGSTOP or Ctrl-Z holds the process; one under a debugger is not meant."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"T"
    except OSError:
        return False


def cpu_seconds(pid: int) -> float:
    """Time that a process has computed, in user and system mode; 0 where it has gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Watch:
    """The ranks of one node, by their place there.

    timeout: seconds that a rank may stay stopped, or that nothing may move.  explain_after: seconds without
    movement until it is said why; None: a minute, or half the timeout if that is less.  end_after: seconds without
    movement until ranks that show no words, as a script's, are overdue; None: never, for they may be busy.
    world_size: ranks on all nodes, where that is more.
    """

    def __init__(
        self,
        file: Path,
        ranks: Sequence[int],
        timeout: float,
        explain_after: float | None = None,
        world_size: int = 0,
        end_after: float | None = None,
    ) -> None:
        self.end_after = end_after
        self.file, self.ranks, self.timeout = file, ranks, timeout
        self.explain_after = min(SECONDS_UNTIL_EXPLAINED, timeout / 2) if explain_after is None else explain_after
        self.all_here = world_size <= len(ranks)
        self.pids: list[int] = []
        self.looks = [0] * len(ranks)
        self.still = 0  # looks since something moved
        self.seen = b""
        self.cpu: dict[int, float] = {}
        self.explanation: Explanation | None = None
        make_slots(file, len(ranks))

    def env(self, place: int) -> dict[str, str]:
        """What tells a rank its words, and where to answer with its stack."""
        return {PROGRESS: f"{self.file}:{place}", **prefix_for(self.file)}

    def look(self, alive: Iterable[int]) -> str | None:
        """Look at the places where a rank is alive, every SECONDS_BETWEEN_LOOKS. Text to show, or None."""
        places = list(alive)
        lines = [line for place in places if (line := self._look_at(place))]
        if self._moved(places):
            if self.explanation is not None and self.still * SECONDS_BETWEEN_LOOKS >= self.explain_after:
                lines.append(f"the ranks go on, after {self.still * SECONDS_BETWEEN_LOOKS:.0f} s")
            self.still, self.explanation = 0, None
        else:
            self.still += 1
            if places and self.explanation is None and self._still_for(self.explain_after):
                self.explanation = self.explain(places)
                lines.append(self.explanation.text(self.still * SECONDS_BETWEEN_LOOKS))
        return "\n".join(lines) or None

    def _look_at(self, place: int) -> str | None:
        self.looks[place] = self.looks[place] + 1 if is_stopped(self.pids[place]) else 0
        if self.looks[place] != LOOKS_UNTIL_NAMED:
            return None
        return (
            f"rank {self.ranks[place]} (pid {self.pids[place]}) is stopped (SIGSTOP): `kill -CONT"
            f" {self.pids[place]}` within {self.timeout:g} s (--timeout), or all ranks are restarted"
        )

    def _still_for(self, seconds: float) -> bool:
        return self.still * SECONDS_BETWEEN_LOOKS >= seconds

    def _moved(self, alive: list[int]) -> bool:
        """Whether a rank's words have changed since the last look, or one without words has computed."""
        seen = self.file.read_bytes()
        moved, self.seen = seen != self.seen, seen
        for place in alive:
            if not any(seen[place * SLOT_BYTES : (place + 1) * SLOT_BYTES]):
                spent = cpu_seconds(self.pids[place])
                idle = (self.still + 1) * SECONDS_BETWEEN_LOOKS
                if spent - self.cpu.setdefault(place, spent) > max(
                    CPU_SHARE_OF_WORK * idle, SECONDS_BETWEEN_LOOKS
                ):
                    moved = True
                if moved:
                    self.cpu[place] = spent
        return moved

    @property
    def overdue(self) -> bool:
        """Whether a rank has been stopped for too long, or nothing has moved for too long."""
        if max(self.looks, default=0) * SECONDS_BETWEEN_LOOKS >= self.timeout:
            return True
        if self.end_after is not None and self.explanation is not None and self._still_for(self.end_after):
            return True
        return self._still_for(self.timeout + SECONDS_AFTER_TIMEOUT) and not self._is_starting()

    def _is_starting(self) -> bool:
        """Downloads and compilations have no limit, unless others wait for them, which has its own."""
        words = memoryview(self.seen).cast("q")
        return all(words[place * WORDS + PHASE] <= STARTING for place in range(len(self.ranks)))

    def mismatch(self) -> Explanation | None:
        """What ranks brought to one collective that did not fit: also after it has ended them."""
        standings = read_slots(self.file, len(self.ranks))
        return mismatched(
            [Rank(r, p, "ended", s) for r, p, s in zip(self.ranks, self.pids, standings, strict=True)]
        )

    def explain(self, alive: Iterable[int], traces: Mapping[int, str] | None = None) -> Explanation:
        """Why nothing moves: asks the ranks that are alive for their stacks. traces: of ranks that have raised."""
        standings, places = self._standings(), set(alive)
        ranks = []
        for place, (rank, standing) in enumerate(zip(self.ranks, standings, strict=True)):
            pid, file = self.pids[place], stacks_file(self.file, place)
            if place not in places:
                crashed = last_words(file)
                threads = crashed or raised_at((traces or {}).get(rank, ""))
                ranks.append(Rank(rank, pid, "aborted" if crashed else "ended", standing, threads))
                continue
            stopped = is_stopped(pid)
            threads = stacks_of(pid, file)
            workers = {child: found[0] for child in children_of(pid) if (found := stacks_of(child, file))}
            ranks.append(Rank(rank, pid, "stopped" if stopped else "running", standing, threads, workers))
        return explain(ranks, self.all_here)

    @property
    def has_dumps(self) -> bool:
        """Whether NCCL has given up, and torch's flight recorder left what it saw."""
        return bool(dumps_of(self.file, self.ranks))

    def _standings(self) -> list[Standing]:
        """What ranks wrote themselves; for scripts, which write nothing, what the flight recorder left."""
        written = read_slots(self.file, len(self.ranks))
        if any(one.count for one in written):
            return written
        dumps = {}
        for rank, path in dumps_of(self.file, self.ranks).items():
            with suppress(OSError, ValueError):  # damaged: the rank was killed while it wrote
                dumps[rank] = read_dump(path)
        left = standings(dumps)
        return [left.get(rank, one) for rank, one in zip(self.ranks, written, strict=True)]
