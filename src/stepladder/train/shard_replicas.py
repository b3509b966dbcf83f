"""`--shard-copies 2`: two ranks hold each slice, so training recovers in place from a lost rank.

A loss finds a rank either before a step and after its part of the sum, or after the step and with
all weights gathered. A rank that has taken the step has the complete gradient, and keeps it until
the weights are gathered: the others step their slices by it. Then the slices are partitioned again
over the remaining ranks, each sent by a rank that holds it.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import torch

from stepladder.rank.membership import get_joining_rank
from stepladder.rank.torch_fixes import step_without_dynamo
from stepladder.train.broadcast import broadcast_state
from stepladder.train.optimizer_shards import OptimizerShards
from stepladder.train.shard_pieces import ShardPiece, slices_of_rank

REPLICA_COUNT = 2
NO_GROUP = (-1, -1, -1)
HELD_GROUPS = struct.Struct("6q")  # of two groups: the number, the rank in it, its size


class StepRecord(NamedTuple):
    """What a rank needs to take a step that another rank has taken.

    Attributes:
        stepped: False if the scaler skipped the step.
        rates: The learning rate of each group of the optimizer.
        gradients: The gradient of each parameter.
    """

    stepped: bool
    rates: list[Any]
    gradients: list[torch.Tensor | None]


class ShardReplicas:
    """A rank's slices, and the part of its state that other ranks need after a loss.

    Attributes:
        shards_by_group: The slices by the number of the group that partitioned them: two, until all
            ranks have the newer slices.
        unfinished_step: A step whose weights are still to be gathered.
    """

    def __init__(self, shards: OptimizerShards) -> None:
        self.optimizer = shards.optimizer
        self.comm = shards.comm
        self.params = shards.params
        self.shards_by_group: dict[int, OptimizerShards] = {}
        if get_joining_rank() is None:
            self.shards_by_group[self.comm.group_number] = shards
        self.sharded_ids = {
            id(piece.param)
            for index in range(shards.ranks)
            for piece in shards.pieces_of_slice(index)
        }
        self.unfinished_step: StepRecord | None = None

    # -- while training ----------------------------------------------------------------------------

    def record_step(self, stepped: bool) -> None:
        """Record that the slices were stepped, with the present gradients and learning rates."""
        rates = [group["lr"] for group in self.optimizer.param_groups]
        self.unfinished_step = StepRecord(
            stepped,
            rates,
            [param.grad for param in self.params],
        )

    def copy_gradients(self) -> None:
        """Copy the gradients, since others may soon reduce into their memory."""
        step = self.unfinished_step
        if step is not None:
            copies = [None if grad is None else grad.clone() for grad in step.gradients]
            self.unfinished_step = step._replace(gradients=copies)

    # -- after a loss ------------------------------------------------------------------------------

    def find_holders(self) -> tuple[int, list[int]] | None:
        """Find the newest partition whose slices the present ranks all hold.

        All ranks must call this method.

        Returns:
            The number of the partition's group, and for each slice a rank that holds it. None if a
            slice is lost.
        """
        groups = [
            (number, shards.rank, shards.ranks) for number, shards in self.shards_by_group.items()
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
        return None

    def state_for_behind(
        self, model: torch.nn.Module
    ) -> tuple[dict[str, torch.Tensor], list[Any] | None]:
        """Return the state for ranks that are a step behind.

        Returns:
            The buffers and frozen weights, which no slice has, and the unfinished step.
        """
        state = model.state_dict(keep_vars=True)
        unsharded = {
            name: value.detach()
            for name, value in state.items()
            if id(value) not in self.sharded_ids
        }
        step = self.unfinished_step
        return unsharded, None if step is None else list(step)

    def apply_step(self, step_fields: list[Any] | None) -> None:
        """Take the step that another rank has taken. A rank that joins has no slices to step."""
        self.unfinished_step = None if step_fields is None else StepRecord(*step_fields)
        step_record = self.unfinished_step
        if step_record is None or not step_record.stepped or not self.shards_by_group:
            return
        shards = self.shards_by_group[max(self.shards_by_group)]
        rates_before = [group["lr"] for group in self.optimizer.param_groups]
        self._set_rates_and_gradients(step_record.rates, step_record.gradients)
        with step_without_dynamo(), shards.stepping() as step:
            step()
        self._set_rates_and_gradients(rates_before, [None] * len(self.params))

    def _set_rates_and_gradients(
        self,
        rates: list[Any],
        gradients: list[torch.Tensor | None],
    ) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        for param, grad in zip(self.params, gradients, strict=True):
            param.grad = None if grad is None else grad.to(param.device)

    def reshard(
        self,
        group: int,
        holders: list[int],
    ) -> OptimizerShards:
        """Make this group's slices, with their weights and state, from those of an earlier group.

        All ranks must call this method. It needs memory for the slices before and after it, and for
        one more slice.

        Args:
            group: The number of the earlier group.
            holders: For each slice of that group, the rank that sends it.

        Returns:
            The shards of this group.
        """
        old = self.shards_by_group.get(group)
        new = OptimizerShards(self.optimizer, self.comm, REPLICA_COUNT)
        frozen: dict[int, Any] = {}
        for index, holder in enumerate(holders):
            message = None
            if old is not None and holder == self.comm.world.rank:
                pieces = [pack_piece(old, piece) for piece in old.pieces_of_slice(index)]
                message = [pieces, old.frozen]
            pieces, frozen = broadcast_state(self.comm, message, holder, needed=True)
            for fields in pieces:
                self._load_piece(new, *fields)
        new.adopt_frozen(frozen)
        self.shards_by_group = {} if old is None else {group: old}
        self.shards_by_group[self.comm.group_number] = new
        return new

    @torch.no_grad()
    def _load_piece(
        self,
        new: OptimizerShards,
        number: int,
        lo: int,
        hi: int,
        values: torch.Tensor,
        state: dict[str, Any],
    ) -> None:
        param = self.params[number].detach()
        is_whole = hi - lo == param.numel()
        (param if is_whole else param.view(-1)[lo:hi]).copy_(values)
        for piece in new.pieces_of_param.get(self.params[number], []):
            if piece.lo >= hi or lo >= piece.hi:
                continue
            new_state = new.state[piece.values]
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.shape == values.shape:
                    if name not in new_state:
                        new_state[name] = torch.empty_like(piece.values, dtype=value.dtype)
                    copy_overlap(new_state[name], piece, value, lo, hi)
                else:
                    new_state[name] = self._copy_scalar(self.params[number], name, value)

    def _copy_scalar(
        self,
        param: torch.nn.Parameter,
        name: str,
        value: Any,
    ) -> Any:
        """Copy a value to the device where load_state_dict of torch.optim puts it."""
        if not isinstance(value, torch.Tensor):
            return value
        group = self._find_group(param)
        is_host_count = name == "step" and not (group.get("capturable") or group.get("fused"))
        return value.clone() if is_host_count else value.to(param.device, copy=True)

    def _find_group(self, param: torch.nn.Parameter) -> dict[str, Any]:
        for group in self.optimizer.param_groups:
            if any(member is param for member in group["params"]):
                return group
        raise KeyError("the optimizer has no such parameter")

    def finish_step(self) -> None:
        """Forget the step: its weights are gathered."""
        self.unfinished_step = None

    def finish_resharding(self) -> bool:
        """Drop all but the newest slices, and return whether a step is unfinished."""
        newest = max(self.shards_by_group)
        self.shards_by_group = {newest: self.shards_by_group[newest]}
        return self.unfinished_step is not None


def pack_piece(
    shards: OptimizerShards,
    piece: ShardPiece,
) -> list[Any]:
    """Return a piece for other ranks: its elements, their weights and their state."""
    state = dict(shards.state.get(piece.values, {}))
    return [piece.number, piece.lo, piece.hi, piece.values, state]


def copy_overlap(
    target: torch.Tensor,
    piece: ShardPiece,
    value: torch.Tensor,
    lo: int,
    hi: int,
) -> None:
    """Copy elements [lo, hi) of a parameter's state into what a piece has of them."""
    if target.shape == value.shape and (lo, hi) == (piece.lo, piece.hi):
        target.copy_(value)  # also where it does not lie in its own order
        return
    first = max(lo, piece.lo)
    last = min(hi, piece.hi)
    part = value.reshape(-1)[first - lo : last - lo]
    target.view(-1)[first - piece.lo : last - piece.lo].copy_(part)
