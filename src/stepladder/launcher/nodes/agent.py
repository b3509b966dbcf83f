"""The agent of one node, which starts the node's ranks together with those of the other nodes.

The agent polls in a loop, lets policy.py decide, and carries out the decision. This module imports
torch for torchelastic's rendezvous, so it is imported only where there are several nodes.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from stepladder.core.console import print_message
from stepladder.core.errors import BAD_INPUT, DONE, FAILED, STOPPED, is_failure
from stepladder.core.waiting import wait_until
from stepladder.launcher.local.attempt import AttemptSpec
from stepladder.launcher.local.consensus import Consensus
from stepladder.launcher.local.outcome import (
    BadInput,
    Failure,
    Killed,
    Outcome,
    Raised,
    Success,
    Unrecoverable,
    is_consequence,
)
from stepladder.launcher.local.supervisor import record_failed_end
from stepladder.launcher.nodes.generation import NodeExcluded, WaitAbandoned
from stepladder.launcher.nodes.hang_reporter import HangReporter
from stepladder.launcher.nodes.introduction import (
    announce_start,
    introduce_node,
    join_running_ranks,
)
from stepladder.launcher.nodes.liveness import LivenessConnections
from stepladder.launcher.nodes.local_node import LocalNode
from stepladder.launcher.nodes.open_rendezvous import OpenRendezvous, UnpublishedRendezvous
from stepladder.launcher.nodes.peers import Peers
from stepladder.launcher.nodes.policy import (
    Continue,
    End,
    Restart,
    Status,
    Stop,
    View,
    decide,
    peers_end_timeout,
)
from stepladder.launcher.nodes.run_dir_rendezvous import RunDirRendezvous
from stepladder.launcher.nodes.store_consensus import IN_PLACE_SILENCE_S, StoreConsensus
from stepladder.rank.exit_record import read_end
from stepladder.rank.preemption import get_seconds_left
from stepladder.rank.torch_fixes import stop_rendezvous_heartbeats

AGENT_POLL_INTERVAL_S = 0.1  # while no ranks run here; while they run, `group.poll` waits
FINISH_TIMEOUT_S = 30.0  # how long ranks here may take to finish once the launch has ended well

RendezvousOpener = Callable[[Callable[[], None]], OpenRendezvous]


@dataclass(frozen=True)
class _NodeStart:
    """One start of this node's ranks, together with those of the other nodes.

    Args:
        peers: The nodes of the start.
        hang_reporter: Explains, together with the other agents, why ranks wait.
        consensus: The agreement of the nodes on lost ranks; None without in-place recovery.
    """

    peers: Peers
    hang_reporter: HangReporter
    consensus: StoreConsensus | None


class Agent:
    """The agent of one node, for one rendezvous."""

    def __init__(
        self,
        node: LocalNode,
        rendezvous_record: RunDirRendezvous | UnpublishedRendezvous,
        open_rendezvous: RendezvousOpener,
    ) -> None:
        """Set up the agent.

        Args:
            node: This node.
            rendezvous_record: The generation, the node ids and the end of the launch, as published
                in the run directory.
            open_rendezvous: Opens the rendezvous. While it waits, it calls its argument again and
                again; an exception from that call abandons the wait.
        """
        self.node = node
        # The ranks of this node.
        self.group = node.group
        self.rendezvous_record = rendezvous_record
        # Whether the ranks can stop with a snapshot and continue from it.
        self.can_resume = node.group.restart_policy.has_steps
        # The state of the ranks of this node.
        self.status = Status.ABSENT
        self._open_rendezvous = open_rendezvous
        self._rendezvous: OpenRendezvous | None = None
        self._start: _NodeStart | None = None
        self._liveness = LivenessConnections("")
        self._stopping = False  # whether the ranks were asked to stop for nodes that want to join
        self._outcome: Outcome = Success()  # replaced when the ranks have ended
        self._failure_text = ""  # why the ranks here failed, if they caused the failure
        self._ended_at = 0.0

    @property
    def rendezvous(self) -> OpenRendezvous:
        """The rendezvous, once it is open."""
        assert self._rendezvous is not None
        return self._rendezvous

    @property
    def start(self) -> _NodeStart:
        """The last start, once the ranks have been started."""
        assert self._start is not None
        return self._start

    @property
    def _is_stop_requested(self) -> bool:
        return bool(self.group.stop_signal)

    def run(self) -> int:
        """Run the ranks until the launch has ended on all nodes.

        The caller handles what ends the agent before: the loss of the rendezvous (RendezvousError)
        or of its store (DistError), a newer rendezvous of the other agents (RendezvousMoved), nodes
        that continue without this one (NodeExcluded), and bad input to the ranks (InputError).

        Returns:
            The exit code.
        """
        try:
            self._rendezvous = self._open_rendezvous(self._abandon_wait_at_end)
            try:
                self._start_ranks()
                while True:
                    decision = decide(self._poll())
                    if isinstance(decision, End):
                        return self._end(decision)
                    self._carry_out(decision)
            finally:
                self._leave()
        except WaitAbandoned as abandoned:
            return self._end(abandoned.end)

    def _abandon_wait_at_end(self) -> None:
        """Raise WaitAbandoned if the launch ends while this agent waits for others."""
        decision = decide(self._poll())
        if isinstance(decision, End):
            raise WaitAbandoned(decision)

    def _start_ranks(self) -> None:
        """Wait until enough nodes have come, and start the ranks of this node."""
        self._prepare_start()
        spec = self.group.spec
        check = self._abandon_wait_at_end
        peers = None
        if spec.recovers_in_place:
            peers = join_running_ranks(self.node, self.rendezvous, check)
        joins_running_ranks = peers is not None
        if peers is None:
            peers = introduce_node(self.node, self.rendezvous, self.rendezvous_record.number, check)
            if spec.accepts_joining_nodes:
                announce_start(peers, self.node.info)
        consensus = None
        if spec.recovers_in_place:
            consensus = StoreConsensus(peers, self.rendezvous.min_nodes, self._liveness)
        self._start = _NodeStart(peers, HangReporter(self.group, peers.inquiry), consensus)
        info = self.node.info
        generation = self.rendezvous_record.number
        attempt = f"{generation}.{info.attempt}" if generation else str(info.attempt)
        _, failed_step = info.failed
        self.group.restart_policy.note_failed_step(failed_step)
        self.group.start(
            AttemptSpec(
                attempt,
                peers.assign_ranks(info.nproc),
                self.rendezvous.make_rank_variables(peers, info),
                joins_running_ranks,
                consensus or Consensus(),
            )
        )
        self.status = Status.RUNNING

    def _prepare_start(self) -> None:
        """Forget the last start, and open the port that shows other agents this one lives."""
        self.status = Status.ABSENT
        self._start = None
        self._stopping = False
        self._outcome = Success()
        self._failure_text = ""
        self._ended_at = 0.0
        self._liveness.close()
        self.group.release_locks()  # the first rank may be on another node now
        recovers_in_place = self.group.spec.recovers_in_place
        self._liveness = LivenessConnections(self.rendezvous.address if recovers_in_place else "")
        self.node.update_info(
            liveness_address=self._liveness.address, node_id=self.rendezvous_record.node_ids.own_id
        )

    def _poll(self) -> View:
        """Return what this agent sees now.

        The rendezvous store is read only while the node that serves it must be alive.
        """
        published_end = self.rendezvous_record.poll(self._find_lost_ids())
        if self.status is Status.RUNNING and self.group.poll():
            self._handle_outcome(self.group.attempt.end())
        is_running = self.status is Status.RUNNING
        if is_running:
            self.start.hang_reporter.poll()
        has_stopped = self.status is Status.STOPPED and self.can_resume
        nodes_waiting = False
        if (is_running or has_stopped) and not self._is_stop_requested:
            nodes_waiting = self.rendezvous.handler.num_nodes_waiting() > 0
        peers_failed = False
        if is_running and (nodes_waiting or self._stopping):
            peers_failed = self.start.peers.is_broken
        return View(
            ranks=self.status,
            can_resume=self.can_resume,
            published_end=published_end,
            stop_asked=self._is_stop_requested,
            stopping=self._stopping,
            nodes_waiting=nodes_waiting,
            at_time_limit=has_stopped and bool((read_end() or {}).get("late")),
            peers_failed=peers_failed,
            silent_node=self._find_silent_node() if is_running and self.can_resume else None,
            seconds_ended=time.monotonic() - self._ended_at,
            restarts_left=self.node.restarts_left,
        )

    def _find_lost_ids(self) -> Collection[int]:
        """Return the ids of the nodes that were lost, and that all other nodes continue without."""
        if self._start is None or self._start.consensus is None:
            return ()
        return self._start.consensus.lost_ids

    def _find_silent_node(self) -> int | None:
        """Return a node that sends no heartbeat, unless in-place recovery can do without it."""
        peers = self.start.peers
        consensus = self.start.consensus
        if consensus is None or not consensus.spare_nodes:
            return peers.find_silent_node()
        node = peers.find_silent_node(IN_PLACE_SILENCE_S)
        if node is not None:
            consensus.mark_lost(node)
        return None

    def _handle_outcome(self, outcome: Outcome) -> None:
        """Set the status of the ranks, which have ended, and tell the other nodes of a failure."""
        self._outcome = outcome
        self._ended_at = time.monotonic()
        consensus = self.start.consensus
        if consensus is not None:
            if consensus.excluded:
                self.status = Status.PEER_LOST
                raise NodeExcluded
            consensus.report_ended(well=isinstance(outcome, Success))
        if isinstance(outcome, Success):
            self.status = Status.DONE if outcome.code == DONE else Status.STOPPED
        elif self._stopping:
            self.status = Status.FAULT  # the ranks were being stopped to be restarted anyway
        elif is_consequence(outcome):
            self._show_consequence(outcome)
            self.status = Status.PEER_LOST
        else:
            self._failure_text = outcome.text
            self.start.peers.report_cause(outcome.text)
            if isinstance(outcome, BadInput):
                self.status = Status.BAD_INPUT
            else:
                self.status = self._classify_failure(outcome)

    def _show_consequence(self, failure: Failure) -> None:
        """Print why the ranks here failed, when ranks of another node caused the failure."""
        if self.can_resume:
            cause = "a rank on another node was lost"
            if isinstance(failure, Unrecoverable):
                cause = failure.text
            print_message(f"{cause}: restarting all from the last snapshot")
            return
        cause = self.start.peers.wait_for_cause()
        if cause:
            print_message(f"ended by {cause}")
        elif not self.start.hang_reporter.report_early_exit():
            self.group.restart_policy.report(failure)

    def _classify_failure(self, failure: Failure) -> Status:
        """Return whether a restart may help after a failure of this node's ranks."""
        signal_number = failure.signal_number if isinstance(failure, Killed) else 0
        if self.can_resume and self._is_stop_requested and signal_number == signal.SIGTERM:
            return Status.TERMINATED
        is_permanent = self.group.restart_policy.record_failure(failure)
        if isinstance(failure, Raised) and failure.error.step is not None:
            # All nodes must know the step: if it fails again, that may be on another node.
            attempt = self.node.info.attempt
            self.node.update_info(failed=(attempt, failure.error.step))
        return Status.BUG if is_permanent else Status.FAULT

    def _carry_out(self, decision: Continue | Stop | Restart) -> None:
        if not isinstance(decision, Continue) and decision.text:
            print_message(decision.text)
        match decision:
            case Continue():
                if self.status is not Status.RUNNING:
                    time.sleep(AGENT_POLL_INTERVAL_S)
            case Stop():
                self._stopping = True
                self.group.attempt.request_stop()
            case Restart(counted=counted):
                if counted:
                    self.node.use_restart()
                    self.start.peers.report_broken()
                if self.status is Status.RUNNING:
                    self.group.attempt.end()
                self._start_ranks()

    def _end(self, end: End) -> int:
        """Tell the other nodes how the launch ends, and return the exit code.

        Returns:
            The exit code of the end that was published first, which holds for all nodes.

        Raises:
            InputError: A rank of this node has found bad input.
        """
        if end.code == DONE:
            self._wait_for_peers()  # the launch is done only when all nodes are
        elif is_failure(end.code) and self._start is not None:
            self._start.peers.report_failed()
        text = end.text
        if is_failure(end.code) and self._failure_text:
            text = self._failure_text
        code = self.rendezvous_record.end(end.code, text)
        if code == STOPPED:
            self._wait_for_peers()
        if end.code == BAD_INPUT and isinstance(self._outcome, BadInput):
            raise self._outcome.input_error
        text = end.text if code == end.code else "ended, as on another node"
        if text:
            print_message(text)
        if code != FAILED:
            return code
        failure = self._outcome if isinstance(self._outcome, Failure) else None
        return record_failed_end(failure, 0 if self.can_resume else self.group.stop_signal)

    def _wait_for_peers(self) -> None:
        """Wait until the ranks of all nodes have ended, if those of this node have ended well."""
        if self.status not in (Status.DONE, Status.STOPPED):
            return
        time_limited = math.isfinite(get_seconds_left())
        self.start.peers.wait_for_end(
            lambda: peers_end_timeout(self.can_resume, self._is_stop_requested, time_limited),
            self.start.hang_reporter.poll,
        )

    def _leave(self) -> None:
        """End the ranks that still run, and leave the rendezvous.

        If the launch has ended well, the ranks here may finish first.
        """
        if self.status is Status.RUNNING:
            self._let_ranks_finish()
            self.group.attempt.end()
        self._liveness.close()
        handler = self.rendezvous.handler
        if self.can_resume:  # leave the rendezvous without closing it for the other nodes
            assert isinstance(handler, DynamicRendezvousHandler)
            stop_rendezvous_heartbeats(handler)
        elif not self.group.stop_signal:
            with suppress(Exception):  # the store may be gone
                handler.shutdown()

    def _let_ranks_finish(self) -> None:
        published_end = self.rendezvous_record.read_end()
        if published_end is None or published_end.code not in (DONE, STOPPED):
            return
        wait_until(self.group.poll, FINISH_TIMEOUT_S, poll_s=0)
