"""Observes the ranks of one node: whether a rank is stopped, and whether they make progress.

The monitor counts polls instead of seconds: while the launcher itself is stopped, no time passes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stepladder.launcher.diagnose.deadlock import PAUSE_S, QUIET_S, DeadlockFinder
from stepladder.launcher.diagnose.explanation import Explanation
from stepladder.launcher.diagnose.hang import explain_hang
from stepladder.launcher.diagnose.rank_status import RankStatus
from stepladder.launcher.local.observed_ranks import ObservedRanks
from stepladder.launcher.local.process_stats import IdleKind, IdleMeter, read_cpu_seconds
from stepladder.rank import progress

MONITOR_INTERVAL_S = 0.2
# A second: Ctrl-Z stops the launcher too, and both continue at about the same time.
POLLS_UNTIL_REPORTED = 5
MIN_POLLS_BETWEEN_STACKS = 5  # to print its stack takes a rank's time
DEFAULT_EXPLAIN_AFTER_S = 60.0
TIMEOUT_GRACE_S = 5.0  # ranks that wait end by themselves at the timeout, and say more
GPU_DEVICE = Path("/dev/nvidiactl")  # where it is, a rank that sleeps may wait for its GPU
WORKING_CPU_SHARE = 0.05  # a rank that writes no progress and uses less of a core does nothing


@dataclass(frozen=True)
class Limits:
    """How long ranks may make no progress.

    Args:
        timeout: Seconds for which a rank may be stopped, or all ranks may make no progress.
        explain_after: Seconds without progress after which it is explained; None: a minute, or half
            the timeout if that is less.
        end_after: Seconds without progress after which ranks that write no progress, as those of a
            script, are overdue; None: never, since they may be computing.
    """

    timeout: float = 600.0
    explain_after: float | None = None
    end_after: float | None = None

    @property
    def explain_after_s(self) -> float:
        """Seconds without progress after which it is explained."""
        if self.explain_after is not None:
            return self.explain_after
        return min(DEFAULT_EXPLAIN_AFTER_S, self.timeout / 2)


@dataclass(frozen=True)
class _Hang:
    """A hang that was found.

    Args:
        explanation: Why the ranks make no progress.
        waiting: The local ranks that wait for others, and how they are idle; empty if no rank makes
            progress.
    """

    explanation: Explanation
    waiting: Mapping[int, IdleKind]


@dataclass(frozen=True)
class _ReportedHang:
    """A hang of which the other nodes know.

    Args:
        explanation: Its explanation.
        context_switches: The number of each local rank, which does not change while it sleeps.
    """

    explanation: Explanation | None
    context_switches: Sequence[tuple[int, int]]


class Monitor:
    """Observes the ranks of one node over many polls.

    Args:
        ranks: The ranks.
        limits: How long they may make no progress.
    """

    def __init__(self, ranks: ObservedRanks, limits: Limits) -> None:
        self.polls_without_progress = 0
        self._ranks = ranks
        self._limits = limits
        self._last_progress = b""
        self._polls_since_inspection = math.inf
        self._hang: _Hang | None = None
        self._reported = _ReportedHang(None, ())
        self._deadlock_finder = DeadlockFinder()
        # A node that has only some of the ranks reports a hang when it does so for all nodes.
        self._reports_hang = ranks.has_all_ranks

    @property
    def explanation(self) -> Explanation | None:
        """Why the ranks make no progress, if that was found."""
        return self._hang.explanation if self._hang else None

    def poll(self, alive: Collection[int]) -> str | None:
        """Observe the local ranks that are alive. Call it every MONITOR_INTERVAL_S.

        Returns:
            Text for the user, if there is any.
        """
        texts = [text for local_rank in alive if (text := self._check_stopped(local_rank))]
        stalled_s = self._count_stalled_polls() * MONITOR_INTERVAL_S
        if self._have_made_progress(alive):
            self.polls_without_progress = 0
        else:
            self.polls_without_progress += 1
        for local_rank in alive:
            observed = self._ranks[local_rank]
            observed.idle_meter.poll(observed.pid)
        self._polls_since_inspection += 1
        if self._hang is not None and not self._count_stalled_polls():
            # Where a rank has ended, the others may have been woken by a lost connection.
            if self._reports_hang and len(alive) == len(self._ranks):
                texts.append(f"the ranks continue, after {stalled_s:.0f} s")
            self._hang = None
            self._reports_hang = self._ranks.has_all_ranks
        elif self._hang is None and alive:
            self._hang = self._find_deadlock(alive) or self._find_hang(alive)
            if self._hang is not None and self._reports_hang:
                texts.append(self._format_hang(self._hang.explanation))
        return "\n".join(texts) or None

    def _check_stopped(self, local_rank: int) -> str | None:
        """Return text for the user when a rank has been stopped for a second."""
        observed = self._ranks[local_rank]
        if observed.poll_stopped() != POLLS_UNTIL_REPORTED:
            return None
        pid = observed.pid
        return (
            f"rank {observed.rank} (pid {pid}) is stopped (SIGSTOP): `kill -CONT {pid}` within"
            f" {self._limits.timeout:g} s (--timeout), or all ranks are restarted"
        )

    def _find_deadlock(self, alive: Collection[int]) -> _Hang | None:
        """Return the hang if no rank can go on, which is certain long before the usual time."""
        if self._limits.explain_after is not None or not self._ranks.has_all_ranks:
            return None
        quiet_polls = [self._ranks[number].idle_meter.count(IdleKind.QUIET) for number in alive]
        is_quiet = min(quiet_polls) >= math.ceil(QUIET_S / MONITOR_INTERVAL_S)
        pause_polls = math.ceil(PAUSE_S / MONITOR_INTERVAL_S)
        if not is_quiet or self._polls_since_inspection < pause_polls or GPU_DEVICE.exists():
            return None
        self._polls_since_inspection = 0
        explanation = self._deadlock_finder.examine(self._ranks.inspect(alive))
        return _Hang(explanation, dict.fromkeys(alive, IdleKind.QUIET)) if explanation else None

    def _find_hang(self, alive: Collection[int]) -> _Hang | None:
        """Return the hang if no rank makes progress, or if ranks have waited in one collective."""
        enough_polls = math.ceil(self._limits.explain_after_s / MONITOR_INTERVAL_S)
        is_still = self.polls_without_progress >= enough_polls
        if not is_still and not self._may_inspect(alive, enough_polls):
            return None
        self._polls_since_inspection = 0
        statuses = self._ranks.inspect(alive)
        waiting = {}
        for local_rank in alive:
            meter = self._ranks[local_rank].idle_meter
            kind = _find_wait(statuses[local_rank], meter, enough_polls)
            if kind is not None:
                waiting[local_rank] = kind
        if not is_still and not waiting:
            return None
        return _Hang(explain_hang(statuses, self._ranks.has_all_ranks), waiting)

    def _may_inspect(self, alive: Collection[int], enough_polls: int) -> bool:
        """Return whether ranks have been idle for long enough to be asked for their stacks."""
        counts = [self._ranks[local_rank].idle_meter.max_count for local_rank in alive]
        if max(counts) < enough_polls:
            return False
        has_new_idle_rank = enough_polls in counts
        pause = MIN_POLLS_BETWEEN_STACKS if has_new_idle_rank else enough_polls
        return self._polls_since_inspection >= pause

    def _format_hang(self, explanation: Explanation) -> str:
        stalled_polls = self._count_stalled_polls()
        is_partial = self.polls_without_progress < stalled_polls or not self._ranks.has_all_ranks
        lead = "other ranks have waited" if is_partial else "nothing has moved"
        return explanation.format_report(lead, stalled_polls * MONITOR_INTERVAL_S)

    def has_unreported_hang(self) -> bool:
        """Return whether there is a hang of which the other nodes do not know.

        They know of a hang while the same ranks sleep on.
        """
        if self._hang is None or self._hang.explanation == self._reported.explanation:
            return False
        waiting = self._hang.waiting
        reported_switches = self._reported.context_switches
        if not waiting or not reported_switches:
            return True
        return any(
            self._ranks[local_rank].idle_meter.context_switches != reported_switches[local_rank]
            for local_rank in waiting
        )

    def mark_hang_reported(self) -> None:
        """Remember that the other nodes know what the ranks do now."""
        switches = [observed.idle_meter.context_switches for observed in self._ranks]
        self._reported = _ReportedHang(self.explanation, switches)

    def report_for_all_nodes(self, explanation: Explanation) -> str:
        """Return the text for the user about a hang of ranks on several nodes."""
        self._reports_hang = True
        return self._format_hang(explanation)

    def _count_stalled_polls(self) -> int:
        """Return for how many polls ranks have waited in vain, or no rank has made progress."""
        if self._hang is None or not self._hang.waiting:
            return self.polls_without_progress
        return max(
            self._ranks[local_rank].idle_meter.count(kind)
            for local_rank, kind in self._hang.waiting.items()
        )

    def _is_stalled_for(self, seconds: float) -> bool:
        return self._count_stalled_polls() * MONITOR_INTERVAL_S >= seconds

    def _have_made_progress(self, alive: Collection[int]) -> bool:
        """Return whether a rank has written progress, or has computed if it writes none."""
        current = self._ranks.progress_file.read_bytes()
        has_progress = current != self._last_progress
        self._last_progress = current
        phases = self._read_phases()
        silent = [local_rank for local_rank in alive if phases[local_rank] == progress.UNKNOWN]
        cpu_s = {local_rank: read_cpu_seconds(self._ranks[local_rank].pid) for local_rank in silent}
        idle_s = (self.polls_without_progress + 1) * MONITOR_INTERVAL_S
        min_cpu_s = max(WORKING_CPU_SHARE * idle_s, MONITOR_INTERVAL_S)
        for local_rank, current_s in cpu_s.items():
            observed = self._ranks[local_rank]
            if observed.cpu_s is None:
                observed.record_cpu_seconds(current_s)
            else:
                has_progress |= current_s - observed.cpu_s > min_cpu_s
        if has_progress:
            for local_rank, current_s in cpu_s.items():
                self._ranks[local_rank].record_cpu_seconds(current_s)
        return has_progress

    def _read_phases(self) -> memoryview:
        """Return the phase of each local rank at the last poll."""
        return memoryview(self._last_progress).cast("q")[progress.PHASE :: progress.NUM_SLOTS]

    @property
    def has_begun(self) -> bool:
        """Whether a rank of this node is past its start, so that the run directory is open."""
        return any(phase > progress.STARTING for phase in self._read_phases())

    @property
    def end_message(self) -> str:
        """Why --end-after ends the ranks of a script now, or ""."""
        limit_s = self._limits.end_after
        if limit_s is None or self._hang is None or not self._is_stalled_for(limit_s):
            return ""
        stalled_s = self._count_stalled_polls() * MONITOR_INTERVAL_S
        return f"ended after {stalled_s:.0f} s without progress (--end-after {limit_s:g})"

    @property
    def overdue(self) -> bool:
        """Whether a rank was stopped, or no rank has made progress, for too long."""
        polls_stopped = max((observed.polls_stopped for observed in self._ranks), default=0)
        if polls_stopped * MONITOR_INTERVAL_S >= self._limits.timeout:
            return True
        if self.end_message:
            return True
        # Downloads and compilations have no limit. Where other ranks wait for them, those have one.
        is_starting = all(phase <= progress.STARTING for phase in self._read_phases())
        return not is_starting and self._is_stalled_for(self._limits.timeout + TIMEOUT_GRACE_S)


def _find_wait(status: RankStatus, meter: IdleMeter, enough_polls: int) -> IdleKind | None:
    """Return how a rank is idle if it has waited for others for so many polls."""
    if status.is_waiting and meter.count(IdleKind.ASLEEP) >= enough_polls:
        return IdleKind.ASLEEP
    if status.is_connecting and meter.count(IdleKind.IDLE) >= enough_polls:
        return IdleKind.IDLE
    return None
