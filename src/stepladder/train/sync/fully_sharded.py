"""`--shard full`: fully_shard adds gradients over ranks during backward; each rank has its rows of
them.

With `--sync exact` the tree of `blocks.py` takes the place of its additions. Ranks take turns in
the microbatches: in round k rank r has number k * ranks + r. So a round's leaves follow each other,
each rank adds its rows of them at once, and between rounds holds as many sums of its rows as a
binary counter has ones."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from functools import partial
from itertools import zip_longest
from typing import Any

import torch

from stepladder.core.errors import InputError
from stepladder.train.comm import Comm
from stepladder.train.model_blocks import OUTSIDE_BLOCKS
from stepladder.train.sync.base import Sync
from stepladder.train.sync.binary_tree import Block, Tree

MOST_DIGEST = 0xFFFF  # so that the squares of a thousand ranks' add up exactly in float64


class FullyShardedSync(Sync):
    """What fully_shard has left in `.grad`, divided by what the loss counts over all ranks.

    Ranks that call different blocks of one size would gather rows of both as the weights of one.
    Shared memory finds that at once. Elsewhere a digest of the calls is compared before the
    optimizer moves a weight."""

    def __init__(self, model: torch.nn.Module, comm: Comm, extra_size: int = 0) -> None:
        super().__init__(model, comm, extra_size)
        self.calls: list[int] = []
        self.blocks: list[str] = []
        self.hooks: list[Any] = []
        for name, module in model.named_modules():
            if hasattr(module, "set_custom_reduce_scatter"):
                note = partial(self._note_call, len(self.blocks))
                self.hooks.append(module.register_forward_pre_hook(note, prepend=True))
                self.blocks.append(name or OUTSIDE_BLOCKS)

    def _note_call(self, number: int, *_: Any) -> None:
        self.calls.append(number)

    def begin(self, first: int, count: int, total: int) -> None:
        super().begin(first, count, total)
        self.calls.clear()

    def _order(self) -> list[float]:
        digest = float(zlib.crc32(repr(self.calls).encode()) & MOST_DIGEST)
        return [1.0, digest, digest * digest]

    def _refuse_other_order(self, sums: list[float]) -> None:
        ranks, total, squares = sums
        if ranks * squares == total * total:  # exact in float64; equal only where all digests are
            return
        mine = json.dumps(self.calls).encode()
        length = max(
            int.from_bytes(one, "big")
            for one in self.comm.gather_bytes(len(mine).to_bytes(8, "big"))
        )
        orders = [json.loads(text) for text in self.comm.gather_bytes(mine.ljust(length))]
        rank = next(rank for rank, order in enumerate(orders) if order != orders[0])
        calls = [*zip_longest(orders[0], orders[rank])]
        place, pair = next((place, pair) for place, pair in enumerate(calls) if pair[0] != pair[1])
        here, there = ("nothing more" if one is None else self.blocks[one] for one in pair)
        raise InputError(
            f"--shard full: rank {rank} calls {there} where rank 0 calls {here}: call {place + 1} of the step",
            "call each block on every rank, as often and in the same order; or --shard optimizer",
        )

    def close(self) -> None:
        for hook in self.hooks:
            hook.remove()

    def _complete(self) -> None:
        if self.extra is not None:
            self.comm.all_reduce(self.extra).wait()

    def _divide(self, count: float) -> None:
        if grads := [p.grad.to_local() for p in self.params if p.grad is not None]:  # type: ignore[attr-defined]
            with torch.no_grad():
                torch._foreach_div_(grads, count)


class RowTree:
    """In place of fully_shard's reduction of one block, as its `set_custom_reduce_scatter` takes
    it.

    size: elements of the block's gradient, with those that make the ranks' rows as many.
    """

    def __init__(self, comm: Comm, name: str, size: int) -> None:
        self.comm, self.name, self.size = comm, name, size
        self.tree = Tree()

    def begin(self, total: int) -> None:
        """A step of so many microbatches."""
        self.next, self.total, self.tree = 0, total, Tree()

    def expect(self) -> None:
        """A pass begins."""
        self.waits = True

    def refuse_missing(self) -> None:
        """After a pass. Raises InputError where it has left this block without a gradient."""
        if self.waits:
            raise self._refusal("has no gradient after a microbatch")

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *_: Any, **_named: Any
    ) -> None:
        """Into the tree. input_tensor: this rank's leaf, the ranks' rows one after the other.

        output_tensor: gets this rank's rows of the sum in the step's last round. Before that it is
        a block of the tree, and no gradient."""
        if not self.waits:
            raise self._refusal("has gradients at two moments of a backward pass")
        if input_tensor.numel() != self.size:
            raise self._refusal("has weights without a gradient after a microbatch")
        self.waits, ranks = False, self.comm.world.world_size
        received = torch.empty_like(input_tensor)
        sizes = [self.size // ranks] * ranks
        self.comm.all_to_all(received, input_tensor, sizes, sizes).wait()
        first, self.next = self.next, self.next + ranks
        for number, leaf in zip(range(first, self.total), received.view(ranks, -1), strict=False):
            self.tree.push(Block(number, 1, leaf))
        if self.next >= self.total:
            output_tensor.copy_(self.tree.root())
            self.tree = Tree()
            return
        room: torch.Tensor | None = output_tensor
        for block in self.tree.blocks:
            if block.lo >= first:  # a view, which would keep all that was received
                block.total = block.total.clone() if room is None else room.copy_(block.total)
                room = None

    def _refusal(self, said: str) -> InputError:
        return InputError(
            f"--sync exact --shard full: {self.name} {said}",
            "requires_grad_(False) for weights that are not used, or --shard optimizer",
        )


class FullyShardedExactSync(FullyShardedSync):
    """Each block's gradient goes through its RowTree in each pass; all ranks make as many passes."""

    def __init__(self, model: torch.nn.Module, comm: Comm, extra_size: int = 0) -> None:
        super().__init__(model, comm)
        self.trees = list(row_trees(model, comm))

    def begin(self, first: int, count: int, total: int) -> None:
        super().begin(first, count, total)
        self.total, self.extras = total, list[torch.Tensor]()
        for tree in self.trees:
            tree.begin(total)

    def backward(self, loss: torch.Tensor, count: float, extra: torch.Tensor | None = None) -> None:
        for tree in self.trees:
            tree.expect()
        super().backward(loss, count)
        for tree in self.trees:
            tree.refuse_missing()
        if extra is not None:
            self.extras.append(extra.reshape(-1).float())
        if self.left:  # else fully_shard would add to it
            for param in self.params:
                param.grad = None

    def _complete(self) -> None:
        """The sum over microbatches of their `extra`; the gradients' are there already."""
        ranks, mine = self.comm.world.world_size, torch.cat(self.extras)
        gathered = mine.new_empty(ranks * len(mine))
        self.comm.all_gather(gathered, mine).wait()
        by_rank, tree = gathered.view(ranks, len(self.extras), -1), Tree()
        for number in range(self.total):
            tree.push(Block(number, 1, by_rank[number % ranks, number // ranks]))
        self.extra = tree.root()

    def _divide(self, count: float) -> None:
        for param in self.params:
            if param.grad is not None:
                param.grad.to_local().div_(count)  # type: ignore[attr-defined]


def row_trees(model: torch.nn.Module, comm: Comm) -> Iterator[RowTree]:
    """One for each module that fully_shard gathers, of the weights that no such module within it
    has.
    """
    ranks, seen = comm.world.world_size, set[torch.Tensor]()
    for name, module in reversed(list(model.named_modules())):
        if not hasattr(module, "set_custom_reduce_scatter"):
            continue
        own = [param for param in module.parameters() if param not in seen]
        seen.update(own)
        rows = [
            (param.shape[0], param.numel())
            for param in own
            if param.requires_grad and param.numel()
        ]
        if size := sum(-(-first // ranks) * ranks * (count // first) for first, count in rows):
            tree = RowTree(comm, name or OUTSIDE_BLOCKS, size)
            module.set_custom_reduce_scatter(tree)
            yield tree
