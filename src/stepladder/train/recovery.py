"""Going on in place when other ranks are lost: data-parallel ranks each hold the whole state.

Those that are left form a new group. They differ by one step at most, since no rank passes a step's
meeting before all have come to it: those ahead give their state. What an interrupted step's end had
changed in the books is taken back on all ranks, and done again."""

from __future__ import annotations

import struct
from typing import Any

import torch

from stepladder.core.errors import StateLost
from stepladder.train.broadcast import broadcast_state
from stepladder.train.comm import Comm
from stepladder.train.recorder import Recorder
from stepladder.train.state import TrainState

PROGRESS_RECORD = struct.Struct(
    "q?"
)  # steps done; whether something is left to do at the last one's end
KEPT = "epoch_loss", "epoch_count", "metrics", "evaluated_step", "train_loss", "best"


class MembershipChange(Exception):
    """Another rank waits to join: all meet anew, with it."""


class StepJournal:
    """What a step's end may change, and how it was before.

    votes: what ranks agreed to do at the last step's end, while that is not done; else None.
    """

    def __init__(self, recorder: Recorder, state: TrainState) -> None:
        self.recorder, self.state = recorder, state
        self.pending_actions: list[bool] | None = None

    def open(self, votes: list[bool]) -> None:
        """A step's end begins."""
        self.pending_actions = self.votes_before = votes
        self.rows = list(self.recorder.rows)
        self.values = {name: getattr(self.state, name) for name in KEPT}

    def close(self) -> None:
        """It is done."""
        self.pending_actions = None

    def reopen(self) -> None:
        """It is to be done again, for some rank has not done it."""
        self.pending_actions = self.votes_before
        self.recorder.rows = list(self.rows)
        for name, value in self.values.items():
            setattr(self.state, name, value)

    def synchronize(self, comm: Comm, model: torch.nn.Module) -> int:
        """Bring all ranks to where those are that are ahead, and note in the ledger who they are. A
        collective.

        Returns the last step written.
        """
        mine = PROGRESS_RECORD.pack(self.state.step, self.pending_actions is not None)
        standings = [PROGRESS_RECORD.unpack(found) for found in comm.gather_bytes(mine)]
        top = max(step for step, _ in standings)
        if top < 0:
            raise StateLost("all processes that had the state are lost")
        found = (
            None if self.state.shard_replicas is None else self.state.shard_replicas.find_holders()
        )
        if self.state.shard_replicas is not None and found is None:
            raise StateLost("both processes that had a slice of the optimizer's state are lost")
        # Before any rank can go on with what another one gives it: that one may be killed next.
        self.recorder.ledger.change(top, comm.members, comm.group_number, comm.loss_reasons)
        if self.state.step == top and (top, True) in standings:
            self.reopen()
        source = next(rank for rank, (step, _) in enumerate(standings) if step == top)
        if any(step < top for step, _ in standings):
            given = self._given(model) if comm.world.rank == source else None
            given = broadcast_state(comm, given, source, wanted=self.state.step < top)
            if self.state.step < top:
                self._adopt(given, model)
        if self.state.shard_replicas is not None and found is not None:
            self.state.shards = self.state.shard_replicas.reshard(*found)
        return self.recorder.rows[0][0] - 1 if self.recorder.rows else self.state.step

    def _given(self, model: torch.nn.Module) -> list[Any]:
        """All that another rank needs to stand where this one stands."""
        rows = [
            (step, epoch, 0.0 if loss is None else float(loss), counted, lr, norm)
            for step, epoch, loss, counted, lr, norm in self.recorder.rows
        ]
        standing, copies = (self.state.step, self.state.evaluated_step), self.state.shard_replicas
        weights, taken = (
            (model.state_dict(), None) if copies is None else copies.state_for_behind(model)
        )
        return [weights, self.state.state_dict(), standing, rows, self.pending_actions, taken]

    def _adopt(self, given: Any, model: torch.nn.Module) -> None:
        """Stand where the rank stands that has given this."""
        weights, stored, (step, evaluated), rows, votes, taken = given
        copies = self.state.shard_replicas
        if copies is not None:
            copies.apply_step(taken)
        model.load_state_dict(weights, strict=copies is None)
        self.state.load_state_dict(stored, step, slices=copies is None)
        self.state.evaluated_step = evaluated
        self.recorder.rows = [
            (row[0], row[1], torch.tensor(row[2]).double(), *row[3:]) for row in rows
        ]
        if votes is not None:
            self.open(votes)
