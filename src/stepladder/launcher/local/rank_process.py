"""The process of one rank, as its launcher sees it."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepladder.launcher.local.outcome import BadInput, Failure, Success
from stepladder.launcher.local.outcome_rules import Evidence, determine_outcome
from stepladder.launcher.local.process_stats import count_oom_kills
from stepladder.rank.error_record import ErrorKind, RankError

KINDS_THAT_END_ALL = (ErrorKind.BAD_INPUT, ErrorKind.PEER_LOST, ErrorKind.STATE_LOST)


@dataclass(frozen=True)
class RankProcess:
    """The process of one rank.

    Args:
        rank: The number that the rank was started with.
        local_rank: Its position among the ranks of its node.
        process: A process of multiprocessing, which has no common public type.
        errors: The file in which ranks record their errors.
        oom_kills: How often the kernel had killed a process for lack of memory when this one was
            started.
    """

    rank: int
    local_rank: int
    process: Any
    errors: Path
    oom_kills: int

    @property
    def pid(self) -> int:
        """The process id; 0 before the process is started."""
        return self.process.pid or 0

    @property
    def has_seen_oom_kill(self) -> bool:
        """Whether the kernel has killed a process for lack of memory since this one was started."""
        return count_oom_kills() > self.oom_kills

    def read_error(self) -> RankError | None:
        """Return the error that the rank has recorded, or None."""
        return RankError.read(self.errors, self.rank)

    def ends_all_ranks(self) -> bool:
        """Return whether the other ranks fail as well, or notice the failure, and then end.

        All ranks find the same bad input. A lost peer is the end of another rank, whose cause may
        not be recorded yet. Compiled code that aborts a rank breaks its connections, which another
        rank may then report.
        """
        error = self.read_error()
        if error is None:
            return bool(self.process.exitcode == -signal.SIGABRT)
        return error.kind in KINDS_THAT_END_ALL

    def determine_failure(self) -> Failure:
        """Return how this rank has failed."""
        error = self.read_error()
        evidence = Evidence(
            {self.rank: self.process.exitcode},
            [error] if error else [],
            is_out_of_memory=self.has_seen_oom_kill,
        )
        outcome = determine_outcome(evidence)
        assert not isinstance(outcome, Success | BadInput)
        return outcome

    def send_signal(self, signal_number: int) -> None:
        """Send a signal to the process, if it has not ended."""
        with suppress(ProcessLookupError, PermissionError):
            os.kill(self.process.pid, signal_number)

    def kill_session(self) -> None:
        """Kill all processes of the session that the process leads or has led."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
