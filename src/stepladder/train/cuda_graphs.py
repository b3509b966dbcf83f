"""`--capture`: the passes of full length as CUDA graphs, recorded once, forward and backward, and
replayed.

A small model's step is mostly calls of kernels that take less time than the call. A graph is one
call. It replays kernels on the memory that they were recorded with: batches are copied in, and what
lies in its memory is written anew by each replay. `torch.cuda.make_graphed_callables` records;
hooks, exchange and optimizer stay outside."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from stepladder.core.errors import InputError, to_one_line
from stepladder.core.plan import Span
from stepladder.core.settings import Settings
from stepladder.data.sources import Source, TensorSource
from stepladder.rank.torch_fixes import tree_map
from stepladder.train.compile_loss import Loss, compile_loss
from stepladder.train.return_values import LOSS_HINT, make_error

WITHOUT_CAPTURE = "leave --capture out"


def validate_capturable(source: Source, device: torch.device) -> None:
    """Raises InputError where nothing can be recorded: on a CPU, or while a thread moves data to
    the GPU.
    """
    if device.type != "cuda":
        raise InputError(
            f"--capture with --device {device.type}: it records what a CUDA GPU does",
            WITHOUT_CAPTURE,
        )
    if not isinstance(source, TensorSource):
        raise InputError(
            "--capture: the job's data are read while it trains",
            f"tensors in memory, or {WITHOUT_CAPTURE}",
        )


def make_loss_programs(loss: Loss, settings: Settings, passes: list[Span]) -> dict[int, Loss]:
    """What computes passes in place of `loss`, by their length. passes: of a step, a full one
    first.
    """
    if not passes or not (settings.compile or settings.capture):
        return {}
    if settings.compile:
        loss = compile_loss(loss, settings.sync == "exact")
    return {len(passes[0]): CapturedLoss(loss) if settings.capture else loss}


class CapturedLoss:
    """A job's loss for batches of one form: recorded at the first call, replayed from then on.

    A count that is a number stays what it was at the first call; one that is a tensor is computed
    each time."""

    program: Any = None  # a graph of the forward pass, and its backward's

    def __init__(self, loss: Loss) -> None:
        self.loss = loss

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        """As `loss` returns it. Raises InputError where it cannot be recorded."""
        if self.program is None:
            self.params = [param for param in model.parameters() if param.requires_grad]
            self.program, self.count = record_pass(self.loss, model, batch)
        self._keep_gradients()
        # They lie in the graph's memory, and may be read after the next replay.
        total, *counts = [result.clone() for result in self.program(batch)]
        if self.count is None:
            return total
        return total, *(counts or [self.count])

    def _keep_gradients(self) -> None:
        """What an earlier pass of the step has left in `.grad` may be the graph's memory too
        (pytorch #181723).

        To that this pass adds, so it has to be a copy. From the next pass on it is one.
        """
        grads = [param for param in self.params if param.grad is not None]
        if not grads:
            self.is_first = True
        elif self.is_first:
            self.is_first = False
            for param in grads:
                param.grad = param.grad.clone()  # type: ignore[union-attr]


class RecordableLoss(nn.Module):
    """A job's loss as a module that returns tensors only. count: what else the loss returned; None
    for nothing.
    """

    def __init__(self, loss: Loss, model: nn.Module) -> None:
        super().__init__()
        self.loss, self.model = loss, model
        self.count: Any = None
        # Of its own, for the backward pass is recorded in the same block, and has no part in it; a
        # graph would keep what a cache held when it was recorded.
        mixed, dtype = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        self.autocast = torch.autocast("cuda", dtype, enabled=mixed, cache_enabled=False)

    def forward(self, batch: Any) -> tuple[torch.Tensor, ...]:
        with self.autocast:
            result = self.loss(self.model, batch)
        if isinstance(result, torch.Tensor):
            return (result,)
        if not (
            isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], torch.Tensor)
        ):
            raise make_error("loss", result, LOSS_HINT)
        total, self.count = result
        if isinstance(self.count, torch.Tensor):
            return total, self.count.detach()
        return (total,)


def record_pass(loss: Loss, model: nn.Module, batch: Any) -> tuple[Any, Any]:
    """What replays the pass for another batch of this form, and what `loss` returned as count.

    The loss runs four times for it. Buffers and random numbers are afterwards as they were.
    """
    before = [buffer.clone() for buffer in model.buffers()]
    state = torch.cuda.get_rng_state()
    module, sample = RecordableLoss(loss, model), tree_map(torch.clone, batch)
    try:
        with torch.autocast("cuda", enabled=False):
            program = torch.cuda.make_graphed_callables(module, (sample,), allow_unused_input=True)
    except RuntimeError as error:
        raise_if_capture_failed(error)
        raise
    with torch.no_grad():
        for buffer, value in zip(model.buffers(), before, strict=True):
            buffer.copy_(value)
    torch.cuda.set_rng_state(state)
    return program, module.count


def raise_if_capture_failed(error: BaseException) -> None:
    """Raises InputError where the recording is what has failed; an error of the loss itself stays
    what it is.
    """
    first = error.__context__ or error  # the end of a recording that has failed is an error too
    if any("captur" in str(one) for one in (error, first)):
        found = to_one_line(str(first).partition("\n")[0])
        hint = (
            "a loss that reads no number of a tensor (.item(), int(), print, if), or "
            + WITHOUT_CAPTURE
        )
        raise InputError(f"--capture: the loss cannot be recorded ({found})", hint) from error
