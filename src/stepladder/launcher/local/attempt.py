"""One attempt of a group to run: the ranks of one node from their start to their end."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from stepladder.core.console import print_message
from stepladder.core.errors import DONE, is_failure
from stepladder.core.waiting import wait_until
from stepladder.launcher.diagnose.explanation import Explanation
from stepladder.launcher.diagnose.hang import explain_hang, find_rank_to_blame
from stepladder.launcher.diagnose.mismatch import find_mismatch
from stepladder.launcher.diagnose.rank_status import RankStatus
from stepladder.launcher.local.consensus import Consensus
from stepladder.launcher.local.group_spec import GroupSpec
from stepladder.launcher.local.in_place_recovery import GroupActions, InPlaceRecovery, RecoveryState
from stepladder.launcher.local.monitor import MONITOR_INTERVAL_S, Limits, Monitor
from stepladder.launcher.local.observed_ranks import ObservedRanks
from stepladder.launcher.local.outcome import Outcome
from stepladder.launcher.local.outcome_rules import Evidence, determine_outcome
from stepladder.launcher.local.rank_process import RankProcess
from stepladder.launcher.local.rank_starter import RankStarter
from stepladder.launcher.local.restart_policy import RestartPolicy
from stepladder.rank.error_record import ErrorKind, RankError
from stepladder.rank.exchange_choice import EXCHANGE_VARIABLE, GLOO_EXCHANGE, MEMORY_EXCHANGE
from stepladder.rank.membership import JOIN_VARIABLE
from stepladder.rank.open_file import MemoryFile

CONSENSUS_INTERVAL_S = 0.02  # while the votes of other nodes are missing
SIGNAL_DELAY_S = 0.5  # between a signal to a rank, and the same to this process
FIRST_FAILURE_GRACE_S = 0.5  # the rank that is the cause may end a moment after the others
SHARED_FAILURE_GRACE_S = 10.0  # when all ranks fail: rank 0 may have a snapshot to finish
SCRIPT_TERM_GRACE_S = 5.0  # from SIGTERM to SIGKILL, for a script when one of its ranks has failed
KEY_PRESS_S = 0.5  # signals that follow each other faster come from one key press


class StopRequest:
    """The signal that asked a group to stop, if there was one."""

    def __init__(self) -> None:
        # The signal; 0 if there was none.
        self.signal_number = 0
        self._received_at = 0.0

    def record(self, signal_number: int) -> bool:
        """Record a signal, and return whether it is a second Ctrl-C."""
        now = time.monotonic()
        is_interrupt = signal_number == signal.SIGINT
        is_repeated = self.signal_number == signal_number
        is_second_interrupt = is_interrupt and is_repeated and now - self._received_at > KEY_PRESS_S
        self.signal_number = signal_number
        self._received_at = now
        return is_second_interrupt


@dataclass(frozen=True)
class GroupContext:
    """What all attempts of a group have in common.

    Args:
        spec: What the ranks run, and how they are asked to stop.
        limits: How long the ranks may make no progress.
        starter: Starts the processes of the ranks.
        policy: Reports failures, and tells which are permanent.
        stop_request: The signal that asked the group to stop, once there is one.
        release_locks: Releases the locks of the run directory.
        dump_prefix: How the paths of the files of NCCL's flight recorder begin.
    """

    spec: GroupSpec
    limits: Limits
    starter: RankStarter
    policy: RestartPolicy
    stop_request: StopRequest
    release_locks: Callable[[], None]
    dump_prefix: Path


@dataclass(frozen=True)
class AttemptSpec:
    """What is special about one attempt.

    Args:
        name: The number of the attempt, which is part of the names of log files.
        ranks: The numbers of this node's ranks.
        variables: The environment variables that are the same for all ranks.
        joins: Whether the ranks join ranks of other nodes, which train already.
        consensus: The agreement with the other nodes.
        min_ranks: A rank that fails repeatedly is not replaced if at least this number of ranks
            remains; None if it is always replaced.
    """

    name: str = ""
    ranks: Sequence[int] = ()
    variables: dict[str, str] = field(default_factory=dict)
    joins: bool = False
    consensus: Consensus = field(default_factory=Consensus)
    min_ranks: int | None = None

    @property
    def world_size(self) -> int:
        """The number of ranks on all nodes."""
        return int(self.variables.get("WORLD_SIZE", 0))


class GroupAttempt:
    """The ranks of one node from their start to their end.

    Args:
        spec: What is special about this attempt.
        context: What all attempts of the group have in common.
    """

    def __init__(self, spec: AttemptSpec, context: GroupContext) -> None:
        # The ranks whose end was not handled yet, by the sentinel of their process, which becomes
        # ready when the process ends.
        self.running: dict[Any, RankProcess] = {}
        self._spec = spec
        self._context = context
        self._is_script = context.spec.is_script
        self._output = context.spec.output
        self._stop_request = context.stop_request
        self._members: list[RankProcess] = []  # by local rank, with replacements
        self._observed = ObservedRanks(spec.ranks, context.dump_prefix, spec.world_size)
        # Observes the ranks.
        self.monitor = Monitor(self._observed, context.limits)
        self._errors = MemoryFile("errors")
        self._deadline = math.inf
        self._stop_requested = False
        actions = GroupActions(
            self._start_replacement, self._request_regroup, context.release_locks
        )
        self._recovery = InPlaceRecovery(context.policy, actions, spec.consensus, spec.min_ranks)

    def start(self) -> None:
        """Start all ranks."""
        joins = self._spec.joins
        for local_rank, rank in enumerate(self._spec.ranks):
            member = self._start_rank(rank, local_rank, joins)
            self._members.append(member)
            self._observed.set_process(local_rank, member.pid)
            if joins:
                self._recovery.add_joining(member)

    def _start_rank(self, rank: int, local_rank: int, joins: bool) -> RankProcess:
        starter = self._context.starter
        variables = {
            "LOCAL_RANK": str(local_rank),
            **self._spec.variables,
            "LOCAL_WORLD_SIZE": str(len(self._spec.ranks)),
        }
        if joins:  # the rank starts as a group of its own, and then joins the other ranks
            variables |= {"RANK": "0", "WORLD_SIZE": "1", JOIN_VARIABLE: str(rank)}
        else:
            variables["RANK"] = str(rank)
        env = self._context.spec.make_environment(variables)
        env |= self._observed.make_variables(rank, local_rank)
        if not self._is_script or EXCHANGE_VARIABLE not in os.environ:  # else `run` has set it
            env[EXCHANGE_VARIABLE] = self._exchange
        log_name = f"attempt-{self._spec.name}.rank-{rank}"
        with self._recovery.open_channel(rank) as channel:
            member = starter.start(rank, local_rank, log_name, env, self._errors.path, channel)
        # Before anything else, so that a signal that comes now is forwarded to this rank too.
        self.running[member.process.sentinel] = member
        if self._is_script:
            starter.guard_session(member)
        return member

    @property
    def _exchange(self) -> str:
        """How ranks of a job exchange tensors: this node must have all of them to share memory."""
        spec = self._spec
        is_only_node = spec.world_size == len(spec.ranks) and not spec.joins
        return MEMORY_EXCHANGE if is_only_node else GLOO_EXCHANGE

    def _start_replacement(self, member: RankProcess, rank: int) -> RankProcess:
        """Start a process in place of a lost rank. The other ranks send it their state."""
        local_rank = member.local_rank
        replacement = self._start_rank(rank, local_rank, joins=True)
        self._members[local_rank] = replacement
        self._observed.replace_rank(local_rank, rank, replacement.pid)
        return replacement

    def _request_regroup(self, rank: int) -> None:
        for member in self._members:
            if member.rank == rank:
                self._observed.request_regroup(member.local_rank)

    def poll(self) -> bool:
        """Wait a moment for events, and handle them.

        Returns:
            Whether the attempt is over: all ranks have ended, or their time is up.
        """
        for member in self._wait_for_ends():
            self._record_end(member)
        can_continue = self._recovery.poll(self._list_running_ranks())
        if not can_continue:
            self.end_within(0)
        # The monitor counts its polls as intervals, and those of a vote are shorter.
        if not self._is_voting:
            text = self.monitor.poll(self._list_alive_local_ranks())
            if text:
                print_message(text)
        if self.monitor.has_begun:
            self._output.begin()
        has_ended = not self.running and not self._recovery.failed
        return has_ended or self._remaining_s() <= 0 or self.monitor.overdue

    def _wait_for_ends(self) -> list[RankProcess]:
        """Wait until a rank ends or sends a message, for one interval at most.

        What ranks print is shown meanwhile. It does not end the wait, because the monitor counts
        polls and takes each for an interval.

        Returns:
            The ranks that have ended, which are no longer in `running`; empty if none has.
        """
        interval_s = CONSENSUS_INTERVAL_S if self._is_voting else MONITOR_INTERVAL_S
        wait_end = time.monotonic() + max(0.0, min(interval_s, self._remaining_s()))
        ready: list[Any] = []
        while not self._has_rank_event(ready) and (wait_s := wait_end - time.monotonic()) >= 0:
            ready = wait([*self.running, *self._output.streams, *self._recovery.channels], wait_s)
            self._output.read(ready)
            self._recovery.receive(ready)
            if not ready:
                break
        ended = [self.running.pop(sentinel) for sentinel in ready if sentinel in self.running]
        for member in ended:
            member.process.join()
        return ended

    @property
    def _is_voting(self) -> bool:
        return self._recovery.state is RecoveryState.VOTING

    def _has_rank_event(self, ready: Iterable[Any]) -> bool:
        """Return whether a rank has ended or sent a message.

        A channel that its rank has closed does not count: `receive` has removed it by then.
        """
        channels = self._recovery.channels
        return any(item in self.running or item in channels for item in ready)

    def _record_end(self, member: RankProcess) -> None:
        exit_code = member.process.exitcode
        self._observed[member.local_rank].record_exit(exit_code)
        if is_failure(exit_code) and not self._can_continue_without(member):
            grace_s = FIRST_FAILURE_GRACE_S
            if member.ends_all_ranks():
                grace_s = SHARED_FAILURE_GRACE_S
            self.end_within(grace_s)

    def _can_continue_without(self, member: RankProcess) -> bool:
        is_ending = self._stop_request.signal_number or self._deadline < math.inf
        if not self._context.spec.recovers_in_place or is_ending:
            return False
        # Ranks that call different collectives would do so again: the job's code is wrong.
        if self._find_mismatch() is not None:
            return False
        return self._recovery.can_continue_without(member, self._list_running_ranks())

    def _list_running_ranks(self) -> set[int]:
        """Return the ranks whose end was not handled yet, by the numbers they were started with."""
        return {member.rank for member in self.running.values()}

    def _list_alive_local_ranks(self) -> list[int]:
        """Return the local ranks whose processes are alive."""
        return [member.local_rank for member in self._members if member.process.is_alive()]

    def end_within(self, seconds: float) -> None:
        """Set the time left to the ranks that still run, unless they have less already."""
        self._deadline = min(self._deadline, time.monotonic() + seconds)

    def _remaining_s(self) -> float:
        return self._deadline - time.monotonic()

    def request_stop(self) -> None:
        """Ask the ranks to stop together at the end of a step, and limit the time they take."""
        if self._stop_requested:
            return
        self._stop_requested = True
        self.end_within(self._context.spec.stop_timeout())
        if self._is_script:
            self.forward_signal(self._stop_request.signal_number)
        else:
            self.forward_signal(signal.SIGTERM)

    def forward_signal(self, signal_number: int) -> None:
        """Send a signal to the ranks that still run."""
        for member in self.running.values():
            member.send_signal(signal_number)

    def end(self) -> Outcome:
        """End the ranks that still run, and return how the attempt ended."""
        members = self._list_counted_members()
        exit_codes = {member.rank: member.process.exitcode for member in members}
        has_failed = any(is_failure(code) for code in exit_codes.values() if code is not None)
        explanation = None
        if has_failed or self.monitor.overdue:
            explanation = self._explain_end()  # before `kill`: ranks that run show their stacks
        if self.monitor.end_message:
            print_message(self.monitor.end_message)
        self.kill()
        was_explained_first = self.monitor.explanation is not None or self._observed.has_dumps
        evidence = Evidence(
            exit_codes,
            self._read_errors(),
            explanation,
            was_explained_first=was_explained_first,
            mismatch=self._find_mismatch() if has_failed else None,
            is_out_of_memory=any(member.has_seen_oom_kill for member in members),
            stop_signal=self._get_script_stop_signal(),
        )
        return determine_outcome(evidence)

    def _get_script_stop_signal(self) -> int:
        """Return the signal that asked a script to stop; 0 if there was none.

        A batch system sends it to the ranks and to this process: a rank may have died of it before.
        """
        if not self._is_script:
            return 0
        codes = {member.process.exitcode for member in self._members}
        if codes & {-number for number in self._context.spec.stop_signals}:
            wait_until(lambda: self._stop_request.signal_number, SIGNAL_DELAY_S)
        return self._stop_request.signal_number

    def _list_counted_members(self) -> list[RankProcess]:
        """Return the ranks that count for the outcome: all but those that were abandoned."""
        abandoned = self._recovery.abandoned
        return [member for member in self._members if member.rank not in abandoned]

    def _read_errors(self) -> list[RankError]:
        errors = [member.read_error() for member in self._list_counted_members()]
        return [error for error in errors if error is not None]

    def _explain_end(self) -> Explanation | None:
        """Return why the ranks made no progress, if that may have caused the end."""
        errors = self._read_errors()
        exit_codes = [member.process.exitcode for member in self._members]
        has_lost_peer = any(error.is_consequence for error in errors)
        has_finished_early = DONE in exit_codes and has_lost_peer
        was_aborted = -signal.SIGABRT in exit_codes
        if has_finished_early or was_aborted:
            return self._explain(self.inspect_ranks())
        is_peer_silent = any(error.kind is ErrorKind.PEER_SILENT for error in errors)
        if self.monitor.overdue or self._observed.has_dumps or is_peer_silent:
            return self.monitor.explanation or self._explain_present_state()
        return None

    def _explain_present_state(self) -> Explanation | None:
        """Return why the ranks make no progress, from what they do now.

        If all have ended, only a rank that stands out is worth an explanation: otherwise their
        errors say more, and the result is None.
        """
        alive = self._list_alive_local_ranks()
        statuses = self._observed.inspect(alive)
        if alive:
            return self._explain(statuses)
        return find_rank_to_blame(statuses)

    def _explain(self, statuses: Sequence[RankStatus]) -> Explanation:
        return explain_hang(statuses, self._observed.has_all_ranks)

    def _find_mismatch(self) -> Explanation | None:
        return find_mismatch(self._observed.list_ended())

    def inspect_ranks(self) -> list[RankStatus]:
        """Return the status of each rank, with its stack, or the one that it ended with."""
        traces = {error.rank: error.trace for error in self._read_errors()}
        return self._observed.inspect(self._list_alive_local_ranks(), traces)

    def kill(self) -> None:
        """End all ranks that still run."""
        if self._is_script:
            self._end_sessions()
        for member in self._members:
            if member.process.is_alive():
                member.process.kill()
        for member in self._members:
            member.process.join()
        self.running.clear()
        self._recovery.close()
        self._output.end_attempt()

    def _end_sessions(self) -> None:
        """Ask the ranks of a script to end; after a stop or a failure, kill their sessions too."""
        if not self._stop_requested and self.running:
            self.forward_signal(signal.SIGTERM)
            self._deadline = time.monotonic() + SCRIPT_TERM_GRACE_S
        while self.running and self._remaining_s() > 0:
            self._wait_for_ends()
        has_failed = any(member.process.exitcode for member in self._members)
        if self._stop_requested or has_failed:
            for member in self._members:  # what a rank started may outlive the rank
                member.kill_session()
