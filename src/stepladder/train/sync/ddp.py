"""`--sync ddp`: gradients in flat buckets, reduced while backward still runs (Li et al., VLDB 2020,
section 3.2).

The buckets are our own and fixed from the first step: torch's DistributedDataParallel rebuilds its
buckets after the first backward, so a resumed run adds in another order than an unbroken one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from stepladder.train.comm import Comm, Pending
from stepladder.train.sync.base import Sync

BUCKET_BYTES = 25 * 2**20  # as in DDP: large enough for bandwidth, small enough to overlap
FIRST_BUCKET_BYTES = 2**20  # the first one starts early


def allocate_shared_zeros(comm: Comm, length: int, dtype: torch.dtype) -> torch.Tensor:
    """To reduce again and again: a large vector lies where ranks share memory. All ranks call it,
    in one order.
    """
    shared = (
        comm.shared_memory.allocate_vector(length, dtype)
        if comm.shared_memory is not None
        else None
    )
    return torch.zeros(length, dtype=dtype, device=comm.device) if shared is None else shared


class Bucket:
    """Some parameters' gradients as views of one flat tensor, which one collective reduces."""

    def __init__(self, params: list[torch.nn.Parameter], comm: Comm) -> None:
        self.params = params
        sizes = [p.numel() for p in params]
        self.flat = allocate_shared_zeros(comm, sum(sizes), params[0].dtype)
        self.views = [v.view(p.shape) for v, p in zip(self.flat.split(sizes), params, strict=True)]
        self.filled = [False] * len(params)
        self.pending: Pending | None = None

    def fill_rest(self) -> None:
        """As `fill`, for all that are not filled yet; most often that is all, which are copied at
        once.
        """
        grads = [param.grad for param in self.params if param.grad is not None]
        if len(grads) == len(self.params) and not any(self.filled):
            torch._foreach_copy_(self.views, grads)
            self.filled = [True] * len(grads)
            return
        for number, full in enumerate(self.filled):
            if not full:
                self.fill(number)

    def fill(self, number: int) -> None:
        """Copy one parameter's gradient in, or zeros where it has none, and let go of the original."""
        grad = self.params[number].grad
        if grad is None:
            self.views[number].zero_()
        else:
            self.views[number].copy_(grad)
        self.params[number].grad = None
        self.filled[number] = True


def make_fixed_buckets(params: list[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
    """Parameters in reverse registration order, about the order in which backward completes them."""
    buckets: list[list[torch.nn.Parameter]] = []
    room = 0
    for param in reversed(params):
        size = param.numel() * param.element_size()
        if not buckets or size > room or param.dtype != buckets[-1][0].dtype:
            buckets.append([])
            room = BUCKET_BYTES if len(buckets) > 1 else FIRST_BUCKET_BYTES
        buckets[-1].append(param)
        room -= size
    return buckets


def register_gradient_hooks(sync: Sync, on_gradient: Callable[[torch.Tensor], None]) -> list[Any]:
    """Have it called with each parameter whose gradient is complete, where that brings anything.

    Through shared memory nothing moves during backward. But gradients that were copied need not be
    kept, and of a large model they take memory."""
    small = sum(p.numel() * p.element_size() for p in sync.params) <= FIRST_BUCKET_BYTES
    if sync.comm.alone or (small and sync.comm.shared_memory is not None):
        return []
    return [p.register_post_accumulate_grad_hook(on_gradient) for p in sync.params]


class BucketedSync(Sync):
    """Buckets reduced as soon as they are full, while backward goes on.

    They are launched strictly in their own order, whatever order gradients arrive in: ranks whose
    control flow differs must still make the same collectives in the same order.
    """

    def __init__(self, model: torch.nn.Module, comm: Comm, extra_size: int = 0) -> None:
        super().__init__(model, comm, extra_size)
        self.buckets = [Bucket(params, comm) for params in make_fixed_buckets(self.params)]
        self.place = {p: (b, n) for b in self.buckets for n, p in enumerate(b.params)}
        self.hooks = register_gradient_hooks(self, self._on_gradient)

    def begin(self, first: int, count: int, total: int) -> None:
        super().begin(first, count, total)
        self.next_bucket = 0
        for bucket in self.buckets:
            bucket.filled = [False] * len(bucket.params)

    def _on_gradient(self, param: torch.Tensor) -> None:
        if self.left == 0:  # the last microbatch: this gradient is complete
            bucket, number = self.place[param]  # type: ignore[index]
            bucket.fill(number)
            self._launch_full()

    def _launch_full(self) -> None:
        while self.next_bucket < len(self.buckets) and all(self.buckets[self.next_bucket].filled):
            bucket = self.buckets[self.next_bucket]
            bucket.pending = self.comm.all_reduce(bucket.flat)
            self.next_bucket += 1

    def _used(self) -> list[bool]:
        if not self.hooks:
            return super()._used()
        in_bucket = {p for p, (bucket, number) in self.place.items() if bucket.filled[number]}
        return [p in in_bucket or p.grad is not None for p in self.params]

    def _start(self) -> None:
        for bucket in self.buckets:
            bucket.fill_rest()
        self._launch_full()

    def _complete(self) -> None:
        extra = self.comm.all_reduce(self.extra) if self.extra is not None else Pending(None)
        for bucket in self.buckets:
            assert bucket.pending is not None
            bucket.pending.wait()
            for param, view in zip(bucket.params, bucket.views, strict=True):
                param.grad = view
        extra.wait()

    def _divide(self, count: float) -> None:
        for bucket in self.buckets:
            bucket.flat.div_(count)

    def close(self) -> None:
        for hook in self.hooks:
            hook.remove()
