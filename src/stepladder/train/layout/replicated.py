"""`--shard-copies 2`: two ranks hold each slice, so training recovers in place from a lost rank.

When a rank is lost, some of the remaining ranks may have taken the optimizer's step and others may
not. A rank that has taken the step has the complete gradient, and keeps it until all weights are
gathered. It sends the gradient to the ranks that are behind, which step their slices with it. Then
the slices are partitioned again over the remaining ranks: each is sent by a rank that holds it.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stepladder.core.errors import StateLost
from stepladder.core.settings import Settings
from stepladder.rank.membership import get_joining_rank
from stepladder.train.broadcast import broadcast_state
from stepladder.train.comm import Comm
from stepladder.train.job import Job
from stepladder.train.layout.base import Holders, StateLayout
from stepladder.train.layout.pieces import ShardPiece, slices_of_rank
from stepladder.train.layout.zero1 import OptimizerSlices, Zero1
from stepladder.train.optimizers import load_state, read_rates

REPLICA_COUNT = 2
NO_GROUP = (-1, -1, -1)
# For each of two groups whose slices a rank holds: the number of the group, the rank's number in
# it, and how many ranks it had; NO_GROUP where there is only one group.
HELD_GROUPS = struct.Struct("6q")


class _StepRecord(NamedTuple):
    """What a rank needs to take a step that another rank has taken.

    Args:
        stepped: False if the scaler skipped the step.
        rates: The learning rate of each group of the optimizer.
        gradients: The gradient of each parameter.
    """

    stepped: bool
    rates: list[Any]
    gradients: list[Tensor | None]


class Replicated(Zero1):
    """Two ranks hold each slice, and each rank keeps what the others need after a loss."""

    completes_steps = True
    copies = REPLICA_COUNT

    def __init__(self, job: Job, comm: Comm) -> None:
        super().__init__(job, comm)
        # This rank's slices, by the number of the group that they were partitioned for. There are
        # two entries from a loss until all ranks have the slices of the new group.
        self.slices_by_group: dict[int, OptimizerSlices] = {}
        if get_joining_rank() is None:
            self.slices_by_group[comm.group_number] = self.optimizer_slices
        # The ids of the parameters that are in slices.
        self.sharded_ids = {
            id(piece.param)
            for index in range(self.optimizer_slices.ranks)
            for piece in self.optimizer_slices.pieces_of_slice(index)
        }
        # The step that this rank has taken and whose weights are not gathered yet.
        self.unfinished_step: _StepRecord | None = None

    @classmethod
    def choose(cls, settings: Settings, job: Job, comm: Comm) -> type[StateLayout]:
        """Return this class also for a single process, which others may join."""
        return cls

    # -- while training ----------------------------------------------------------------------------

    def step(self, scaler: torch.amp.GradScaler) -> bool:
        """Step this rank's slices, and keep the gradients and learning rates of the step."""
        is_stepped = super().step(scaler)
        rates = read_rates(self.optimizer)
        gradients = [param.grad for param in self.optimizer_slices.params]
        self.unfinished_step = _StepRecord(is_stepped, rates, gradients)
        return is_stepped

    def interrupt_step(self) -> None:
        """Copy the gradients of an unfinished step: their memory is reused after the loss."""
        step = self.unfinished_step
        if step is not None:
            copies = [None if grad is None else grad.clone() for grad in step.gradients]
            self.unfinished_step = step._replace(gradients=copies)

    def end_step(self) -> None:
        """Drop the record of the step, whose weights are gathered."""
        self.unfinished_step = None

    # -- after a loss ------------------------------------------------------------------------------

    def find_holders(self) -> Holders:
        """Find the newest group of which the remaining ranks hold every slice. A collective.

        Returns:
            The number of that group, and for each of its slices a rank that holds it.

        Raises:
            StateLost: Of each group, both ranks that held some slice are lost.
        """
        groups = [
            (number, slices.rank, slices.ranks) for number, slices in self.slices_by_group.items()
        ]
        groups += [NO_GROUP] * (2 - len(groups))
        messages = self.comm.gather_bytes(HELD_GROUPS.pack(*groups[0], *groups[1]))
        holders: dict[tuple[int, int], dict[int, int]] = {}
        for holder, numbers in enumerate(map(HELD_GROUPS.unpack, messages)):
            for group, rank, ranks in (numbers[:3], numbers[3:]):
                if group < 0:
                    continue
                for index in slices_of_rank(rank, ranks, REPLICA_COUNT):
                    holders.setdefault((group, ranks), {}).setdefault(index, holder)
        for (group, ranks), by_slice in sorted(holders.items(), reverse=True):
            if len(by_slice) == ranks:
                return group, [by_slice[index] for index in range(ranks)]
        raise StateLost("both processes that had a slice of the optimizer's state are lost")

    def get_catch_up_state(self) -> tuple[dict[str, Tensor], list[Any] | None]:
        """Return the buffers and frozen weights, which are in no slice, and the unfinished step."""
        state = self.model.state_dict(keep_vars=True)
        unsharded = {
            name: value.detach()
            for name, value in state.items()
            if id(value) not in self.sharded_ids
        }
        step = self.unfinished_step
        return unsharded, None if step is None else list(step)

    def catch_up(
        self, weights: dict[str, Tensor], step: list[Any] | None, optimizer_state: dict[str, Any]
    ) -> None:
        """Take the step that another rank has taken, if this rank has slices of an earlier group.

        A rank that joins has none: it gets the stepped slices from the others.
        """
        self.unfinished_step = None if step is None else _StepRecord(*step)
        record = self.unfinished_step
        if record is not None and record.stepped and self.slices_by_group:
            newest = self.slices_by_group[max(self.slices_by_group)]
            rates = [group["lr"] for group in self.optimizer.param_groups]
            self._set_rates_and_gradients(record.rates, record.gradients)
            with newest.stepping() as step_slices:
                step_slices()
            self._set_rates_and_gradients(rates, [None] * len(newest.params))
        self.model.load_state_dict(weights, strict=False)
        load_state(self.optimizer, optimizer_state)

    def _set_rates_and_gradients(self, rates: list[Any], gradients: list[Tensor | None]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        for param, grad in zip(self.optimizer_slices.params, gradients, strict=True):
            param.grad = None if grad is None else grad.to(param.device)

    def redistribute(self, holders: Holders | None) -> None:
        """Make this group's slices, with their weights and state, from those of an earlier group.

        The most memory that it needs is that of the old slices, the new ones, and one more slice.
        """
        assert holders is not None
        group, senders = holders
        old = self.slices_by_group.get(group)
        new = OptimizerSlices(self.optimizer, self.comm, REPLICA_COUNT)
        frozen: dict[int, Any] = {}
        for index, sender in enumerate(senders):
            message = None
            if old is not None and sender == self.comm.world.rank:
                pieces = [_pack_piece(old, piece) for piece in old.pieces_of_slice(index)]
                message = [pieces, old.frozen]
            pieces, frozen = broadcast_state(self.comm, message, sender, needed=True)
            for fields in pieces:
                self._load_piece(new, *fields)
        new.adopt_frozen(frozen)
        self.slices_by_group = {} if old is None else {group: old}
        self.slices_by_group[self.comm.group_number] = new
        self.replace_slices(new)

    def finish_recovery(self) -> bool:
        """Drop all but the newest slices, and return whether a step is unfinished."""
        newest = max(self.slices_by_group)
        self.slices_by_group = {newest: self.slices_by_group[newest]}
        return self.unfinished_step is not None

    @torch.no_grad()
    def _load_piece(
        self,
        new: OptimizerSlices,
        number: int,
        lo: int,
        hi: int,
        values: Tensor,
        state: dict[str, Any],
    ) -> None:
        """Copy a piece of an earlier group into the weights and the new pieces that overlap it.

        Args:
            new: The slices of this group.
            number: The number of the parameter.
            lo: The first element of the parameter that the piece has.
            hi: The element after the last one.
            values: These elements.
            state: The optimizer's state of these elements.
        """
        param = self.optimizer_slices.params[number]
        weights = param.detach()
        is_whole = hi - lo == param.numel()
        (weights if is_whole else weights.view(-1)[lo:hi]).copy_(values)
        for piece in new.pieces_of_param.get(param, []):
            if piece.lo >= hi or lo >= piece.hi:
                continue
            new_state = new.state[piece.values]
            for name, value in state.items():
                if isinstance(value, Tensor) and value.shape == values.shape:
                    if name not in new_state:
                        new_state[name] = torch.empty_like(piece.values, dtype=value.dtype)
                    _copy_overlap(new_state[name], piece, value, lo, hi)
                else:
                    new_state[name] = self._copy_scalar(param, name, value)

    def _copy_scalar(self, param: torch.nn.Parameter, name: str, value: Any) -> Any:
        """Copy a value to the device where load_state_dict of torch.optim puts it."""
        if not isinstance(value, Tensor):
            return value
        group = self._find_group(param)
        is_host_count = name == "step" and not (group.get("capturable") or group.get("fused"))
        return value.clone() if is_host_count else value.to(param.device, copy=True)

    def _find_group(self, param: torch.nn.Parameter) -> dict[str, Any]:
        for group in self.optimizer.param_groups:
            if any(member is param for member in group["params"]):
                return group
        raise KeyError("the optimizer has no such parameter")


def _pack_piece(slices: OptimizerSlices, piece: ShardPiece) -> list[Any]:
    """Return a piece for other ranks: the parameter's number, the elements, values and state."""
    state = dict(slices.state.get(piece.values, {}))
    return [piece.number, piece.lo, piece.hi, piece.values, state]


def _copy_overlap(target: Tensor, piece: ShardPiece, value: Tensor, lo: int, hi: int) -> None:
    """Copy elements [lo, hi) of a parameter's state into what a piece has of them."""
    if target.shape == value.shape and (lo, hi) == (piece.lo, piece.hi):
        target.copy_(value)  # also where its strides are not contiguous, as of channels_last
        return
    first = max(lo, piece.lo)
    last = min(hi, piece.hi)
    part = value.reshape(-1)[first - lo : last - lo]
    target.view(-1)[first - piece.lo : last - piece.lo].copy_(part)
