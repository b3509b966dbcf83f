"""`--sync exact`: gradients added in one fixed tree, so any number of processes gives equal bits.

The tree over the microbatches [lo, hi) splits at the largest power of two below hi - lo. A step:

1. Each rank adds its own microbatches as far as the tree adds them to each other. This leaves one
   sum (a block) for each of the largest complete subtrees within its share.
2. The ranks exchange slices of these blocks (an all-to-all): every rank gets one slice of all.
3. Each rank finishes the tree for its slice of the gradient, and all slices are gathered.

The traffic equals that of a ring all-reduce. IEEE addition commutes, so only the shape of the tree
matters. Separating computation from processes follows EasyScale (Li et al., SC 2023, section 3).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from stepladder.train.comm import Comm
from stepladder.train.pending import Pending
from stepladder.train.sync.base import StepResult, Sync
from stepladder.train.sync.binary_tree import (
    Block,
    Tree,
    add_in_order,
    plan_additions,
    split_by_rank,
)
from stepladder.train.sync.ddp import copy_gradients, make_fixed_buckets, register_gradient_hooks


class TreeBucket:
    """A flat vector of gradients and extra values, which the tree adds over the microbatches.

    Extra values are added like gradients: the loss, and the statistics of batch norm. The vector's
    length is padded to a multiple of the number of ranks, since each rank finishes one slice. A
    leaf of the tree is this vector for one microbatch.
    """

    def __init__(
        self, comm: Comm, params: list[nn.Parameter], like: Tensor, extra_size: int = 0
    ) -> None:
        """Create a bucket.

        Args:
            comm: The ranks.
            params: The parameters whose gradients it holds.
            like: A tensor with the dtype and the device of the vector.
            extra_size: How many extra values follow the gradients.
        """
        self.comm = comm
        self.params = params
        self.offsets = list(accumulate((param.numel() for param in params), initial=0))
        self.extra_slice = slice(self.offsets[-1], self.offsets[-1] + extra_size)
        self.slice_size = -(-self.extra_slice.stop // comm.world.world_size)
        # The finished sum, and views of it: of its gradients, in the parameters' shapes, and of its
        # extra values, which follow the gradients.
        self.out = like.new_zeros(self.slice_size * comm.world.world_size)
        self.gradient = self.out[: self.offsets[-1]]
        self.extra_sum = self.out[self.extra_slice]
        self.sum_views = self._make_views(self.out)
        # Called with the bucket when a leaf is full, just before the tree adds it.
        self.leaf_observer: LeafObserver | None = None
        self.tree = Tree()
        self.free_leaves: list[Tensor] = []
        # For each leaf, by its id: `leaf_views` and `leaf_extra`. They are made once, since making
        # views costs more than copying gradients.
        self.views_by_leaf: dict[int, tuple[list[Tensor], Tensor]] = {}
        # The leaf of the current microbatch, and the same two views of it. `open_leaf` replaces all
        # three.
        self.leaf = self.out
        self.leaf_views = self.sum_views
        self.leaf_extra = self.extra_sum
        self.missing: set[int] = set()  # indices of parameters whose gradient is not in the leaf
        self.block_sizes: list[list[int]] = []  # of each rank's blocks, in microbatches
        self.additions: list[tuple[int, int]] = []  # the ones that remain when blocks have arrived
        # The tensors of the exchange. Each step makes new ones, and these attributes keep them
        # alive until the exchange is done.
        self.send_buffer = self.out
        self.receive_buffer = self.out
        self.summed_slice = self.out
        self.pending = Pending(None)

    def _make_views(self, flat: Tensor) -> list[Tensor]:
        bounds = zip(pairwise(self.offsets), self.params, strict=True)
        return [flat[lo:hi].view(param.shape) for (lo, hi), param in bounds]

    def open_leaf(self) -> None:
        """Provide a leaf for the next microbatch."""
        if not self.free_leaves:
            leaf = torch.zeros_like(self.out)
            self.views_by_leaf[id(leaf)] = self._make_views(leaf), leaf[self.extra_slice]
            self.free_leaves.append(leaf)
        self.leaf = self.free_leaves.pop()
        self.leaf_views, self.leaf_extra = self.views_by_leaf[id(self.leaf)]
        self.missing = set(range(len(self.params)))

    def fill(self, index: int) -> None:
        """Copy one parameter's gradient into the leaf, and free the original."""
        grad = self.params[index].grad
        assert grad is not None
        copy_gradients([self.leaf_views[index]], [grad])
        self.params[index].grad = None
        self.missing.discard(index)

    def fill_missing(self) -> list[nn.Parameter]:
        """Copy the missing gradients in one call, and zeros for parameters that have none.

        Returns:
            The parameters that had a gradient.
        """
        # The usual case first, without a list of parts: no gradient was copied during backward.
        # A bucket without parameters holds extra values only.
        if self.params and len(self.missing) == len(self.params):
            all_grads = [param.grad for param in self.params if param.grad is not None]
            if len(all_grads) == len(self.params):
                copy_gradients(self.leaf_views, all_grads)
                for param in self.params:
                    param.grad = None
                self.missing.clear()
                return self.params
        params_with_grad = []
        parts = []
        grads = []
        for index in self.missing:
            param = self.params[index]
            part = self.leaf_views[index]
            if param.grad is None:
                part.zero_()
            else:
                params_with_grad.append(param)
                parts.append(part)
                grads.append(param.grad)
                param.grad = None
        if parts:
            copy_gradients(parts, grads)
        self.missing.clear()
        return params_with_grad

    def push(self, microbatch: int) -> None:
        """Add the full leaf to the tree."""
        if self.leaf_observer is not None:
            self.leaf_observer(self)
        self.free_leaves += self.tree.push(Block(microbatch, 1, self.leaf))

    def start_exchange(self, total: int) -> None:
        """Start sending each rank its slice of this rank's blocks.

        With shared memory nothing is sent: every rank reads the blocks of all ranks.

        Args:
            total: How many microbatches the step has.
        """
        if self.comm.alone:
            return
        world_size = self.comm.world.world_size
        self.block_sizes = split_by_rank(total, world_size)
        self.additions = plan_additions(total, world_size)
        blocks = [block.total for block in self.tree.blocks]
        if self.comm.shared_memory is not None:
            self.pending = self.comm.combine(
                self._join_blocks(blocks),
                tuple(map(len, self.block_sizes)),
                self.out.numel(),
                self._combine,
            )
            return
        # For each receiver, the send buffer holds its slice of each block. One block needs no copy.
        slices = [block.view(world_size, self.slice_size) for block in blocks]
        if len(slices) == 1:
            self.send_buffer = slices[0].reshape(-1)
        elif slices:
            self.send_buffer = torch.stack(slices, 1).reshape(-1)
        else:
            self.send_buffer = self.out[:0]
        self.receive_buffer = self.out.new_empty(sum(map(len, self.block_sizes)) * self.slice_size)
        received_sizes = [len(sizes) * self.slice_size for sizes in self.block_sizes]
        sent_sizes = [len(blocks) * self.slice_size] * world_size
        self.pending = self.comm.all_to_all(
            self.receive_buffer, self.send_buffer, received_sizes, sent_sizes
        )

    def _join_blocks(self, blocks: list[Tensor]) -> Tensor:
        if len(blocks) == 1:
            return blocks[0]
        return torch.cat(blocks) if blocks else self.out[:0]

    def gather(self) -> Pending:
        """Finish the tree for this rank's slice, and start gathering all slices into `out`."""
        if self.comm.alone or self.comm.shared_memory is not None:
            return self.pending
        self.pending.wait()
        self.summed_slice = self.out.new_empty(self.slice_size)
        block_slices = self.receive_buffer.split(self.slice_size)
        add_in_order(block_slices, self.additions, self.summed_slice)
        return self.comm.all_gather(self.out, self.summed_slice)

    def _combine(self, block_parts: list[Tensor], lo: int, hi: int) -> None:
        """Finish the tree for the elements [lo, hi) of `out`, from these elements of all blocks."""
        is_everything = hi - lo == self.out.numel()
        target = self.out if is_everything else self.out[lo:hi]
        add_in_order(block_parts, self.additions, target)

    def end_step(self) -> None:
        """Make the blocks of the finished step free leaves again."""
        if self.comm.alone:
            self.out.copy_(self.tree.root())
        self.free_leaves += [block.total for block in self.tree.blocks]
        self.tree.blocks.clear()


