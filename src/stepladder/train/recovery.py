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
    """What ranks vote on at the end of each step: the index of its vote in a list of votes."""

    STOP = 0
    SNAPSHOT = 1
    FLUSH = 2
    REGROUP = 3


class MembershipChange(Exception):
    """Another rank waits to join, so all ranks leave their group and form one with it."""


class Position(NamedTuple):
    """How far one rank is.

    Args:
        step: Optimizer steps done, -1 for a rank that has no state yet.
        has_pending_actions: Whether the end of that step is still to be done.
    """

    step: int
    has_pending_actions: bool


class JournalEntry(NamedTuple):
    """What the end of one step may change, as it was before.

    Args:
        votes: What the ranks agreed to do.
        rows: The recorded steps that were not yet written.
        records: Losses and metrics, from `TrainState.records`.
    """

    votes: list[bool]
    rows: list[Row]
    records: dict[str, Any]


class StateMessage(NamedTuple):
    """Everything that one rank sends to bring another one to its own state.

    Args:
        weights: Of the model. With --shard-copies, only what no slice holds.
        state: `TrainState.state_dict`.
        step: Optimizer steps done.
        evaluated_step: The step of the last evaluation.
        rows: The recorded steps that are not yet written, with numbers for losses.
        pending_actions: What is still to be done at the end of the step, or None.
        unfinished_step: With --shard-copies: a step whose weights are not yet gathered, or None.
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

    `open` notes what the end of the step may change, `commit` marks it as done, `rollback` undoes
    it.

    Attributes:
        pending_actions: What ranks agreed to do at the end of the last step, by `Action`, while it
            is not done; else None.
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
        """Begin the end of a step."""
        self.pending_actions = votes
        self.entry = JournalEntry(
            votes,
            list(self.recorder.rows),
            self.state.records(),
        )

    def commit(self) -> None:
        """Mark the end of the step as done."""
        self.pending_actions = None

    def rollback(self) -> None:
        """Undo the end of the last step: it is done again, since some rank has not done it."""
        assert self.entry is not None
        self.pending_actions = self.entry.votes
        self.recorder.replace_rows(self.entry.rows)
        self.state.restore_records(self.entry.records)

    def synchronize(self, comm: Comm, model: torch.nn.Module) -> int:
        """Bring every rank to the state of the most advanced ones. A collective.

        Returns:
            The last step that is in metrics.jsonl.

        Raises:
            StateLost: If no rank has the state, or a slice of it.
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
            steps: The steps done by each rank.
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
        self.recorder.replace_rows(
            [(row[0], row[1], torch.tensor(row[2]).double(), *row[3:]) for row in message.rows]
        )
        if message.pending_actions is not None:
            self.open(message.pending_actions)
