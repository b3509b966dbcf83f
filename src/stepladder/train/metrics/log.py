"""What a run writes while it trains: metrics.jsonl, timing.jsonl, scalars for TensorBoard and others, progress.

Losses stay tensors until a flush, so a step never waits for a number. A flush is a collective (losses
and times are added over ranks in one all-reduce); ranks agree on when.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from stepladder.core.errors import InputError
from stepladder.storage.rundir import METRICS, TIMING
from stepladder.train.comm import Comm
from stepladder.train.metrics.loggers import Logger
from stepladder.train.metrics.progress import Progress

RING = 1000  # a flush comes after a second at the latest; what it costs by itself is shared by more steps
SECONDS_BETWEEN_SCALARS = 0.5  # a TensorBoard event costs a millisecond, metrics.jsonl has every step
PHASES = ("data", "compute", "wait", "optimizer", "snapshot")


# One step, not yet written: step, epoch, loss (this rank's sum, or everybody's if `whole`), counted, lr. A plain
# tuple, made once per step and taken apart hundreds at a time.
Row = tuple[int, int, torch.Tensor | None, float, float]


class StepLog:
    """The ring of steps and who reads it. Files are written by rank 0 alone.

    loggers: who gets scalars besides TensorBoard.  epoch_loss, epoch_count: sums over the current epoch so far,
    for its mean loss.
    """

    def __init__(
        self, run_dir: Path, comm: Comm, progress: Progress, whole_losses: bool, loggers: Sequence[Logger] = ()
    ) -> None:
        self.comm, self.progress, self.whole, self.loggers = comm, progress, whole_losses, list(loggers)
        self.rows: list[Row] = []
        self.times = [0.0] * len(PHASES)
        self.epoch_loss, self.epoch_count = 0.0, 0.0
        self.last_flush = perf_counter()
        self.last_scalars = 0.0
        self.scalars: Logger | None = None
        if comm.world.is_first:
            self.metrics = (run_dir / METRICS).open("a")
            self.timing = (run_dir / TIMING).open("a")
            self.tensorboard = run_dir / "tensorboard"

    @property
    def full(self) -> bool:
        return len(self.rows) >= RING

    def is_due(self, now: float) -> bool:
        """Whether a person watching has waited long enough."""
        return now - self.last_flush > 1.0

    def flush(self) -> None:
        """Write the ring. Raises InputError at the first loss that is not finite. A collective."""
        self.last_flush = perf_counter()
        if not self.rows:
            return
        steps, epochs, tensors, counts, rates = zip(*self.rows, strict=True)
        self.rows.clear()
        losses, times = self._gather(tensors)
        self.times[:] = [0.0] * len(PHASES)
        for loss in losses.tolist():  # one by one: when the ring was flushed must not change the sum's bits
            self.epoch_loss += loss
        self.epoch_count += sum(counts)
        means = losses / np.maximum(counts, 1)
        finite = int(np.isfinite(means).cumprod().sum())  # how many before the first that is not
        if self.comm.world.is_first:
            self._write_steps(steps[:finite], epochs, means.tolist(), rates)
            self._write_times(steps[-1], len(steps), times)
            self._show(steps[-1], means, rates[-1])
        if finite < len(steps):
            raise InputError(
                f"the loss of step {steps[finite]} is {means[finite]}",
                "a smaller --lr or --warmup-steps N; the last good snapshot is kept",
            )

    def _gather(self, tensors: tuple[torch.Tensor | None, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Losses over all ranks, shape (steps,), and seconds per rank and phase, shape (world_size, phases)."""
        zero = torch.zeros((), device=self.comm.device)
        mine = torch.stack([zero if loss is None else loss for loss in tensors]).double().cpu().numpy()
        if self.whole and not self.comm.world.is_first:
            mine = np.zeros_like(mine)
        times = np.zeros((self.comm.world.world_size, len(PHASES)))
        times[self.comm.world.rank] = self.times
        both = self.comm.sum(np.concatenate([mine, times.reshape(-1)]))
        return both[: len(mine)], both[len(mine) :].reshape(times.shape)

    def _write_steps(self, steps: Any, epochs: Any, means: list[float], rates: Any) -> None:
        lines = [
            f'{{"step": {step}, "epoch": {epoch}, "loss": {mean!r}, "lr": {rate!r}}}\n'
            for step, epoch, mean, rate in zip(steps, epochs, means, rates, strict=False)
        ]
        self.metrics.write("".join(lines))
        self.metrics.flush()

    def _write_times(self, step: int, count: int, times: np.ndarray) -> None:
        for rank, seconds in enumerate(times.tolist()):
            line = {"step": step, "steps": count, "rank": rank}
            line |= {name: round(s, 6) for name, s in zip(PHASES, seconds, strict=True)}
            self.timing.write(json.dumps(line) + "\n")
        self.timing.flush()

    def _show(self, step: int, means: np.ndarray, rate: float) -> None:
        if perf_counter() - self.last_scalars > SECONDS_BETWEEN_SCALARS:
            self.last_scalars = perf_counter()
            self._log(step, {"train/loss": float(means.mean()), "train/lr": rate})
        self.progress.update(step, float(means[-1]))

    def evaluation(self, step: int, epoch: int, metrics: dict[str, float]) -> None:
        """One line for an evaluation after `step`."""
        if self.comm.world.is_first:
            self.metrics.write(json.dumps({"step": step, "epoch": epoch, **metrics}) + "\n")
            self.metrics.flush()
            self._log(step, {f"eval/{name}": value for name, value in metrics.items() if name != "train_loss"})
            self.progress.evaluated(step, epoch, metrics)

    def mean_loss(self) -> float:
        """Of the current epoch so far, at the last flush."""
        return self.epoch_loss / self.epoch_count if self.epoch_count else math.nan

    def next_epoch(self) -> None:
        """Begin the mean of another epoch."""
        self.epoch_loss, self.epoch_count = 0.0, 0.0

    def _log(self, step: int, values: dict[str, float]) -> None:
        if self.scalars is None:  # imported late: it costs 0.2 s, and a short run may never flush
            from stepladder.train.metrics.tensorboard import Scalars

            self.scalars = Scalars(self.tensorboard)
            self.loggers.append(self.scalars)
        for logger in self.loggers:
            logger.log(step, values)

    def close(self) -> None:
        """Write what is left in buffers and end the display."""
        if self.comm.world.is_first:
            self.progress.close()
            self.metrics.close()
            self.timing.close()
            for logger in self.loggers:
                logger.close()
