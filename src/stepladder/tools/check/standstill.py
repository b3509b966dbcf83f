"""Whether the ranks of a script stand still, and why: from their processes, not from their events.

A rank that computes for minutes without an event does not stand still, and neither does one that
downloads while the others wait for it.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from stepladder.launcher.diagnose.deadlock import PAUSE_S, QUIET_S, DeadlockFinder
from stepladder.launcher.diagnose.explanation import Explanation
from stepladder.launcher.diagnose.hang import explain_hang, find_rank_to_blame
from stepladder.launcher.diagnose.rank_status import ProcessState, RankStatus
from stepladder.launcher.local.process_stats import (
    IdleKind,
    IdleMeter,
    find_children,
    is_alive,
    is_stopped,
    read_busy_seconds,
)
from stepladder.rank.stacks import Stack, parse_traceback, read_abort_stacks, read_stacks
from stepladder.tools.check.events import (
    Backward,
    Forward,
    GroupDestroy,
    GroupInit,
    GroupJoined,
    ProcessStart,
    ScriptCollective,
)
from stepladder.tools.check.failure import RANK_PREFIX, WAITED_TOO_LONG
from stepladder.tools.check.probe_settings import STACKS_SUFFIX
from stepladder.tools.probe.events import ProbeEvent

OBSERVE_INTERVAL_S = 0.2
NO_PID = 0  # of ranks in a report, whose text is the same each time
WORKING_SHARE = 0.05  # of a core
ENDED_THREAD = re.compile(r"^Exception in (thread .+):$", re.MULTILINE)
LAST_LINE_BYTES = 4000
BLOCKING_EVENTS = (ScriptCollective, Backward, GroupInit, Forward, GroupDestroy)
TELLS_THE_RANK = (ProcessStart.marker(), GroupJoined.marker())


class ObservedProcesses:
    """The processes of one start of the script that are its ranks.

    Args:
        folder: The folder of their recordings and outputs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # The process of each rank, by rank.
        self.pids: dict[int, int] = {}
        # The number of ranks; 0 before it is known.
        self.world_size = 0
        self.meters: dict[int, IdleMeter] = {}
        self.finder = DeadlockFinder()
        self.known_busy_s = 0.0
        self.worked_at = self.polled_at = self.examined_at = time.monotonic()

    def add_events(self, path: Path, lines: bytes) -> None:
        """Learn from new lines of a recording which rank its process is."""
        pid = int(path.stem)
        for line in lines.splitlines():
            if not line.startswith(TELLS_THE_RANK):
                continue
            event = ProbeEvent.from_line(line)
            assert isinstance(event, ProcessStart)
            # A worker of a loader knows the rank, too, but starts later and joins no group.
            is_new = isinstance(event, GroupJoined) or event.rank not in self.pids
            if event.rank >= 0 and is_new:
                self.pids[event.rank] = pid
            self.world_size = max(self.world_size, event.world)

    @property
    def idle_s(self) -> float:
        """The seconds for which the processes have hardly done anything."""
        return time.monotonic() - self.worked_at

    def poll(self) -> Explanation | None:
        """Look at the processes, now and then, and return why no rank can go on, if so."""
        now = time.monotonic()
        if now - self.polled_at < OBSERVE_INTERVAL_S:
            return None
        self.polled_at = now
        self.measure_work(now)
        for pid in filter(is_alive, self.pids.values()):
            self.meters.setdefault(pid, IdleMeter()).poll(pid)
        is_early = now - self.examined_at < PAUSE_S
        if is_early or not self.are_quiet():
            return None
        explanation = self.finder.examine(self.inspect())
        self.examined_at = time.monotonic()
        return explanation

    def measure_work(self, now: float) -> None:
        """Compare what all processes have done with what was known."""
        busy_s = 0.0
        for path in self.folder.glob("*.jsonl"):
            busy_s += read_busy_seconds(int(path.stem))
        least_s = WORKING_SHARE * max(1.0, now - self.worked_at)
        if abs(busy_s - self.known_busy_s) > least_s:
            self.known_busy_s = busy_s
            self.worked_at = now

    def are_quiet(self) -> bool:
        """Return whether all ranks are known, and those that run have not computed for a while."""
        if self.world_size < 2 or len(self.pids) < self.world_size:
            return False
        polls = [meter.count(IdleKind.QUIET) for pid, meter in self.meters.items() if is_alive(pid)]
        return min(polls, default=0) * OBSERVE_INTERVAL_S >= QUIET_S

    def explain_failure(self) -> Explanation | None:
        """Return why ranks have failed together: some were aborted, or have waited too long.

        None if the failure is another one, or nothing is known of it. Of ranks that have waited too
        long it is the explanation that they would have had before.
        """
        statuses = self.inspect()
        if any(status.state is ProcessState.ABORTED for status in statuses):
            return explain_hang(statuses)
        have_come = [status for status in statuses if status.is_waiting]
        if not any(map(self.has_timed_out, have_come)):
            return None
        return find_rank_to_blame(
            [
                replace(status, state=ProcessState.RUNNING) if status.is_waiting else status
                for status in statuses
            ]
        )

    def has_timed_out(self, status: RankStatus) -> bool:
        """Return whether a rank has failed because it had waited too long."""
        if status.state is not ProcessState.ENDED:
            return False
        return WAITED_TOO_LONG.search(self.output_of(status.rank)) is not None

    def inspect(self) -> list[RankStatus]:
        """Return the status of each rank, with its stack."""
        return [self.inspect_rank(rank, pid) for rank, pid in sorted(self.pids.items())]

    def inspect_rank(self, rank: int, pid: int) -> RankStatus:
        if not is_alive(pid):
            return self.inspect_ended(rank)
        state = ProcessState.STOPPED if is_stopped(pid) else ProcessState.RUNNING
        workers: dict[int, Stack] = {}
        ended = ENDED_THREAD.findall(self.output_of(rank))
        for child in find_children(pid):
            if threads := self.read_stacks(child):
                workers[child] = threads[0]
            elif not is_alive(child):
                ended.append("a process of the rank")
        status = RankStatus(
            rank, NO_PID, state, threads=self.read_stacks(pid), workers=workers, ended=ended
        )
        self.meters.setdefault(pid, IdleMeter()).reset(pid)
        return status

    def inspect_ended(self, rank: int) -> RankStatus:
        """Return the status of a rank that has ended, from its last words."""
        state = ProcessState.ABORTED
        threads = read_abort_stacks(self.stacks_of(self.pids[rank]))
        raised = parse_traceback(self.output_of(rank))
        is_at_exit = bool(threads) and not threads[0]  # gloo may abort a rank that has raised
        if not threads or (is_at_exit and raised):
            threads = raised
            state = ProcessState.ENDED if raised else ProcessState.DONE
        return RankStatus(rank, NO_PID, state, threads=threads)

    def output_of(self, rank: int) -> str:
        """Return what a rank has printed; empty where the script has made it itself."""
        output = self.folder / f"rank-{rank}.out"
        if not output.exists():
            return ""
        text = output.read_text(encoding="utf-8", errors="replace")
        lines = [RANK_PREFIX.sub("", line) for line in text.splitlines()]
        return "\n".join(lines)

    def read_stacks(self, pid: int) -> list[Stack]:
        return read_stacks(pid, self.stacks_of(pid))

    def stacks_of(self, pid: int) -> Path:
        """Return the file into which a process writes its stacks."""
        return self.folder / f"{pid}{STACKS_SUFFIX}"


