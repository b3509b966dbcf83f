"""In-place recovery: the ranks that remain after a loss are brought to the same state.

With data parallelism each rank holds the whole state. The remaining ranks form a new process group.
Their states differ by one step at most, because no rank passes the collective of a step before all
ranks have entered it. Ranks that are ahead send their state to the others. What the end of an
interrupted step has changed is undone on every rank, and done again.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Any, NamedTuple

import torch

from stepladder.core import durable
from stepladder.core.errors import PeerLost, StateLost
from stepladder.rank.membership import GROUP_BROKEN, GROUP_LEFT
from stepladder.rank.streams import restore_launcher_output
from stepladder.storage.run_dir import RunDir
from stepladder.storage.run_files import SNAPSHOTS_FOLDER
from stepladder.train.attempt import RunAttempt
from stepladder.train.broadcast import broadcast_state
from stepladder.train.comm import Comm
from stepladder.train.phases import REGROUPING
from stepladder.train.recorder import Recorder, Row
from stepladder.train.snapshot_saver import SnapshotSaver
from stepladder.train.state import OPTIMIZER, TrainState
from stepladder.train.step_listener import LoopListener

POSITION_FORMAT = struct.Struct("q?")  # a `Position` as bytes


class Action(IntEnum):
    """An action that ranks vote on in each step, to do it at the end of the step.

    A list of votes has one bool for each action. The value of an action is its index in the list.
    """

    STOP = 0
    SNAPSHOT = 1
    FLUSH = 2
    REGROUP = 3


class MembershipChange(Exception):
    """Another rank waits to join, so all ranks leave their group and form one with it."""


class Position(NamedTuple):
    """How far one rank has come.

    Args:
        step: Optimizer steps done, -1 for a rank that has no state yet.
        has_pending_actions: Whether the actions at the end of that step are still to be done.
    """

    step: int
    has_pending_actions: bool


class RecoveryDecision(NamedTuple):
    """What one rank does to come to the state of the most advanced ranks.

    Args:
        last_step: The step that all ranks come to; -1 if no rank has the state.
        repeats_end: Whether this rank undoes the end of its last step, to do it again with all.
        source: The rank that sends its state to those behind, None if no rank is behind.
        is_behind: Whether this rank is behind.
    """

    last_step: int
    repeats_end: bool
    source: int | None
    is_behind: bool


def decide(positions: list[Position], rank: int) -> RecoveryDecision:
    """Return what a rank does after a loss, a pure function of how far each rank has come.

    Where one rank has not done the end of the last step, all ranks do it once more.
    """
    steps = [position.step for position in positions]
    last_step = max(steps)
    is_behind = steps[rank] < last_step
    is_end_missing = Position(last_step, True) in positions
    return RecoveryDecision(
        last_step,
        repeats_end=is_end_missing and not is_behind,
        source=steps.index(last_step) if min(steps) < last_step else None,
        is_behind=is_behind,
    )


class _JournalEntry(NamedTuple):
    """The state that the end of a step may change, saved before it is changed.

    Args:
        votes: What the ranks agreed to do at the end of the step.
        rows: The recorded steps that were not yet written.
        records: Losses and metrics, from `TrainState.records`.
    """

    votes: list[bool]
    rows: list[Row]
    records: dict[str, Any]


class _StateMessage(NamedTuple):
    """The training state of one rank, as it is sent to the ranks that are behind.

    Args:
        weights: The model's state dict. With --shard-copies, only the tensors that are not in the
            slices of the optimizer.
        state: The result of `TrainState.state_dict`.
        step: Optimizer steps done.
        evaluated_step: The step of the last evaluation.
        rows: The recorded steps that are not yet written, with numbers instead of loss tensors.
        pending_actions: The votes on the actions that are still to be done, or None.
        unfinished_step: With --shard-copies, a step whose weights are not yet gathered, or None.
    """

    weights: dict[str, torch.Tensor]
    state: dict[str, Any]
    step: int
    evaluated_step: int
    rows: list[Any]
    pending_actions: list[bool] | None
    unfinished_step: list[Any] | None


class StepJournal(LoopListener):
    """Makes the end of a step repeatable, as the journal of a database does for a transaction.

    `open` saves the state that the end of the step may change, `commit` marks the end as done, and
    `rollback` restores the saved state.
    """

    def __init__(self, recorder: Recorder, state: TrainState) -> None:
        self.recorder = recorder
        self.state = state
        # The votes on the actions at the end of the last step, in the order of `Action`; None once
        # these actions are done.
        self.pending_actions: list[bool] | None = None
        self.entry: _JournalEntry | None = None

    def after_update(self, votes: list[bool]) -> None:
        """Open the journal: if ranks are lost from here on, the others can complete the step."""
        self.open(votes)

    def open(self, votes: list[bool]) -> None:
        """Save what the end of a step may change, before the agreed actions begin."""
        self.pending_actions = votes
        self.entry = _JournalEntry(votes, list(self.recorder.rows), self.state.records())

    def commit(self) -> None:
        """Mark the agreed actions as done."""
        self.pending_actions = None

    def rollback(self) -> None:
        """Undo the end of the last step, so that all ranks do it together once more."""
        assert self.entry is not None
        self.pending_actions = self.entry.votes
        self.recorder.replace_rows(self.entry.rows)
        self.state.restore_records(self.entry.records)

    def synchronize(self, comm: Comm) -> int:
        """Bring every rank to the state of the most advanced ones. A collective.

        Returns:
            The last step that is in metrics.jsonl.

        Raises:
            StateLost: If no rank has the state, or if no rank has some slice of it.
        """
        own_position = Position(self.state.step, self.pending_actions is not None)
        gathered = comm.gather_bytes(POSITION_FORMAT.pack(*own_position))
        positions = [Position(*POSITION_FORMAT.unpack(data)) for data in gathered]
        decision = decide(positions, comm.world.rank)
        if decision.last_step < 0:
            raise StateLost("all processes that had the state are lost")
        layout = self.state.layout
        holders = layout.find_holders()
        # The ledger first: a rank may be killed right after it has sent its state to the others.
        self.recorder.ledger.record_change(
            decision.last_step, comm.members, comm.group_number, comm.loss_reasons
        )
        if decision.repeats_end:
            self.rollback()
        if decision.source is not None:
            is_source = decision.source == comm.world.rank
            message = list(self._make_message()) if is_source else None
            received = broadcast_state(comm, message, decision.source, decision.is_behind)
            if decision.is_behind:
                self._adopt(_StateMessage(*received))
        layout.redistribute(holders)
        return self.recorder.last_written_step

    def _make_message(self) -> _StateMessage:
        weights, unfinished_step = self.state.layout.get_catch_up_state()
        return _StateMessage(
            weights,
            self.state.state_dict(),
            self.state.step,
            self.state.evaluated_step,
            self.recorder.rows_as_numbers(),
            self.pending_actions,
            unfinished_step,
        )

    def _adopt(self, message: _StateMessage) -> None:
        """Bring this rank to the state of the rank that has sent the message."""
        self.state.layout.catch_up(
            message.weights, message.unfinished_step, message.state[OPTIMIZER]
        )
        self.state.load_records(message.state, message.step, message.evaluated_step)
        rows: list[Row] = []
        for step, epoch, loss, count, rate, norm in message.rows:  # the loss as a number
            rows.append((step, epoch, torch.tensor(loss).double(), count, rate, norm))
        self.recorder.replace_rows(rows)
        if message.pending_actions is not None:
            self.open(message.pending_actions)


class SessionRecovery:
    """Continues a session with the ranks that remain after a loss, or that have been added.

    Args:
        attempt: The run and its ranks.
        journal: Makes the ranks' states equal.
        snapshot_saver: Saves the state.
        attempt_number: The number of the attempt.
    """

    def __init__(
        self,
        attempt: RunAttempt,
        journal: StepJournal,
        snapshot_saver: SnapshotSaver,
        attempt_number: int,
    ) -> None:
        self.attempt = attempt
        self.comm = attempt.comm
        self.journal = journal
        self.state = journal.state
        self.recorder = journal.recorder
        self.snapshot_saver = snapshot_saver
        self.attempt_number = attempt_number

    def run(self, reason: Exception, run_dir: RunDir | None) -> RunDir | None:
        """Form the next group, and bring every rank to the same state.

        Args:
            reason: Why the process group ends: PeerLost, or MembershipChange for a rank that waits
                to join.
            run_dir: The run directory, on the first rank.

        Returns:
            The run directory, on the first rank of the next group.

        Raises:
            StateLost: If no rank has the state any more.
            Exception: This is `reason` itself, if no launcher forms a next group.
        """
        # A rank whose step is -1 has no state yet: it has not been in a group that could break.
        is_rank_lost = isinstance(reason, PeerLost) and self.state.step >= 0
        status = GROUP_BROKEN if is_rank_lost else GROUP_LEFT
        self.snapshot_saver.abandon()
        with self.comm.phases(REGROUPING):
            while self.comm.regroup(status):
                try:
                    last_written_step = self._synchronize()
                    if run_dir is None and self.comm.world.is_first:
                        run_dir = self._take_over_run_dir()
                    self._continue_files(run_dir, last_written_step)
                    if self.state.layout.finish_recovery():
                        self.state.finish_step()
                except StateLost:
                    raise
                except PeerLost:  # another rank was lost meanwhile
                    status = GROUP_BROKEN
                else:
                    return run_dir
        raise reason

    def _synchronize(self) -> int:
        """Bring every rank to the state of the most advanced ones. A collective."""
        return self.journal.synchronize(self.comm)

    def _continue_files(self, run_dir: RunDir | None, last_written_step: int) -> None:
        """Continue the files of the first rank after the last step in them. A collective."""
        if self.comm.world.is_first and run_dir is not None:
            steps_per_epoch = self.attempt.spec.plan.steps_per_epoch
            self.recorder.close_files()
            run_dir.truncate_recent_metrics(last_written_step, steps_per_epoch)
            self.recorder.open_files()
        self.comm.gather_bytes(b".")  # no rank continues before the first one has opened the files

    def _take_over_run_dir(self) -> RunDir:
        """Open the run directory and continue the output, in place of a lost first rank."""
        restore_launcher_output()
        run_dir = self.attempt.open_run_dir(number=self.attempt_number)
        self.snapshot_saver.open(self.attempt.open_snapshots(run_dir))
        self.attempt.exit_stack.callback(self.snapshot_saver.close)
        snapshots = self.attempt.spec.settings.run_dir / SNAPSHOTS_FOLDER
        durable.remove_unfinished(snapshots, "step_")
        self.recorder.take_over(self.attempt.open_loggers(run_dir))
        return run_dir
