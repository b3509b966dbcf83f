"""`--shard full`: fully_shard adds gradients during backward, and each rank has its rows of them.

With `--sync exact` the tree of `binary_tree.py` replaces the additions of fully_shard. A step has
rounds: in round k, rank r computes the microbatch k * ranks + r. The microbatches of a round are
neighbours in the tree, so each rank adds its rows of their gradients when the round is over. Of M
microbatches, a rank holds at most log2(M) + 1 sums of its rows between two rounds.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from stepladder.core.errors import InputError
from stepladder.train.broadcast import gather_texts
from stepladder.train.comm import Comm
from stepladder.train.fingerprints import fingerprint
from stepladder.train.model_blocks import OUTSIDE_BLOCKS
from stepladder.train.sync.base import Sync, run_backward
from stepladder.train.sync.binary_tree import Block, Tree

MAX_DIGEST = 0xFFFF  # so that the squares of a thousand ranks' digests add up exactly in float64


class FullyShardedSync(Sync):
    """Divides the sums that fully_shard leaves in `.grad` by what the loss counts on all ranks.

    If ranks call different blocks of the same size, they would gather rows of both blocks as the
    weights of one. Shared memory detects that at once. Elsewhere the ranks compare a digest of
    their calls before the optimizer changes a weight.
    """

    def __init__(self, model: nn.Module, comm: Comm, extra_size: int = 0) -> None:
        super().__init__(model, comm, extra_size)
        self.calls: list[int] = []  # the blocks called in this step, by their index in `blocks`
        self.blocks: list[str] = []
        for name, module in model.named_modules():
            if hasattr(module, "set_custom_reduce_scatter"):
                record = partial(self._record_call, len(self.blocks))
                self.hooks.append(module.register_forward_pre_hook(record, prepend=True))
                self.blocks.append(name or OUTSIDE_BLOCKS)

    def _record_call(self, block: int, *_: Any) -> None:
        if torch.is_inference_mode_enabled():  # the memory of gathered weights is used again
            raise InputError(
                f"--shard full: {self.blocks[block]} is called in torch.inference_mode, in whose"
                " tensors no weights can be gathered again",
                "torch.no_grad()",
            )
        self.calls.append(block)

    def begin(self, first: int, count: int, total: int) -> None:
        super().begin(first, count, total)
        self.calls.clear()

    def _digest_calls(self) -> list[float]:
        digest = float(zlib.crc32(repr(self.calls).encode()) & MAX_DIGEST)
        return [1.0, digest, digest * digest]

    def _validate_call_order(self, sums: list[float]) -> None:
        ranks, total, squares = sums
        if ranks * squares == total * total:  # exact in float64; equal only if all digests are
            return
        texts = gather_texts(self.comm, json.dumps(self.calls).encode())
        orders = [json.loads(text) for text in texts]
        rank = next(rank for rank, order in enumerate(orders) if order != orders[0])
        names = [*self.blocks, "nothing more"]  # -1, after the last call, is its index
        pairs = list(zip_longest(orders[0], orders[rank], fillvalue=-1))
        index = next(index for index, pair in enumerate(pairs) if pair[0] != pair[1])
        first_block = names[pairs[index][0]]
        rank_block = names[pairs[index][1]]
        raise InputError(
            f"--shard full: rank {rank} calls {rank_block} where rank 0 calls {first_block}:"
            f" call {index + 1} of the step",
            "call each block on every rank, as often and in the same order; or --shard optimizer",
        )

    def _wait_for_sums(self) -> None:
        if self.extra is not None:
            self.comm.all_reduce(self.extra).wait()

    def _divide_gradients(self, count: float) -> None:
        if grads := [p.grad.to_local() for p in self.params if p.grad is not None]:  # type: ignore[attr-defined]
            with torch.no_grad():
                torch._foreach_div_(grads, count)


class _RowTree:
    """The reduce-scatter of one block for fully_shard, which adds in the tree of `exact`.

    Args:
        comm: The ranks.
        name: The name of the block, for messages.
        size: Elements of the block's gradient, padded to the same number of rows on all ranks.
    """

    def __init__(self, comm: Comm, name: str, size: int) -> None:
        self.comm = comm
        self.name = name
        self.size = size
        self.tree = Tree()
        self.next_microbatch = 0  # the first one of the next round
        self.total = 0  # microbatches of the step
        self.is_expecting = False  # the backward pass under way has not reached this block yet
        self.hashes: list[bytes] | None = None  # of gradients, as `hash_into` says

    def begin(self, total: int) -> None:
        self.next_microbatch = 0
        self.total = total
        self.tree = Tree()

    def begin_pass(self) -> None:
        self.is_expecting = True

    def hash_into(self, hashes: list[bytes] | None) -> None:
        """Append a hash of each further gradient to a list and add none, until it is None."""
        self.hashes = hashes

    def validate_reached(self) -> None:
        """Raise InputError if a pass has left this block without a gradient."""
        if self.is_expecting:
            raise self._make_error("has no gradient after a microbatch")

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *_: Any, **_named: Any) -> None:
        """Add the gradients of one round of microbatches to the tree.

        Args:
            output_tensor: Gets this rank's rows of the sum in the last round of the step. In the
                rounds before, the tree stores the sum of one of its blocks there.
            input_tensor: This rank's gradient: the rows of all ranks, one after the other.
        """
        if self.hashes is not None:
            self.hashes.append(fingerprint(input_tensor))
            output_tensor.zero_()
            return
        if not self.is_expecting:
            raise self._make_error("has gradients at two moments of a backward pass")
        if input_tensor.numel() != self.size:
            raise self._make_error("has weights without a gradient after a microbatch")
        self.is_expecting = False
        ranks = self.comm.world.world_size
        received = torch.empty_like(input_tensor)
        sizes = [self.size // ranks] * ranks
        self.comm.all_to_all(received, input_tensor, sizes, sizes).wait()
        first = self.next_microbatch
        self.next_microbatch += ranks
        leaves = received.view(ranks, -1)
        for microbatch, leaf in zip(range(first, self.total), leaves, strict=False):
            self.tree.push(Block(microbatch, 1, leaf))
        if self.next_microbatch >= self.total:
            output_tensor.copy_(self.tree.root())
            self.tree = Tree()
            return
        free: Tensor | None = output_tensor
        for block in self.tree.blocks:
            if block.lo >= first:  # a view of `received`, all of which it would keep alive
                block.total = block.total.clone() if free is None else free.copy_(block.total)
                free = None

    def _make_error(self, problem: str) -> InputError:
        return InputError(
            f"--sync exact --shard full: {self.name} {problem}",
            "requires_grad_(False) for weights that are not used, or --shard optimizer",
        )


class FullyShardedExactSync(FullyShardedSync):
    """Adds the gradients of each block by a _RowTree. All ranks make equally many passes."""

    def __init__(self, model: nn.Module, comm: Comm, extra_size: int = 0) -> None:
        super().__init__(model, comm)
        self.trees = list(_make_row_trees(model, comm))
        self.total = 0  # microbatches of the step
        self.extras: list[Tensor] = []  # of this rank's microbatches

    def begin(self, first: int, count: int, total: int) -> None:
        super().begin(first, count, total)
        self.total = total
        self.extras = []
        for tree in self.trees:
            tree.begin(total)

    def backward(self, loss: Tensor, count: float, extra: Tensor | None = None) -> None:
        for tree in self.trees:
            tree.begin_pass()
        super().backward(loss, count)
        for tree in self.trees:
            tree.validate_reached()
        if extra is not None:
            self.extras.append(extra.reshape(-1).float())
        if self.microbatches_left:  # fully_shard would add the next gradient to this one
            for param in self.params:
                param.grad = None

    def hash_gradients(self, loss: Tensor) -> bytes:
        gradients = [param.grad for param in self.params]
        hashes: list[bytes] = []
        for param in self.params:
            param.grad = None
        for tree in self.trees:
            tree.hash_into(hashes)
        run_backward(loss)
        for tree in self.trees:
            tree.hash_into(None)
        for param, gradient in zip(self.params, gradients, strict=True):
            param.grad = gradient
        return fingerprint(hashes)

    def _wait_for_sums(self) -> None:
        """Add `extra` over the microbatches; backward has added the gradients already."""
        ranks = self.comm.world.world_size
        own_extras = torch.cat(self.extras)
        gathered = own_extras.new_empty(ranks * len(own_extras))
        self.comm.all_gather(gathered, own_extras).wait()
        by_rank = gathered.view(ranks, len(self.extras), -1)
        tree = Tree()
        for microbatch in range(self.total):
            round_number, rank = divmod(microbatch, ranks)
            tree.push(Block(microbatch, 1, by_rank[rank, round_number]))
        self.extra = tree.root()

    def _divide_gradients(self, count: float) -> None:
        for param in self.params:
            if param.grad is not None:
                param.grad.to_local().div_(count)  # type: ignore[attr-defined]


def _make_row_trees(model: nn.Module, comm: Comm) -> Iterator[_RowTree]:
    """Make a tree for each module that fully_shard gathers.

    Each module's reduce-scatter is replaced by its tree.

    Yields:
        A tree over the trained weights of a module that belong to no gathered module within it.
    """
    ranks = comm.world.world_size
    assigned = set[Tensor]()
    for name, module in reversed(list(model.named_modules())):
        if not hasattr(module, "set_custom_reduce_scatter"):
            continue
        params = [param for param in module.parameters() if param not in assigned]
        assigned.update(params)
        trained = [param for param in params if param.requires_grad and param.numel()]
        size = sum(_compute_padded_size(param, ranks) for param in trained)
        if size:
            tree = _RowTree(comm, name or OUTSIDE_BLOCKS, size)
            module.set_custom_reduce_scatter(tree)
            yield tree


def _compute_padded_size(param: Tensor, ranks: int) -> int:
    """Return the elements of a weight whose rows are padded to a multiple of the ranks."""
    row_count = param.shape[0]
    return -(-row_count // ranks) * ranks * (param.numel() // row_count)
