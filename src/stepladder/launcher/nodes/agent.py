"""One node of several: meets the others over torchelastic's rendezvous, starts its ranks with
theirs, and again.

The loop looks, lets the policy decide, and obeys. Imports torch, for the rendezvous is part of it;
so it is itself imported only where there are several nodes."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from torch.distributed import DistError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from stepladder.core.address import find_free_port
from stepladder.core.console import print_message
from stepladder.core.errors import BAD_INPUT, DONE, FAILED, STOPPED, is_failure
from stepladder.launcher.diagnose.inquiry import explain_answers
from stepladder.launcher.diagnose.rank_status import RankStatus
from stepladder.launcher.local.outcome import (
    BadInput,
    Failure,
    Killed,
    Outcome,
    Raised,
    Success,
    Unrecoverable,
)
from stepladder.launcher.local.supervisor import record_failed_end
from stepladder.launcher.nodes import council
from stepladder.launcher.nodes.council import NodeCouncil
from stepladder.launcher.nodes.generation import Excluded
from stepladder.launcher.nodes.lifelines import Lifelines
from stepladder.launcher.nodes.meeting import Meeting, Unpublished
from stepladder.launcher.nodes.newcomer import announce, join
from stepladder.launcher.nodes.own_node import OwnNode, interruptible
from stepladder.launcher.nodes.peers import Peers
from stepladder.launcher.nodes.policy import (
    End,
    Keep,
    Restart,
    Status,
    Stop,
    View,
    decide,
    patience,
)
from stepladder.launcher.nodes.rendezvous import Rendezvous
from stepladder.rank.exit_record import read_end
from stepladder.rank.preemption import get_seconds_left
from stepladder.rank.torch_fixes import stop_rendezvous_heartbeats

SECONDS_BETWEEN_LOOKS = 0.1  # where no ranks run; else their group waits for them
SECONDS_TO_SAY = 15.0  # for what all nodes know of ranks that have gone
SECONDS_TO_FINISH = 30.0  # for ranks here, when the launch has ended well


class Left(Exception):
    """A wait for other nodes has been given up: the launch ends, as its `End` says."""


class Agent:
    """One node's ranks over one rendezvous.

    open_handler: opens it, which may take long: it calls what it is given meanwhile, which may
    raise."""

    meeting: Meeting
    peers: Peers  # of the last start

    def __init__(
        self,
        node: OwnNode,
        published: Rendezvous | Unpublished,
        open_handler: Callable[[Callable[[], None]], Meeting],
    ) -> None:
        self.node, self.group, self.published = node, node.group, published
        self.open_handler, self.resumes = open_handler, node.group.restart_policy.has_steps
        self.lifelines = Lifelines("")
        self._reset()

    def _reset(self) -> None:
        self.ranks, self.stopping = Status.ABSENT, False
        self.outcome: Outcome = Success()  # until the ranks have ended
        self.failure, self.ended = "", 0.0
        self.lifelines.close()
        self.council: NodeCouncil | None = None  # where ranks go on in place

    def run(self) -> int:
        """The launch's exit code, when it has ended on all nodes.

        Raises RendezvousError or DistError where the rendezvous is lost, Moved where others have
        gone on to another one, Excluded, InputError for what the ranks found wrong."""
        try:
            self.meeting = self.open_handler(self._refuse_end)
            try:
                self._start()
                while not isinstance(decision := decide(self._look()), End):
                    self._obey(decision)
                return self._end(decision)
            finally:
                self._leave()
        except Left as left:
            return self._end(left.args[0])

    def _refuse_end(self) -> None:
        """Raises Left where it makes no sense to wait any longer."""
        if isinstance(decision := decide(self._look()), End):
            raise Left(decision)

    def _start(self) -> None:
        """The ranks of this node, when enough nodes have come."""
        self._reset()
        self.group.release_locks()  # the first rank may be on another node now
        node, goes_on, number = self.node, self.group.spec.recovers_in_place, self.published.number
        self.lifelines = Lifelines(self.meeting.address if goes_on else "")
        node.known = replace(
            node.known, lifeline=self.lifelines.address, seat=self.published.seats.number
        )
        joins = goes_on and self._join()
        if not joins:
            self._meet()
        attempt = f"{number}.{node.known.attempt}" if number else str(node.known.attempt)
        if goes_on:
            self.council = NodeCouncil(self.peers, self.meeting.least, self.lifelines)
        self.group.restart_policy.note_failed_step(node.known.failed[1])
        ranks = self.peers.ranks_of(node.known.nproc)
        variables = self.meeting.variables_of_ranks(self.peers, node.known)
        self.group.start(ranks, attempt, variables, joins, self.council)
        self.ranks = Status.RUNNING

    def _join(self) -> bool:
        """Whether ranks of others train, which those of this node can join."""
        store, known = self.meeting.store, self.node.known
        found = interruptible(
            lambda: store and join(store, self.meeting.secret, known), self._refuse_end
        )
        if found:
            self.peers, self.node.known = found
            self.node.known = replace(
                self.node.known, master=(self.meeting.address, find_free_port())
            )
            print_message(
                f"joining the ranks of {len(self.peers.living) - 1} other nodes, which train already"
            )
        return bool(found)

    def _meet(self) -> None:
        """The nodes of a new start."""
        node, number, meeting = self.node, self.published.number, self.meeting
        info = interruptible(meeting.handler.next_rendezvous, self._refuse_end)
        self.peers = peers = Peers(
            info.store, info.rank, info.world_size, meeting.secret, common=meeting.store
        )
        node.known = replace(node.known, master=meeting.own_master(info))
        node.known = interruptible(lambda: peers.introduce(node.known), self._refuse_end)
        if self.group.spec.accepts_joining_nodes:
            announce(peers, node.known)
        if info.rank == 0:
            generation = f"generation {number}: " if number else ""
            print_message(f"{generation}nodes {info.world_size}, ranks {peers.world_size}")

    def _look(self) -> View:
        """What there is to see. The store is asked only while its node must be there."""
        published = self.published.look(self.council.given_up if self.council else ())
        if self.ranks is Status.RUNNING and self.group.poll():
            self._note(self.group.end())
        if self.ranks is Status.RUNNING:
            self._inquire()
        stop_asked, running = bool(self.group.stop_signal), self.ranks is Status.RUNNING
        stopped = self.ranks is Status.STOPPED and self.resumes
        waiting = (
            (running or stopped) and not stop_asked and self.meeting.handler.num_nodes_waiting() > 0
        )
        return View(
            ranks=self.ranks,
            resumes=self.resumes,
            published=published,
            stop_asked=stop_asked,
            stopping=self.stopping,
            waiting=waiting,
            late=stopped and bool((read_end() or {}).get("late")),
            broken=running and (waiting or self.stopping) and self.peers.is_broken,
            silent=self._silent() if running and self.resumes else None,
            seconds_ended=time.monotonic() - self.ended,
            restarts_left=self.node.restarts_left,
        )

    def _silent(self) -> int | None:
        """A node that is lost, and without which the others cannot go on in place."""
        if self.council is None or not self.council.spares:
            return self.peers.silent()
        if (node := self.peers.silent(council.SECONDS_OF_SILENCE)) is not None:
            self.council.lose(node)
        return None

    def _inquire(self) -> None:
        """Why ranks wait, here or elsewhere, is said by one node for all."""
        monitor = self.group.monitor
        with suppress(DistError):  # the store's node has left
            answers = self.peers.inquiry.poll(monitor.has_unreported_hang(), self._own_ranks)
            if answers:
                print_message(monitor.report_for_all_nodes(explain_answers(answers)))

    def _own_ranks(self) -> list[RankStatus]:
        """For the other nodes. What is told once is not asked again, as long as the same ranks
        sleep.
        """
        statuses = self.group.inspect_ranks()
        self.group.monitor.mark_hang_reported()
        return statuses

    def _says_who_left(self) -> bool:
        """Whether a rank of another node ended well while ranks here needed it: said here, or by a
        third node.
        """
        inquiry, until, asks = self.peers.inquiry, time.monotonic() + SECONDS_TO_SAY, True
        with suppress(DistError):
            while time.monotonic() < until:
                answers = inquiry.poll(asks, self._own_ranks)
                asks = asks and not inquiry.answered
                if answers and (found := explain_answers(answers)).left_early:
                    print_message(found.with_cause)
                if answers or 0 < inquiry.answered < inquiry.current:
                    return not answers or found.left_early
                time.sleep(SECONDS_BETWEEN_LOOKS)
        return False

    def _note(self, outcome: Outcome) -> None:
        """The ranks here have ended. A failure of theirs is shown, and told to the other nodes."""
        self.outcome, self.ended = outcome, time.monotonic()
        if self.council is not None:
            if self.council.excluded:
                self.ranks = Status.PEER_LOST
                raise Excluded
            self.council.leave(well=isinstance(outcome, Success))
        if isinstance(outcome, Success):
            self.ranks = Status.DONE if outcome.code == DONE else Status.STOPPED
        elif self.stopping:
            self.ranks = Status.FAULT  # of ranks that were to start anew in any case
        elif isinstance(outcome, Unrecoverable) or (
            isinstance(outcome, Raised) and outcome.error.is_consequence
        ):
            self._show_consequence(outcome)
            self.ranks = Status.PEER_LOST
        else:
            self.failure = outcome.text
            self.peers.tell_cause(self.failure)
            self.ranks = Status.BAD_INPUT if isinstance(outcome, BadInput) else self._judge(outcome)

    def _show_consequence(self, failure: Failure) -> None:
        if self.resumes:
            lost = (
                failure.text
                if isinstance(failure, Unrecoverable)
                else "a rank on another node was lost"
            )
            print_message(f"{lost}: restarting all from the last snapshot")
        elif cause := self.peers.cause():
            print_message(f"ended by {cause}")
        elif not self._says_who_left():
            self.group.restart_policy.report(failure)

    def _judge(self, failure: Failure) -> Status:
        """What a failure of this node's own ranks is. A rank that failed before may have been on
        another one.
        """
        ended_by = failure.signal_number if isinstance(failure, Killed) else 0
        if self.resumes and self.group.stop_signal and ended_by == signal.SIGTERM:
            return Status.TERMINATED
        node, judge = self.node, self.group.restart_policy
        bug = judge.record_failure(failure)
        if isinstance(failure, Raised) and failure.error.step is not None:
            node.known = replace(node.known, failed=(node.known.attempt, failure.error.step))
        return Status.BUG if bug else Status.FAULT

    def _obey(self, decision: Keep | Stop | Restart) -> None:
        if not isinstance(decision, Keep) and decision.text:
            print_message(decision.text)
        match decision:
            case Keep():
                if self.ranks is not Status.RUNNING:
                    time.sleep(SECONDS_BETWEEN_LOOKS)
            case Stop():
                self.stopping = True
                self.group.request_stop()
            case Restart(counted=counted):
                if counted:
                    self.node.restarts_left -= 1
                    self.peers.tell_broken()
                if self.ranks is Status.RUNNING:
                    self.group.end()
                self._start()

    def _end(self, end: End) -> int:
        """Tell the other nodes. The first word about how the launch has ended counts, here too."""
        if end.code == DONE:
            self._await_others()  # only then it is true
        elif is_failure(end.code) and self.ranks is not Status.ABSENT:
            self.peers.tell_failed()
        code = self.published.end(end.code, (is_failure(end.code) and self.failure) or end.text)
        if code == STOPPED:
            self._await_others()
        if end.code == BAD_INPUT and isinstance(self.outcome, BadInput):
            raise self.outcome.input_error
        text = end.text if code == end.code else "ended, as on another node"
        if text:
            print_message(text)
        if code != FAILED:
            return code
        failure = self.outcome if isinstance(self.outcome, Failure) else None
        return record_failed_end(failure, 0 if self.resumes else self.group.stop_signal)

    def _await_others(self) -> None:
        if self.ranks in (Status.DONE, Status.STOPPED):
            resumes, limited = self.resumes, math.isfinite(get_seconds_left())
            self.peers.await_end(
                lambda: patience(resumes, bool(self.group.stop_signal), limited), self._inquire
            )

    def _leave(self) -> None:
        """Ranks that still run end with the agent; where the launch has ended well, they may be
        finishing.
        """
        if self.ranks is Status.RUNNING:
            published, deadline = self.published.read_end(), time.monotonic() + SECONDS_TO_FINISH
            well = published is not None and published.code in (DONE, STOPPED)
            while well and not self.group.poll() and time.monotonic() < deadline:
                pass
            self.group.end()
        self.lifelines.close()
        if self.resumes:  # be no part of it any more, without closing it for the others
            assert isinstance(self.meeting.handler, DynamicRendezvousHandler)
            stop_rendezvous_heartbeats(self.meeting.handler)
        elif not self.group.stop_signal:
            with suppress(Exception):  # the store may have left already
                self.meeting.handler.shutdown()
