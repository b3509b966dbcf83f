"""How gradients meet. Every mode turns sums over microbatches into one mean over the global batch.

manual  after backward, one all-reduce per parameter: distributed data parallel by hand.
ddp     flat buckets, reduced while backward still runs (Li et al., VLDB 2020, section 3.2).
exact   a fixed tree over the microbatches, in `exact.py`: the same bits for any number of processes.

The buckets are our own and fixed from the first step: torch's DistributedDataParallel rebuilds its
buckets after the first backward, so a resumed run adds in another order than an unbroken one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from stepladder.train.comm import Comm, Pending

BUCKET_BYTES = 25 * 2**20  # as in DDP: large enough for bandwidth, small enough to overlap
FIRST_BUCKET_BYTES = 2**20  # the first one starts early


class Agreed(NamedTuple):
    """What all ranks know after a step.

    counted: what the loss counted, over all ranks.  wishes: which words some rank voted for.
    extra: the sum over all microbatches of the vectors given to `backward`, or None.
    """

    counted: float
    wishes: list[bool]
    extra: torch.Tensor | None = None


class Sync:
    """One step's gradients: `begin`, `backward` per microbatch, `finish`. Reduces nothing itself.

    After `finish`, every parameter's `.grad` is that of sum / count over the global batch, the same on
    every rank; it is None only where it was None in all microbatches of all ranks.
    """

    def __init__(self, model: torch.nn.Module, comm: Comm, extra_size: int = 0) -> None:
        self.comm = comm
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.extra = torch.zeros(extra_size, device=comm.device) if extra_size else None

    def begin(self, first: int, count: int, total: int) -> None:
        """This rank will compute microbatches first .. first + count - 1 of `total` in this step."""
        self.left = count
        if self.extra is not None:
            self.extra.zero_()

    def backward(self, loss: torch.Tensor, count: float, extra: torch.Tensor | None = None) -> None:
        """Add the gradient of one microbatch's loss sum over `count`, and its `extra`, shape (extra_size,)."""
        self.left -= 1
        loss.backward()
        if self.extra is not None and extra is not None:
            self.extra += extra

    def finish(self, count: float, wishes: list[bool]) -> Agreed:
        """Add over ranks and divide by the global count. wishes: words that ranks vote with."""
        used = self._used()
        self._start()  # before the vote: a rank without samples has started nothing during backward
        control = torch.tensor([count, *wishes, *used], dtype=torch.float64)
        voting = self.comm.all_reduce(control)
        self._complete()
        voting.wait()
        words = control.tolist()
        users = words[1 + len(wishes) :]
        for param, users_of_param in zip(self.params, users, strict=True):
            if users_of_param == 0:
                param.grad = None
        grads = [p.grad for p in self.params if p.grad is not None]
        if grads and words[0]:
            torch._foreach_div_(grads, words[0])
        return Agreed(words[0], [votes > 0 for votes in words[1 : 1 + len(wishes)]], self.extra)

    def _used(self) -> list[bool]:
        return [p.grad is not None for p in self.params]

    def _start(self) -> None:
        """Start what backward has not: all ranks must make the same collectives in the same order."""

    def _complete(self) -> None:
        """Leave the sum over ranks in every parameter's `.grad`, and in `extra`."""

    def close(self) -> None:
        """Take hooks off the model."""


class Alone(Sync):
    """A single process. For one pass the mean is taken in backward itself, which costs nothing."""

    inverse, inverse_of = torch.ones(()), 1.0

    def begin(self, first: int, count: int, total: int) -> None:
        super().begin(first, count, total)
        self.one_pass = total == 1

    def backward(self, loss: torch.Tensor, count: float, extra: torch.Tensor | None = None) -> None:
        if not self.one_pass:
            super().backward(loss, count, extra)
            return
        if count != self.inverse_of or self.inverse.device != loss.device:
            self.inverse, self.inverse_of = torch.tensor(1.0 / count if count else 0.0, device=loss.device), count
        loss.backward(self.inverse)
        if self.extra is not None and extra is not None:
            self.extra += extra

    def finish(self, count: float, wishes: list[bool]) -> Agreed:
        return Agreed(count, wishes, self.extra) if self.one_pass else super().finish(count, wishes)


class Manual(Sync):
    """One all-reduce per parameter after backward, nothing overlapped: what one writes by hand first."""

    def _complete(self) -> None:
        if self.extra is not None:
            self.comm.all_reduce(self.extra).wait()
        for param in self.params:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            self.comm.all_reduce(param.grad).wait()


class Bucket:
    """Some parameters' gradients as views of one flat tensor, which one collective reduces."""

    def __init__(self, params: list[torch.nn.Parameter]) -> None:
        self.params = params
        sizes = [p.numel() for p in params]
        self.flat = torch.zeros(sum(sizes), dtype=params[0].dtype, device=params[0].device)
        self.views = [v.view(p.shape) for v, p in zip(self.flat.split(sizes), params, strict=True)]
        self.filled = [False] * len(params)
        self.pending: Pending | None = None

    def fill(self, number: int) -> None:
        """Copy one parameter's gradient in, or zeros where it has none, and let go of the original."""
        grad = self.params[number].grad
        if grad is None:
            self.views[number].zero_()
        else:
            self.views[number].copy_(grad)
        self.params[number].grad = None
        self.filled[number] = True


def fixed_buckets(params: list[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
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


class Bucketed(Sync):
    """Buckets reduced as soon as they are full, while backward goes on.

    They are launched strictly in their own order, whatever order gradients arrive in: ranks whose
    control flow differs must still make the same collectives in the same order.
    """

    def __init__(self, model: torch.nn.Module, comm: Comm, extra_size: int = 0) -> None:
        super().__init__(model, comm, extra_size)
        self.buckets = [Bucket(params) for params in fixed_buckets(self.params)]
        self.place = {p: (b, n) for b in self.buckets for n, p in enumerate(b.params)}
        self.hooks = [p.register_post_accumulate_grad_hook(self._on_gradient) for p in self.params]

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
        in_bucket = {p for p, (bucket, number) in self.place.items() if bucket.filled[number]}
        return [p in in_bucket or p.grad is not None for p in self.params]

    def _start(self) -> None:
        for bucket in self.buckets:
            for number, full in enumerate(bucket.filled):
                if not full:
                    bucket.fill(number)
        self._launch_full()

    def _complete(self) -> None:
        extra = self.comm.all_reduce(self.extra) if self.extra is not None else Pending(None)
        for bucket in self.buckets:
            assert bucket.pending is not None
            bucket.pending.wait()
            for param, view in zip(bucket.params, bucket.views, strict=True):
                param.grad = view
        extra.wait()

    def close(self) -> None:
        for hook in self.hooks:
            hook.remove()