def describe_positions(statuses: Sequence[RankStatus]) -> str:
    """Return where the ranks are; empty where no rank is known."""
    return explain_hang(statuses).sentence if statuses else ""


class GrowingFiles:
    """The recordings and outputs in a folder, of which only what is new is read.

    Args:
        observed: The processes that write them; they learn which rank each is.
    """

    def __init__(self, observed: ObservedProcesses) -> None:
        self.folder = observed.folder
        self.observed = observed
        self.sizes: dict[str, int] = {}

    def read_added(self) -> bytes:
        """Return what has been added to the files since the last call."""
        added = b""
        for path in [*self.folder.glob("*.jsonl"), *self.folder.glob("*.out")]:
            known = self.sizes.get(path.name, 0)
            size = path.stat().st_size
            if size > known:
                with path.open("rb") as file:
                    file.seek(known)
                    grown = file.read(size - known)
                added += grown
                if path.suffix == ".jsonl":
                    self.observed.add_events(path, grown)
                self.sizes[path.name] = size
        return added


def is_blocked(folder: Path) -> bool:
    """Return whether the last event of any rank is one in which it may block."""
    for path in folder.glob("*.jsonl"):
        with path.open("rb") as file:
            with suppress(OSError):  # a shorter file is read from its beginning
                file.seek(-LAST_LINE_BYTES, os.SEEK_END)
            lines = file.read().splitlines()
        if lines and any(event.marker() in lines[-1] for event in BLOCKING_EVENTS):
            return True
    return False
