"""How gradients meet: what every mode has in common. A mode turns sums over microbatches into one
mean.

manual  after backward, one all-reduce per parameter: distributed data parallel by hand.
ddp     flat buckets, reduced while backward still runs (Li et al., VLDB 2020, section 3.2).
exact   a fixed tree over the microbatches, in `tree.py`: the same bits for any number of processes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from stepladder.rank.torch_fixes import make_backward
from stepladder.train.comm import Comm

backward = make_backward()
Backward = Callable[[torch.Tensor, float, torch.Tensor | None], None]  # as `Sync.backward`


class StepResult(NamedTuple):
    """What all ranks know after a step.

    counted: what the loss counted, over all ranks.  votes: which of the questions some rank said
    yes to. extra: the sum over all microbatches of the vectors given to `backward`, or None.  loss:
    what was given, over all ranks, or this rank's on a GPU, where to read it would wait for all
    that is under way, and alone; shape ()."""

    total_count: float
    votes: list[bool]
    extra: torch.Tensor | None = None
    loss: torch.Tensor | float | None = None


class Sync:
    """One step's gradients: `begin`, `backward` per microbatch, `finish`. Reduces nothing itself.

    After `finish`, every parameter's `.grad` is that of sum / count over the global batch, the same
    on every rank; it is None only where it was None in all microbatches of all ranks."""

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
        """Add the gradient of one microbatch's loss sum over `count`, and its `extra`, shape
        (extra_size,), or () for one."""
        self.left -= 1
        backward(loss)
        if self.extra is not None and extra is not None:
            self.extra += extra

    def finish(
        self, count: float, votes: list[bool], loss: torch.Tensor | None = None
    ) -> StepResult:
        """Add over ranks and divide by the global count. votes: this rank's yes or no to each
        question.
        """
        used = self._used()
        self._start()  # before the vote: a rank without samples has started nothing during backward
        on_host = self.comm.device.type == "cpu"
        told = float(loss) if on_host and loss is not None else 0.0
        order = self._order()
        voting, sums = self.comm.start_sum([count, *votes, *used, *order, told])
        self._complete()
        voting.wait()
        words = sums()
        first = 1 + len(votes)
        users = words[first : first + len(used)]
        self._refuse_other_order(words[first + len(used) : -1])
        if 0.0 in users:
            for param, users_of_param in zip(self.params, users, strict=True):
                if users_of_param == 0:
                    param.grad = None
        if words[0]:
            self._divide(words[0])
        yes = [said > 0 for said in words[1 : 1 + len(votes)]]
        return StepResult(words[0], yes, self.extra, words[-1] if on_host else loss)

    def _used(self) -> list[bool]:
        return [p.grad is not None for p in self.params]

    def _order(self) -> list[float]:
        """Return what tells, added over ranks, whether all have called the same blocks; [] for no
        such check.
        """
        return []

    def _refuse_other_order(self, sums: list[float]) -> None:
        """Raise InputError, on all ranks, where the sums of `_order` tell that ranks have called
        other blocks.
        """

    def _start(self) -> None:
        """Start what backward has not: all ranks must make the same collectives in the same order."""

    def _complete(self) -> None:
        """Leave the sum over ranks in every parameter's `.grad`, and in `extra`."""

    def _divide(self, count: float) -> None:
        """The sums by what they count, in every parameter's `.grad`."""
        if grads := [p.grad for p in self.params if p.grad is not None]:
            torch._foreach_div_(grads, count)

    def close(self) -> None:
        """Take hooks off the model."""


class SingleProcessSync(Sync):
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
            self.inverse, self.inverse_of = (
                torch.tensor(1.0 / count if count else 0.0, device=loss.device),
                count,
            )
        backward(loss, self.inverse)
        if self.extra is not None and extra is not None:
            self.extra += extra

    def finish(
        self, count: float, votes: list[bool], loss: torch.Tensor | None = None
    ) -> StepResult:
        if self.one_pass:
            return StepResult(count, votes, self.extra, loss)
        return super().finish(count, votes, loss)
