"""`--capture`: the passes of full length as CUDA graphs, which are recorded once and then replayed.

A step of a small model is mostly launches of kernels that take less time than the launch. A graph,
with the forward and the backward pass, is launched at once. It replays the kernels on the memory
with which they were recorded: batches are copied into it, and each replay overwrites its results.
`torch.cuda.make_graphed_callables` records; hooks, exchange and optimizer are not in the graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from stepladder.core.errors import InputError, to_one_line
from stepladder.core.plan import Span
from stepladder.core.settings import Settings
from stepladder.data.sources import BatchSource, TensorSource
from stepladder.rank.torch_fixes import tree_map
from stepladder.train.compile_loss import Loss, compile_loss
from stepladder.train.return_values import LOSS_HINT, make_error

WITHOUT_CAPTURE = "leave --capture out"


def validate_capturable(source: BatchSource, device: torch.device) -> None:
    """Raise InputError if there is no GPU, or if a thread moves data to the GPU during training."""
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
    """Return the compiled or captured loss for passes of the full length.

    Args:
        loss: The job's loss.
        settings: Tell whether the loss is compiled, captured, or both.
        passes: The passes of a step, beginning with one of the full length.

    Returns:
        The functions that replace the loss, by the length of the pass; empty without --compile and
        --capture.
    """
    if not passes or not (settings.compile or settings.capture):
        return {}
    program = loss
    if settings.compile:
        program = compile_loss(program, settings.sync == "exact")
    if settings.capture:
        program = CapturedLoss(program)
    return {len(passes[0]): program}


class CapturedLoss:
    """A job's loss for batches of one shape, recorded at the first call and replayed afterwards.

    A count that the loss returns as a number stays as at the first call; a count that is a tensor
    is computed in each replay.
    """

    def __init__(self, loss: Loss) -> None:
        self.loss = loss
        self.program: Any = None  # the graphs of the forward and the backward pass
        self.count: Any = None  # what the loss counted at the first call; None if it does not count
        self.params: list[nn.Parameter] = []
        self.grads_are_in_graph = False

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        """Return what the loss returns.

        Raises:
            InputError: The loss cannot be recorded.
        """
        if self.program is None:
            self.params = [param for param in model.parameters() if param.requires_grad]
            self.program, self.count = _record_pass(self.loss, model, batch)
        self._move_gradients_out()
        # The results lie in the graph's memory, and may be read after the next replay.
        total, *counts = [result.clone() for result in self.program(batch)]
        if self.count is None:
            return total
        return total, *(counts or [self.count])

    def _move_gradients_out(self) -> None:
        """Copy the gradients of the step's first pass out of the graph's memory.

        `.grad` may be that memory (pytorch #181723), and the next pass adds to `.grad` while the
        graph overwrites it. After the second pass `.grad` is memory of its own.
        """
        params = [param for param in self.params if param.grad is not None]
        if not params:
            self.grads_are_in_graph = True
        elif self.grads_are_in_graph:
            self.grads_are_in_graph = False
            for param in params:
                param.grad = param.grad.clone()  # type: ignore[union-attr]


class _RecordableLoss(nn.Module):
    """A job's loss as a module that returns only tensors, as make_graphed_callables needs it."""

    def __init__(self, loss: Loss, model: nn.Module) -> None:
        super().__init__()
        self.loss = loss
        self.model = model
        self.count: Any = None  # what the loss returned besides the sum, if anything
        # An autocast of its own: make_graphed_callables records the backward pass in the same
        # block, which must not be in the autocast. Without cache, since a graph would keep what
        # the cache held when it was recorded.
        is_mixed = torch.is_autocast_enabled("cuda")
        dtype = torch.get_autocast_dtype("cuda")
        self.autocast = torch.autocast("cuda", dtype, enabled=is_mixed, cache_enabled=False)

    def forward(self, batch: Any) -> tuple[Tensor, ...]:
        """Return the loss sum, and the count if that is a tensor."""
        with self.autocast:
            result = self.loss(self.model, batch)
        if isinstance(result, Tensor):
            return (result,)
        is_pair = isinstance(result, tuple) and len(result) == 2
        if not is_pair or not isinstance(result[0], Tensor):
            raise make_error("loss", result, LOSS_HINT)
        total, self.count = result
        if isinstance(self.count, Tensor):
            return total, self.count.detach()
        return (total,)


def _record_pass(loss: Loss, model: nn.Module, batch: Any) -> tuple[Any, Any]:
    """Record the forward and backward pass of a batch.

    The loss runs four times. Buffers and random numbers are restored afterwards.

    Args:
        loss: The job's loss.
        model: The model.
        batch: A batch of the shape to record.

    Returns:
        A function that replays the pass for another batch of this shape, and what the loss returned
        as its count.

    Raises:
        InputError: The loss cannot be recorded, for example because it reads a number of a tensor.
        RuntimeError: The loss itself has failed.
    """
    buffers_before = [buffer.clone() for buffer in model.buffers()]
    rng_state = torch.cuda.get_rng_state()
    module = _RecordableLoss(loss, model)
    sample = tree_map(torch.clone, batch)
    try:
        with torch.autocast("cuda", enabled=False):
            program = torch.cuda.make_graphed_callables(module, (sample,), allow_unused_input=True)
    except RuntimeError as error:
        raise_if_capture_failed(error)
        raise
    with torch.no_grad():
        for buffer, value in zip(model.buffers(), buffers_before, strict=True):
            buffer.copy_(value)
    torch.cuda.set_rng_state(rng_state)
    return program, module.count


def raise_if_capture_failed(error: BaseException) -> None:
    """Raise InputError if the recording has failed, and not the loss itself."""
    first = error.__context__ or error  # ending a failed recording raises a second error
    if any("captur" in str(candidate) for candidate in (error, first)):
        reason = to_one_line(str(first).partition("\n")[0])
        raise InputError(
            f"--capture: the loss cannot be recorded ({reason})",
            "a loss that reads no number of a tensor (.item(), int(), print, if), or "
            + WITHOUT_CAPTURE,
        ) from error
