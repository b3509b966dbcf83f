"""`--shard-copies 2`: two ranks hold and step each slice, so that the others go on in place when
one is lost.

After a loss ranks are at one of two places: before a step and after their part of it, or after it
and with all weights gathered. Who has taken the step has the whole gradient, and keeps it until the
weights are gathered: the others step their slices by it. Then slices are dealt anew over the ranks
that are left, each from one that has it."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import torch

from stepladder.rank.membership import get_joining_rank
from stepladder.rank.torch_fixes import step_without_dynamo
from stepladder.train.broadcast import broadcast_state
from stepladder.train.optimizer_shards import OptimizerShards, ShardPiece, slices_of_rank

REPLICA_COUNT = 2
SEATS = struct.Struct("6q")  # twice: a group's number, a rank's place in it, its size; -1 for none


class StepRecord(NamedTuple):
    """What a step was taken by. stepped: False where the scaler skipped it.  rates: of the
    optimizer's groups.
    """

    stepped: bool
    rates: list[Any]
    gradients: list[torch.Tensor | None]


class ShardReplicas:
    """A rank's slices, and what others need of it after a loss.

    dealt: its slices by the number of the group that dealt them; two, until all ranks have the
    newer ones. taken: a step that is not whole yet: weights are still to be gathered."""

    def __init__(self, shards: OptimizerShards) -> None:
        self.optimizer, self.comm = shards.optimizer, shards.comm
        self.shards_by_group = (
            {self.comm.group_number: shards} if get_joining_rank() is None else {}
        )
        self.params = shards.params
        self.sliced = {
            id(piece.param) for number in range(shards.ranks) for piece in shards.slice(number)
        }
        self.unfinished_step: StepRecord | None = None

    # -- while training ----------------------------------------------------------------------------

    def record_step(self, stepped: bool) -> None:
        """The slices are stepped, by the gradients and rates that are there."""
        rates = [group["lr"] for group in self.optimizer.param_groups]
        self.unfinished_step = StepRecord(stepped, rates, [param.grad for param in self.params])

    def copy_gradients(self) -> None:
        """Copy the gradients: where they lie, others may reduce soon."""
        if self.unfinished_step is not None:
            copied = [
                None if grad is None else grad.clone() for grad in self.unfinished_step.gradients
            ]
            self.unfinished_step = self.unfinished_step._replace(gradients=copied)

    # -- after a loss ------------------------------------------------------------------------------

    def find_holders(self) -> tuple[int, list[int]] | None:
        """The newest deal of which the ranks here have each slice: its number, and by slice who has
        it.

        None where a slice is lost. A collective.
        """
        seats = [
            word
            for number, one in self.shards_by_group.items()
            for word in (number, one.rank, one.ranks)
        ]
        told = self.comm.gather_bytes(SEATS.pack(*seats, *[-1] * (6 - len(seats))))
        found: dict[tuple[int, int], dict[int, int]] = {}
        for holder, words in enumerate(map(SEATS.unpack, told)):
            for number, rank, ranks in (words[:3], words[3:]):
                for one in slices_of_rank(rank, ranks, REPLICA_COUNT) if number >= 0 else ():
                    found.setdefault((number, ranks), {}).setdefault(one, holder)
        for (number, ranks), by_slice in sorted(found.items(), reverse=True):
            if len(by_slice) == ranks:
                return number, [by_slice[one] for one in range(ranks)]
        return None

    def state_for_behind(
        self, model: torch.nn.Module
    ) -> tuple[dict[str, torch.Tensor], list[Any] | None]:
        """For those behind: buffers, frozen weights, which no slice has, and a step's `taken`."""
        state = model.state_dict(keep_vars=True)
        others = {
            name: value.detach() for name, value in state.items() if id(value) not in self.sliced
        }
        return others, None if self.unfinished_step is None else list(self.unfinished_step)

    def apply_step(self, taken: list[Any] | None) -> None:
        """Take the step that another rank has taken. One that joins has no slices to step."""
        self.unfinished_step = None if taken is None else StepRecord(*taken)
        if (
            self.unfinished_step is None
            or not self.unfinished_step.stepped
            or not self.shards_by_group
        ):
            return
        shards, groups = (
            self.shards_by_group[max(self.shards_by_group)],
            self.optimizer.param_groups,
        )
        before = [group["lr"] for group in groups]
        self._set(self.unfinished_step.rates, self.unfinished_step.gradients)
        with step_without_dynamo(), shards.stepping() as step:
            step()
        self._set(before, [None] * len(self.params))

    def _set(self, rates: list[Any], gradients: list[torch.Tensor | None]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        for param, grad in zip(self.params, gradients, strict=True):
            param.grad = None if grad is None else grad.to(param.device)

    def reshard(self, number: int, holders: list[int]) -> OptimizerShards:
        """This group's slices, with their weights and state, from the deal of that number. A
        collective.

        Memory: what a rank has before and after it, and one slice.
        """
        old = self.shards_by_group.get(number)
        new = OptimizerShards(self.optimizer, self.comm, REPLICA_COUNT)
        for one, holder in enumerate(holders):
            given = None
            if old is not None and holder == self.comm.world.rank:
                given = [[held_by(old, piece) for piece in old.slice(one)], old.frozen]
            pieces, new.frozen = broadcast_state(self.comm, given, holder, wanted=True)
            for piece in pieces:
                self._take(new, *piece)
        self.shards_by_group = {number: old} if old is not None else {}
        self.shards_by_group[self.comm.group_number] = new
        return new

    @torch.no_grad()
    def _take(
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
        for piece in new.of_param.get(self.params[number], []):
            if piece.lo < hi and lo < piece.hi:
                into = new.state[piece.values]
                for name, value in state.items():
                    if isinstance(value, torch.Tensor) and value.shape == values.shape:
                        fill(into.setdefault(name, like(piece, value)), piece, value, (lo, hi))
                    else:
                        into[name] = self._scalar(self.params[number], name, value)

    def _scalar(self, param: torch.nn.Parameter, name: str, value: Any) -> Any:
        """On its device, as load_state_dict of torch.optim has it."""
        if not isinstance(value, torch.Tensor):
            return value
        group = next(
            one
            for one in self.optimizer.param_groups
            if any(other is param for other in one["params"])
        )
        stays = name == "step" and not (group.get("capturable") or group.get("fused"))
        return value.clone() if stays else value.to(param.device, copy=True)

    def finish_resharding(self) -> bool:
        """All ranks have the slices that were dealt last. Whether this completes a step."""
        newest = max(self.shards_by_group)
        self.shards_by_group = {newest: self.shards_by_group[newest]}
        return self.unfinished_step is not None


def held_by(shards: OptimizerShards, piece: ShardPiece) -> list[Any]:
    """A piece for other ranks: its place, its weights, its state."""
    return [
        piece.number,
        piece.lo,
        piece.hi,
        piece.values,
        dict(shards.state.get(piece.values, {})),
    ]


def like(piece: ShardPiece, value: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(piece.values, dtype=value.dtype)


def fill(
    into: torch.Tensor, piece: ShardPiece, value: torch.Tensor, where: tuple[int, int]
) -> None:
    """Elements [lo, hi) of a parameter into what a piece has of them."""
    (lo, hi), first, last = where, max(where[0], piece.lo), min(where[1], piece.hi)
    if into.shape == value.shape and (lo, hi) == (piece.lo, piece.hi):
        into.copy_(value)  # also where it does not lie in its own order
    else:
        into.view(-1)[first - piece.lo : last - piece.lo].copy_(
            value.reshape(-1)[first - lo : last - lo]
        )
