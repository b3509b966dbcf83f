"""`--sync exact`: gradients added in one fixed binary tree, so any number of processes gives the
same bits.

tree(lo, hi) over the microbatches splits at the largest power of two below hi - lo. A rank adds its
own microbatches as that tree does, which leaves it the maximal aligned subtrees of its share; their
parts are exchanged, so that each rank finishes the tree for its slice of the gradient, and the
slices are gathered: the traffic of a ring all-reduce. IEEE addition commutes, so only the tree's
shape matters. The separation of computation from processes follows EasyScale (Li et al., SC 2023,
section 3)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise

import torch

from stepladder.train.comm import Comm, Pending
from stepladder.train.sync.base import StepResult, Sync
from stepladder.train.sync.binary_tree import (
    Block,
    Tree,
    add_remaining,
    block_sizes_by_rank,
    remaining_additions,
)
from stepladder.train.sync.ddp import make_fixed_buckets, register_gradient_hooks


class TreeBucket:
    """One flat vector that goes through the tree in every step: some parameters' gradient, and
    extra values.

    Padded to a multiple of the ranks, each of which finishes one slice. out: the finished sum,
    whose `views` have the parameters' shapes; `extra` comes after them.  look: called with each
    full leaf, just before the tree has it."""

    look: Look | None = None
    pending = Pending(None)  # for one rank alone

    def __init__(
        self, comm: Comm, params: list[torch.nn.Parameter], like: torch.Tensor, extra_size: int = 0
    ) -> None:
        self.comm, self.params = comm, params
        self.ends = list(accumulate((p.numel() for p in params), initial=0))
        self.extra = slice(self.ends[-1], self.ends[-1] + extra_size)
        self.width = -(-self.extra.stop // comm.world.world_size)
        self.out = like.new_zeros(self.width * comm.world.world_size)
        self.gradient, self.sums = self.out[: self.ends[-1]], self.out[self.extra]
        self.views = self._cut(self.out)
        # By leaf's id: cutting costs more than copying. The last one is for the extra values.
        self.views_of: dict[int, list[torch.Tensor]] = {}
        self.tree = Tree()
        self.free: list[torch.Tensor] = []

    def _cut(self, flat: torch.Tensor) -> list[torch.Tensor]:
        bounds = pairwise(self.ends)
        return [
            flat[lo:hi].view(param.shape)
            for (lo, hi), param in zip(bounds, self.params, strict=True)
        ]

    def open(self) -> None:
        """A leaf for the next microbatch."""
        if not self.free:
            leaf = torch.zeros_like(self.out)
            self.views_of[id(leaf)] = [*self._cut(leaf), leaf[self.extra]]
            self.free.append(leaf)
        self.leaf = self.free.pop()
        *self.parts, self.brought = self.views_of[id(self.leaf)]
        self.missing = set(range(len(self.params)))

    def fill(self, number: int) -> None:
        """Take one parameter's gradient, and let go of the original."""
        grad = self.params[number].grad
        assert grad is not None
        self.parts[number].copy_(grad)
        self.params[number].grad = None
        self.missing.discard(number)

    def fill_rest(self) -> list[torch.nn.Parameter]:
        """Take the gradients that are left, all at once, and zeros where there are none. Returns
        who had one.
        """
        if len(self.missing) == len(self.params):
            every = [param.grad for param in self.params if param.grad is not None]
            if len(every) == len(self.params):
                torch._foreach_copy_(self.parts, every)
                for param in self.params:
                    param.grad = None
                self.missing.clear()
                return self.params
        had, parts, grads = [], [], []
        for number in self.missing:
            param, part = self.params[number], self.parts[number]
            if param.grad is None:
                part.zero_()
            else:
                had.append(param)
                parts.append(part)
                grads.append(param.grad)
                param.grad = None
        if had:
            torch._foreach_copy_(parts, grads)
        self.missing.clear()
        return had

    def push(self, microbatch: int) -> None:
        """The leaf is full: add it to the tree."""
        if self.look is not None:
            self.look(self)
        self.free += self.tree.push(Block(microbatch, 1, self.leaf))

    def exchange(self, total: int) -> None:
        """Start sending each rank its slice of this rank's subtrees; in shared memory, all of them."""
        if self.comm.alone:
            return
        world_size = self.comm.world.world_size
        self.sizes, self.pairs = (
            block_sizes_by_rank(total, world_size),
            remaining_additions(total, world_size),
        )
        if self.comm.shared_memory is not None:
            blocks = [block.total for block in self.tree.blocks]
            rows = blocks[0] if len(blocks) == 1 else torch.cat(blocks) if blocks else self.out[:0]
            self.pending = self.comm.combine(
                rows, tuple(map(len, self.sizes)), self.out.numel(), self._fold
            )
            return
        mine = [block.total.view(world_size, self.width) for block in self.tree.blocks]
        # One block needs no copy. Otherwise: for each receiver, its slice of each of our blocks.
        sent = mine[0] if len(mine) == 1 else torch.stack(mine, 1) if mine else self.out[:0]
        self.sent = sent.reshape(-1)  # kept until the exchange is over
        self.received = self.out.new_empty(sum(map(len, self.sizes)) * self.width)
        widths = (
            [len(sizes) * self.width for sizes in self.sizes],
            [len(mine) * self.width] * world_size,
        )
        self.pending = self.comm.all_to_all(self.received, self.sent, *widths)

    def gather(self) -> Pending:
        """Finish the tree for this rank's slice, and start gathering all slices into `out`."""
        if self.comm.alone or self.comm.shared_memory is not None:
            return self.pending
        self.pending.wait()
        self.slice = self.out.new_empty(self.width)
        add_remaining(self.received.split(self.width), self.pairs, self.slice)
        return self.comm.all_gather(self.out, self.slice)

    def _fold(self, parts: list[torch.Tensor], lo: int, hi: int) -> None:
        """Finish the tree for these columns of `out`. parts: all ranks' blocks there, which others
        read too.
        """
        whole = hi - lo == self.out.numel()
        add_remaining(parts, self.pairs, self.out if whole else self.out[lo:hi])

    def close(self) -> None:
        """The step is over: its blocks are free."""
        if self.comm.alone:
            self.out.copy_(self.tree.root())
        self.free += [block.total for block in self.tree.blocks]
        self.tree.blocks.clear()


