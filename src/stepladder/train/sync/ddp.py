"""`--sync ddp`: gradients in flat buckets that are reduced while backward still runs.

The method is described by Li et al., VLDB 2020, section 3.2. The buckets here never change, unlike
those of torch's DistributedDataParallel, which rebuilds its buckets after the first backward: a
resumed run would then add in a different order than an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from stepladder.train.comm import Comm
from stepladder.train.pending import Pending
from stepladder.train.sync.base import Sync

BUCKET_BYTES = 25 * 2**20  # as in DDP: large enough for bandwidth, small enough to overlap
FIRST_BUCKET_BYTES = 2**20  # small, so that its all-reduce starts early


def allocate_shared_zeros(comm: Comm, length: int, dtype: torch.dtype) -> Tensor:
    """Return a vector of zeros, in memory that the ranks share if it is large enough to profit.

    It is for a vector that is reduced in every step. All ranks must call this function, in the same
    order, since they allocate the same part of the shared memory.
    """
    vector = None
    if comm.shared_memory is not None:
        vector = comm.shared_memory.allocate_vector(length, dtype)
    if vector is None:
        return torch.zeros(length, dtype=dtype, device=comm.device)
    return vector


def copy_gradients(targets: list[Tensor], grads: list[Tensor]) -> None:
    """Copy gradients into dense tensors; those of `Embedding(sparse=True)` become dense."""
    try:
        torch._foreach_copy_(targets, grads)
    except RuntimeError:  # NotImplementedError is one
        if not any(grad.is_sparse for grad in grads):
            raise
        torch._foreach_copy_(targets, [grad.to_dense() for grad in grads])


class _Bucket:
    """The gradients of some parameters, as views of one flat tensor that one all-reduce adds."""

    def __init__(self, params: list[nn.Parameter], comm: Comm) -> None:
        self.params = params
        sizes = [param.numel() for param in params]
        self.flat = allocate_shared_zeros(comm, sum(sizes), params[0].dtype)
        parts = zip(self.flat.split(sizes), params, strict=True)
        self.views = [part.view(param.shape) for part, param in parts]
        self.filled = [False] * len(params)
        self.pending: Pending | None = None

    def fill_missing(self) -> None:
        """Copy the gradients that have not been copied yet, in one call if these are all."""
        grads = [param.grad for param in self.params if param.grad is not None]
        if len(grads) == len(self.params) and not any(self.filled):
            copy_gradients(self.views, grads)
            self.filled = [True] * len(grads)
            return
        for index, is_filled in enumerate(self.filled):
            if not is_filled:
                self.fill(index)

    def fill(self, index: int) -> None:
        """Copy one parameter's gradient, or zeros if there is none, and free the original."""
        grad = self.params[index].grad
        if grad is None:
            self.views[index].zero_()
        else:
            copy_gradients([self.views[index]], [grad])
        self.params[index].grad = None
        self.filled[index] = True


def make_fixed_buckets(params: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group parameters in reverse order: roughly the order in which backward finishes gradients."""
    buckets: list[list[nn.Parameter]] = []
    free_bytes = 0
    for param in reversed(params):
        size = param.numel() * param.element_size()
        if not buckets or size > free_bytes or param.dtype != buckets[-1][0].dtype:
            buckets.append([])
            free_bytes = BUCKET_BYTES if len(buckets) > 1 else FIRST_BUCKET_BYTES
        buckets[-1].append(param)
        free_bytes -= size
    return buckets


def register_gradient_hooks(sync: Sync, on_gradient: Callable[[Tensor], None]) -> list[Any]:
    """Call a function with each parameter as soon as its gradient is complete, where that helps.

    It lets gradients be sent while backward still runs. Shared memory sends nothing during
    backward, but there each copied gradient can be freed, which matters for a large model.

    Returns:
        The handles of the hooks; empty if the hooks would not help.
    """
    size = sum(param.numel() * param.element_size() for param in sync.params)
    is_small = size <= FIRST_BUCKET_BYTES
    if sync.comm.alone or (is_small and sync.comm.shared_memory is not None):
        return []
    return [param.register_post_accumulate_grad_hook(on_gradient) for param in sync.params]


class BucketedSync(Sync):
    """Reduces each bucket as soon as it is full, while backward computes the other gradients.

    Buckets are reduced strictly from the first to the last, in whatever order they become full:
    ranks whose control flow differs must still call the same collectives in the same order.
    """

    def __init__(self, model: nn.Module, comm: Comm, extra_size: int = 0) -> None:
        super().__init__(model, comm, extra_size)
        self.buckets = [_Bucket(params, comm) for params in make_fixed_buckets(self.params)]
        self.bucket_and_index = {
            param: (bucket, index)
            for bucket in self.buckets
            for index, param in enumerate(bucket.params)
        }
        self.next_bucket = 0
        self.hooks = register_gradient_hooks(self, self._on_gradient)

    def begin(self, first: int, count: int, total: int) -> None:
        """Begin a step with empty buckets."""
        super().begin(first, count, total)
        self.next_bucket = 0
        for bucket in self.buckets:
            bucket.filled = [False] * len(bucket.params)

    def _on_gradient(self, param: Tensor) -> None:
        if self.microbatches_left == 0:  # the last microbatch: this gradient is complete
            bucket, index = self.bucket_and_index[param]  # type: ignore[index]
            bucket.fill(index)
            self._start_full_buckets()

    def _start_full_buckets(self) -> None:
        while self.next_bucket < len(self.buckets) and all(self.buckets[self.next_bucket].filled):
            bucket = self.buckets[self.next_bucket]
            bucket.pending = self.comm.all_reduce(bucket.flat)
            self.next_bucket += 1

    def _has_gradient(self) -> list[bool]:
        if not self.hooks:
            return super()._has_gradient()
        copied = {
            param
            for param, (bucket, index) in self.bucket_and_index.items()
            if bucket.filled[index]
        }
        return [param in copied or param.grad is not None for param in self.params]

    def _start_missing_exchanges(self) -> None:
        for bucket in self.buckets:
            bucket.fill_missing()
        self._start_full_buckets()

    def _wait_for_sums(self) -> None:
        extra = Pending(None) if self.extra is None else self.comm.all_reduce(self.extra)
        for bucket in self.buckets:
            assert bucket.pending is not None
            bucket.pending.wait()
            for param, view in zip(bucket.params, bucket.views, strict=True):
                param.grad = view
        extra.wait()

    def _divide_gradients(self, count: float) -> None:
        for bucket in self.buckets:
            bucket.flat.div_(count)
