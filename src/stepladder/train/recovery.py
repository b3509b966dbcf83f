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

from stepladder.core.errors import StateLost
from stepladder.train.broadcast import broadcast_state
from stepladder.train.comm import Comm
from stepladder.train.recorder import Recorder, Row
from stepladder.train.state import TrainState

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


class JournalEntry(NamedTuple):
    """The state that the end of a step may change, saved before it is changed.

    Args:
        votes: What the ranks agreed to do at the end of the step.
        rows: The recorded steps that were not yet written.
        records: Losses and metrics, from `TrainState.records`.
    """

    votes: list[bool]
    rows: list[Row]
    records: dict[str, Any]


class StateMessage(NamedTuple):
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


class StepJournal:
    """Makes the end of a step repeatable, as the journal of a database does for a transaction.

    `open` saves the state that the end of the step may change, `commit` marks the end as done, and
    `rollback` restores the saved state.

    Attributes:
        pending_actions: The votes on the actions at the end of the last step, in the order of
            `Action`; None once these actions are done.
    """

    def __init__(
        self,
        recorder: Recorder,
        state: TrainState,
    ) -> None:
        self.recorder = recorder
        self.state = state
        self.pending_actions: list[bool] | None = None
        self.entry: JournalEntry | None = None

    def open(self, votes: list[bool]) -> None:
        """Save what the end of a step may change, before the agreed actions begin."""
        self.pending_actions = votes
        self.entry = JournalEntry(
            votes,
            list(self.recorder.rows),
            self.state.records(),
        )

    def commit(self) -> None:
        """Mark the agreed actions as done."""
        self.pending_actions = None

    def rollback(self) -> None:
        """Undo the end of the last step, so that all ranks do it together once more."""
        assert self.entry is not None
        self.pending_actions = self.entry.votes
        self.recorder.replace_rows(self.entry.rows)
        self.state.restore_records(self.entry.records)

    def synchronize(self, comm: Comm, model: torch.nn.Module) -> int:
        """Bring every rank to the state of the most advanced ones. A collective.

        Returns:
            The last step that is in metrics.jsonl.

        Raises:
            StateLost: If no rank has the state, or if no rank has some slice of it.
        """
        own_position = Position(self.state.step, self.pending_actions is not None)
        gathered = comm.gather_bytes(POSITION_FORMAT.pack(*own_position))
        positions = [Position(*POSITION_FORMAT.unpack(data)) for data in gathered]
        last_step = max(position.step for position in positions)
        if last_step < 0:
            raise StateLost("all processes that had the state are lost")
        replicas = self.state.shard_replicas
        holders = None if replicas is None else replicas.find_holders()
        if replicas is not None and holders is None:
            raise StateLost("both processes that had a slice of the optimizer's state are lost")
        # The ledger first: a rank may be killed right after it has sent its state to the others.
        self.recorder.ledger.record_change(
            last_step, comm.members, comm.group_number, comm.loss_reasons
        )
        # Where one rank has not done the end of the last step, all ranks do it once more.
        if self.state.step == last_step and Position(last_step, True) in positions:
            self.rollback()
        if any(position.step < last_step for position in positions):
            self._send_state(
                comm,
                model,
                [position.step for position in positions],
            )
        if replicas is not None and holders is not None:
            self.state.replace_shards(replicas.reshard(*holders))
        return self.recorder.last_written_step

    def _send_state(
        self,
        comm: Comm,
        model: torch.nn.Module,
        steps: list[int],
    ) -> None:
        """Send the state of the first rank at the last step to the ranks that are behind.

        Args:
            comm: The ranks.
            model: The model of this rank.
            steps: For each rank, the optimizer steps that it has done.
        """
        last_step = max(steps)
        source = steps.index(last_step)
        is_behind = self.state.step < last_step
        message = list(self._make_message(model)) if comm.world.rank == source else None
        received = broadcast_state(comm, message, source, needed=is_behind)
        if is_behind:
            self._adopt(StateMessage(*received), model)

    def _make_message(self, model: torch.nn.Module) -> StateMessage:
        replicas = self.state.shard_replicas
        weights: dict[str, torch.Tensor] = {}
        unfinished_step = None
        if replicas is None:
            weights = model.state_dict()
        else:
            weights, unfinished_step = replicas.state_for_behind(model)
        return StateMessage(
            weights,
            self.state.state_dict(),
            self.state.step,
            self.state.evaluated_step,
            self.recorder.rows_as_numbers(),
            self.pending_actions,
            unfinished_step,
        )

    def _adopt(
        self,
        message: StateMessage,
        model: torch.nn.Module,
    ) -> None:
        """Bring this rank to the state of the rank that has sent the message."""
        replicas = self.state.shard_replicas
        if replicas is not None:
            replicas.apply_step(message.unfinished_step)
        model.load_state_dict(message.weights, strict=replicas is None)
        self.state.load_state_dict(
            message.state,
            message.step,
            message.evaluated_step,
            with_slices=replicas is None,
        )
        rows: list[Row] = []
        for step, epoch, loss, count, rate, norm in message.rows:
            rows.append((step, epoch, torch.tensor(loss).double(), count, rate, norm))
        self.recorder.replace_rows(rows)
        if message.pending_actions is not None:
            self.open(message.pending_actions)
