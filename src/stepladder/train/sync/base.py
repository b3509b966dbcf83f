"""The base of all values of `--sync`: it turns sums over microbatches into one mean gradient.

manual  after backward, one all-reduce per parameter: distributed data parallel by hand.
ddp     flat buckets, reduced while backward still runs (Li et al., VLDB 2020, section 3.2).
exact   a fixed tree over the microbatches, in `exact.py`: the same bits for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stepladder.rank.torch_fixes import make_backward
from stepladder.train.comm import Comm
from stepladder.train.fingerprints import fingerprint

Backward = Callable[[Tensor, float, Tensor | None], None]  # `Sync.backward`
run_backward = make_backward()


class StepResult(NamedTuple):
    """What all ranks know after a step.

    Args:
        total_count: What the loss counts, added over all ranks.
        votes: For each question, whether any rank voted yes.
        extra: The sum over all microbatches of the vectors given to `backward`, or None.
        loss: The loss added over all ranks; on a GPU or without other ranks, the loss given to
            `finish`, since reading it would wait for the GPU. Shape ().
    """

    total_count: float
    votes: list[bool]
    extra: Tensor | None = None
    loss: Tensor | float | None = None


class Sync:
    """One step's gradients: call `begin`, then `backward` per microbatch, then `finish`.

    After `finish`, every parameter's `.grad` is the gradient of the loss sum over the global batch,
    divided by what the loss counts, and is the same on every rank. It is None only if it was None
    in all microbatches of all ranks. This base class reduces nothing itself.
    """

    def __init__(self, model: torch.nn.Module, comm: Comm, extra_size: int = 0) -> None:
        self.comm = comm
        self.params = [param for param in model.parameters() if param.requires_grad]
        self.microbatches_left = 0  # microbatches of this rank that are to come in this step
        self.hooks: list[Any] = []  # of the model or its parameters, for `close`
        self.extra: Tensor | None = None
        if extra_size:
            self.extra = torch.zeros(extra_size, dtype=torch.float32, device=comm.device)

    def begin(self, first: int, count: int, total: int) -> None:
        """Begin a step in which this rank computes some microbatches.

        Args:
            first: The number of this rank's first microbatch.
            count: How many microbatches this rank computes.
            total: How many microbatches all ranks compute.
        """
        self.microbatches_left = count
        if self.extra is not None:
            self.extra.zero_()

    def backward(self, loss: Tensor, count: float, extra: Tensor | None = None) -> None:
        """Add the gradient of one microbatch.

        Args:
            loss: The loss sum over the samples, shape ().
            count: What the loss counts.
            extra: Values to add over all microbatches in the same way as the gradient, such as the
                loss and the statistics of batch norm; shape (extra_size,), or () for one value.
        """
        self.microbatches_left -= 1
        run_backward(loss)
        if self.extra is not None and extra is not None:
            self.extra += extra

    def finish(self, count: float, votes: list[bool], loss: Tensor | None = None) -> StepResult:
        """Add the gradients over the ranks and divide them by the global count.

        Args:
            count: What the loss counts in this rank's microbatches.
            votes: This rank's yes or no to each question.
            loss: The loss sum of this rank's microbatches, shape ().

        Returns:
            What all ranks know after the step.
        """
        has_gradient = self._has_gradient()
        # This comes before the vote, so that all ranks call their collectives in the same order: a
        # rank without samples has started none during backward.
        self._start_missing_exchanges()
        is_on_cpu = self.comm.device.type == "cpu"
        loss_value = float(loss) if is_on_cpu and loss is not None else 0.0
        call_order = self._digest_calls()
        voting, sums = self.comm.start_sum([count, *votes, *has_gradient, *call_order, loss_value])
        self._wait_for_sums()
        voting.wait()
        results = sums()
        total_count = results[0]
        users_begin = 1 + len(votes)
        users_end = users_begin + len(has_gradient)
        users = results[users_begin:users_end]  # per parameter, the ranks that have a gradient
        self._validate_call_order(results[users_end:-1])
        if 0.0 in users:
            for param, user_count in zip(self.params, users, strict=True):
                if user_count == 0:
                    param.grad = None
        if total_count:
            self._divide_gradients(total_count)
        agreed = [votes_for > 0 for votes_for in results[1:users_begin]]
        return StepResult(total_count, agreed, self.extra, results[-1] if is_on_cpu else loss)

    def hash_gradients(self, loss: Tensor) -> bytes:
        """Return a hash of the gradients of a loss; b"" if they cannot be computed here.

        This takes the memory of one more gradient of each weight. With --shard full all ranks must
        call this method, and the hash is of this rank's gradients as they are before the exchange.
        """
        with suppress(RuntimeError):  # reentrant checkpoints have gradients by backward alone
            gradients = torch.autograd.grad(loss, self.params, allow_unused=True)
            return fingerprint([fingerprint(gradient) for gradient in gradients])
        return b""

    def _has_gradient(self) -> list[bool]:
        return [param.grad is not None for param in self.params]

    def _digest_calls(self) -> list[float]:
        """Return numbers whose sums over the ranks show whether all have called the same blocks."""
        return []

    def _validate_call_order(self, sums: list[float]) -> None:
        """Raise InputError, on all ranks, if the sums of `_digest_calls` show different calls."""

    def _start_missing_exchanges(self) -> None:
        """Start what backward has not started, in the same order on all ranks."""

    def _wait_for_sums(self) -> None:
        """Leave the sum over the ranks in every parameter's `.grad`, and in `extra`."""

    def _divide_gradients(self, count: float) -> None:
        """Divide the sum in every parameter's `.grad` by what it counts."""
        if grads := [param.grad for param in self.params if param.grad is not None]:
            torch._foreach_div_(grads, count)

    def close(self) -> None:
        """Remove the hooks from the model."""
        for hook in self.hooks:
            hook.remove()


class SingleProcessSync(Sync):
    """One process without exchange; if a step has one microbatch, backward computes the mean."""

    def __init__(self, model: torch.nn.Module, comm: Comm, extra_size: int = 0) -> None:
        super().__init__(model, comm, extra_size)
        self.has_one_microbatch = False
        self.inverse_count = torch.ones(())
        self.inverted_count = 1.0  # the count whose inverse `inverse_count` is

    def begin(self, first: int, count: int, total: int) -> None:
        """Begin a step of `total` microbatches."""
        super().begin(first, count, total)
        self.has_one_microbatch = total == 1

    def backward(self, loss: Tensor, count: float, extra: Tensor | None = None) -> None:
        """Add the gradient of one microbatch, or compute the mean if it is the only one."""
        if not self.has_one_microbatch:
            super().backward(loss, count, extra)
            return
        if count != self.inverted_count or self.inverse_count.device != loss.device:
            inverse = 1.0 / count if count else 0.0
            self.inverse_count = torch.tensor(inverse, device=loss.device)
            self.inverted_count = count
        run_backward(loss, self.inverse_count)
        if self.extra is not None and extra is not None:
            self.extra += extra

    def finish(self, count: float, votes: list[bool], loss: Tensor | None = None) -> StepResult:
        """Return the step's result; divide the gradients unless backward has done so."""
        if self.has_one_microbatch:
            return StepResult(count, votes, self.extra, loss)
        return super().finish(count, votes, loss)