Look = Callable[[TreeBucket], None]


class ExactSync(Sync):
    """Each microbatch's gradient is copied into a leaf of its bucket; a full one goes into the
    tree.

    In this rank's last microbatch hooks do that, and the bucket's exchange starts while backward
    goes on."""

    def __init__(self, model: torch.nn.Module, comm: Comm, extra_size: int) -> None:
        super().__init__(model, comm)
        parts = make_fixed_buckets(self.params)
        if not parts or parts[-1][0].dtype != torch.float32:  # the extra's
            parts.append([])
        sizes = [0] * (len(parts) - 1) + [extra_size]
        single = torch.zeros(0, device=comm.device)
        self.buckets = [
            TreeBucket(comm, params, params[0].detach() if params else single, size)
            for params, size in zip(parts, sizes, strict=True)
        ]
        self.place = {
            p: (bucket, number) for bucket in self.buckets for number, p in enumerate(bucket.params)
        }
        self.hooks = register_gradient_hooks(self, self._on_gradient)

    def begin(self, first: int, count: int, total: int) -> None:
        super().begin(first, count, total)
        self.microbatch, self.total = first, total
        self.used: set[int] = set()  # by id: to ask for a tensor's hash costs more
        self.next_bucket = 0
        if count:  # else nothing would fill the leaves, and they would be lost
            self._open()

    def _open(self) -> None:
        for bucket in self.buckets:
            bucket.open()

    def backward(self, loss: torch.Tensor, count: float, extra: torch.Tensor | None = None) -> None:
        self._bring(extra)
        super().backward(loss, count)
        for bucket in self.buckets:
            self.used.update(map(id, bucket.fill_rest()))
        self._push_full()
        self.microbatch += 1
        if self.left:
            self.next_bucket = 0
            self._open()

    def _bring(self, extra: torch.Tensor | None) -> None:
        """Before backward, in which the leaf may become full."""
        bucket = self.buckets[-1]
        if extra is not None:
            bucket.brought.copy_(extra)

    def watch(self, look: Look | None) -> None:
        """Call it with each full leaf from now on."""
        for bucket in self.buckets:
            bucket.look = look

    def again(self, loss: torch.Tensor, extra: torch.Tensor, look: Look) -> None:
        """As `backward`, for a microbatch after the step's `finish`: its leaves are looked at, and
        not added.
        """
        kept = [param.grad for param in self.params]
        for param in self.params:
            param.grad = None
        self.left = 2  # so the hooks take nothing
        self._open()
        self._bring(extra)
        super().backward(loss, 0.0)
        self.left = 0
        for bucket in self.buckets:
            bucket.fill_rest()
            look(bucket)
            bucket.free.append(bucket.leaf)
        for param, grad in zip(self.params, kept, strict=True):
            param.grad = grad

    def _on_gradient(self, param: torch.Tensor) -> None:
        if self.left:  # nothing to overlap with: all are copied at once afterwards
            return
        bucket, number = self.place[param]  # type: ignore[index]
        self.used.add(id(param))
        bucket.fill(number)
        self._push_full()

    def _push_full(self) -> None:
        """In the buckets' own order: all ranks must make the same collectives in the same order."""
        while self.next_bucket < len(self.buckets) and not self.buckets[self.next_bucket].missing:
            bucket = self.buckets[self.next_bucket]
            bucket.push(self.microbatch)
            self.next_bucket += 1
            if self.left == 0:
                bucket.exchange(self.total)

    def _used(self) -> list[bool]:
        return [id(param) in self.used for param in self.params]

    def finish(
        self, count: float, votes: list[bool], loss: torch.Tensor | None = None
    ) -> StepResult:
        result = super().finish(count, votes, loss)
        return result._replace(extra=self.buckets[-1].sums)

    def _start(self) -> None:
        for bucket in self.buckets[self.next_bucket :]:
            bucket.exchange(self.total)

    def _complete(self) -> None:
        for pending in [bucket.gather() for bucket in self.buckets]:
            pending.wait()
        for bucket in self.buckets:
            bucket.close()
            for param, view in zip(bucket.params, bucket.views, strict=True):
                param.grad = view

    def _divide(self, count: float) -> None:
        for bucket in self.buckets:
            bucket.gradient.div_(count)

    def close(self) -> None:
        for hook in self.hooks:
            hook.remove()