LeafObserver = Callable[[TreeBucket], None]


class ExactSync(Sync):
    """Copies each microbatch's gradient into a leaf per bucket, and adds full leaves to the tree.

    In the last microbatch of this rank, hooks copy each gradient as soon as it is computed, so that
    the exchange of a bucket overlaps with the rest of backward.
    """

    def __init__(self, model: nn.Module, comm: Comm, extra_size: int) -> None:
        super().__init__(model, comm)
        groups = make_fixed_buckets(self.params)
        # The last bucket also holds the extra values, which are float32.
        if not groups or groups[-1][0].dtype != torch.float32:
            groups.append([])
        extra_sizes = [0] * (len(groups) - 1) + [extra_size]
        float32 = torch.zeros(0, dtype=torch.float32, device=comm.device)
        self.buckets = [
            TreeBucket(comm, params, params[0].detach() if params else float32, size)
            for params, size in zip(groups, extra_sizes, strict=True)
        ]
        self.bucket_and_index = {
            param: (bucket, index)
            for bucket in self.buckets
            for index, param in enumerate(bucket.params)
        }
        self.microbatch = 0  # the index of the current microbatch within the step
        self.total = 0  # the number of microbatches of the step
        # The ids of the parameters that got a gradient in this step. A set of the parameters
        # themselves would cost more, since a tensor's hash is slow.
        self.used: set[int] = set()
        self.next_bucket = 0  # the index of the first bucket whose leaf is not full
        self.hooks = register_gradient_hooks(self, self._on_gradient)

    def begin(self, first: int, count: int, total: int) -> None:
        """Begin a step.

        Args:
            first: The index of this rank's first microbatch within the step.
            count: How many microbatches this rank computes.
            total: How many microbatches the step has.
        """
        super().begin(first, count, total)
        self.microbatch = first
        self.total = total
        self.used = set()
        self.next_bucket = 0
        if count:  # a rank without microbatches fills no leaf, and would never free the open ones
            self._open_leaves()

    def _open_leaves(self) -> None:
        for bucket in self.buckets:
            bucket.open_leaf()

    def backward(self, loss: Tensor, count: float, extra: Tensor | None = None) -> None:
        """Add the gradient of one microbatch, and its extra values, to the tree."""
        if extra is not None:  # before backward, since its hooks push a leaf once it is full
            self.buckets[-1].leaf_extra.copy_(extra)
        super().backward(loss, count)
        for bucket in self.buckets:
            self.used.update(map(id, bucket.fill_missing()))
        self._push_full_leaves()
        self.microbatch += 1
        if self.microbatches_left:
            self.next_bucket = 0
            self._open_leaves()

    def observe_leaves(self, observer: LeafObserver | None) -> None:
        """Call `observer` from now on with each bucket whose leaf is full; None ends the calls."""
        for bucket in self.buckets:
            bucket.leaf_observer = observer

    def recompute_leaves(self, loss: Tensor, extra: Tensor, observer: LeafObserver) -> None:
        """Compute a microbatch's leaves once more, without adding them to the tree.

        Call it after `finish` of the step. It keeps the step's gradients in `param.grad`.

        Args:
            loss: The loss sum of the microbatch, shape ().
            extra: The extra values of the microbatch.
            observer: Called with each bucket whose leaf is full.
        """
        step_grads = [param.grad for param in self.params]
        for param in self.params:
            param.grad = None
        # `backward` counts down to 1. At 0 the hooks would take this for the last microbatch, and
        # would start the exchange.
        self.microbatches_left = 2
        self._open_leaves()
        self.buckets[-1].leaf_extra.copy_(extra)
        super().backward(loss, 0.0)
        self.microbatches_left = 0
        for bucket in self.buckets:
            bucket.fill_missing()
            observer(bucket)
            bucket.free_leaves.append(bucket.leaf)
        for param, grad in zip(self.params, step_grads, strict=True):
            param.grad = grad

    def _on_gradient(self, param: Tensor) -> None:
        if (
            self.microbatches_left
        ):  # not the last microbatch: `backward` copies all gradients at once
            return
        bucket, index = self.bucket_and_index[param]  # type: ignore[index]
        self.used.add(id(param))
        bucket.fill(index)
        self._push_full_leaves()

    def _push_full_leaves(self) -> None:
        """Push full leaves in bucket order, so that all ranks call collectives in one order."""
        while self.next_bucket < len(self.buckets) and not self.buckets[self.next_bucket].missing:
            bucket = self.buckets[self.next_bucket]
            bucket.push(self.microbatch)
            self.next_bucket += 1
            if self.microbatches_left == 0:
                bucket.start_exchange(self.total)

    def _has_gradient(self) -> list[bool]:
        return [id(param) in self.used for param in self.params]

    def finish(self, count: float, votes: list[bool], loss: Tensor | None = None) -> StepResult:
        """Finish the tree over all ranks and divide by the global count."""
        result = super().finish(count, votes, loss)
        return result._replace(extra=self.buckets[-1].extra_sum)

    def _start_missing_exchanges(self) -> None:
        for bucket in self.buckets[self.next_bucket :]:
            bucket.start_exchange(self.total)

    def _wait_for_sums(self) -> None:
        for pending in [bucket.gather() for bucket in self.buckets]:
            pending.wait()
        for bucket in self.buckets:
            bucket.end_step()
            for param, view in zip(bucket.params, bucket.sum_views, strict=True):
                param.grad = view

    def _divide_gradients(self, count: float) -> None:
        for bucket in self.buckets:
            bucket.gradient.div_(count)
