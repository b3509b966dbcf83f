"""What a run writes while it trains: metrics.jsonl, timing.jsonl, the ledger, logged scalars.

Losses stay tensors until a flush, so no step waits for a number. A flush is a collective: losses
and times are added over ranks in one all-reduce. The ranks vote on when to flush.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from time import perf_counter
from typing import Any, TextIO

import numpy as np
import torch
from torch import Tensor

from stepladder.core.errors import InputError, name_file_in_errors
from stepladder.core.jsonl import format_line, open_for_append
from stepladder.rank.progress import TIMING_KEYS
from stepladder.rank.timing import make_timing_line
from stepladder.storage.ledger import Ledger
from stepladder.storage.run_files import METRICS_FILE, TIMING_FILE
from stepladder.train.comm import Comm
from stepladder.train.metrics.loggers import Logger, SafeLogger, TensorBoard
from stepladder.train.optimizers import Rate
from stepladder.train.progress_bar import ProgressBar
from stepladder.train.run_spec import RunSpec
from stepladder.train.state import TrainState

# A flush comes after a second at the latest. With more steps in it, its own cost is spread thinner.
MAX_PENDING_ROWS = 1000
FLUSH_INTERVAL_S = 1.0  # a person may be watching
SCALARS_INTERVAL_S = 0.5  # other loggers ask a server; metrics.jsonl has every step

Loss = Tensor | float | None
# One step that is not yet written: step, epoch, loss (a sum of this rank, or of all ranks), what
# the loss counts, learning rate, norm of the gradient. A plain tuple, since one is made in every
# step.
Row = tuple[int, int, Loss, float, Rate, Tensor | None]


class Recorder:
    """Keeps the steps that are done and not yet written, and writes them.

    Each rank has its own ledger. All other files are written by the first rank.

    Args:
        spec: The run.
        comm: The ranks that train it.
        state: Its step and its sums over the epoch are advanced here.
        ledger: Records which samples this rank trains.
        loggers: Get scalars besides TensorBoard.
    """

    def __init__(
        self,
        spec: RunSpec,
        comm: Comm,
        state: TrainState,
        ledger: Ledger,
        loggers: Sequence[Logger] = (),
    ) -> None:
        self.spec = spec
        self.comm = comm
        self.state = state
        self.ledger = ledger
        folder = spec.settings.run_dir / "tensorboard"
        tensorboard = SafeLogger("tensorboard", partial(TensorBoard, folder), {}, lambda: None)
        self.loggers = [*loggers, tensorboard]
        self.rows: list[Row] = []
        self.epoch = 0  # that of the step under way
        # Whether the recorded losses are sums over all ranks, not over this rank's samples alone.
        self.losses_are_global = spec.by_microbatch or comm.device.type == "cpu"
        self.last_flush_time = perf_counter()
        self.last_scalars_time = 0.0
        self.progress_bar = self._make_progress_bar()
        self.files: dict[str, TextIO] = {}  # by name; on the first rank only
        if comm.world.is_first:
            self.open_files()

    # -- files of the first rank -------------------------------------------------------------------

    def open_files(self) -> None:
        """Open the first rank's files, to append to them."""
        for name in (METRICS_FILE, TIMING_FILE):
            path = self.spec.settings.run_dir / name
            with name_file_in_errors(path):
                self.files[name] = os.fdopen(open_for_append(path), "a", encoding="utf-8")

    def close_files(self) -> None:
        """Close the first rank's files, as far as they are open."""
        for name, file in self.files.items():
            with name_file_in_errors(self.spec.settings.run_dir / name):
                file.close()

    def take_over(self, loggers: Sequence[Logger]) -> None:
        """Become the recorder of the first rank, in place of a first rank that was lost."""
        self.loggers[:0] = loggers
        self.progress_bar = self._make_progress_bar()

    def _make_progress_bar(self) -> ProgressBar:
        is_shown = self.spec.settings.progress and self.comm.world.is_first
        return ProgressBar(is_shown, self.spec.num_steps, self.state.step, self.spec.job.unit)

    def _append(self, name: str, text: str) -> None:
        """Append text to one of the files, past this process's buffer."""
        with name_file_in_errors(self.spec.settings.run_dir / name):
            self.files[name].write(text)
            self.files[name].flush()

    # -- recording ---------------------------------------------------------------------------------

    def record_samples(self, indices: list[Any]) -> None:
        """Record which samples this rank has computed for the step under way.

        This comes before the collective of the step, and with several ranks leaves this process at
        once. So a step that any rank has done is in the ledger of every rank, whichever is killed
        next.

        Args:
            indices: Of the data set, an array per batch.
        """
        step = self.state.step
        self.epoch = self.spec.plan.epoch_of_step(step)
        self.ledger.record_step(step + 1, self.epoch, indices)
        if not self.comm.alone:
            self.ledger.flush()

    def record_step(
        self, loss: Loss, count: float, learning_rate: Rate, norm: Tensor | None = None
    ) -> None:
        """Record a step as done.

        Args:
            loss: The sum over the samples of all ranks, shape (). On a GPU with one pass per rank,
                the sum over this rank's samples.
            count: What the loss counts, over all ranks.
            learning_rate: Of the first group of parameters. A tensor is one that nobody changes.
            norm: Of the gradient, shape ().
        """
        step = self.state.advance()
        self.rows.append((step, self.epoch, loss, count, learning_rate, norm))

    @property
    def is_full(self) -> bool:
        """Whether so many steps are recorded that they must be written."""
        return len(self.rows) >= MAX_PENDING_ROWS

    def is_flush_due(self, now: float) -> bool:
        """Return whether a person who watches has waited long enough for new lines."""
        return now - self.last_flush_time > FLUSH_INTERVAL_S

    # -- in-place recovery -------------------------------------------------------------------------

    @property
    def last_written_step(self) -> int:
        """The last step that is in metrics.jsonl."""
        return self.rows[0][0] - 1 if self.rows else self.state.step

    def replace_rows(self, rows: list[Row]) -> None:
        """Replace the steps that are not yet written."""
        self.rows = list(rows)

    def rows_as_numbers(self) -> list[Row]:
        """Return the steps that are not yet written, with each loss as a number."""
        rows: list[Row] = []
        for step, epoch, loss, count, rate, norm in self.rows:
            number = 0.0 if loss is None else float(loss)
            rows.append((step, epoch, number, count, rate, norm))
        return rows

    # -- writing -----------------------------------------------------------------------------------

    def flush(self, durable: bool = False) -> None:
        """Write the recorded steps. A collective.

        Args:
            durable: Whether the ledger must be on disk afterwards.

        Raises:
            InputError: At the first loss or learning rate that is not finite.
        """
        self.last_flush_time = perf_counter()
        if self.rows:
            self._write_rows()
        self.ledger.flush(fsync=durable)

    def _write_rows(self) -> None:
        steps, epochs, losses, counts, stored_rates, norms = zip(*self.rows, strict=True)
        self.rows.clear()
        rates = list(map(float, stored_rates))
        loss_sums, seconds = self._sum_over_ranks(losses)
        self.state.add_to_epoch(loss_sums.tolist(), counts)
        means = loss_sums / np.where(np.array(counts) > 0, counts, np.nan)
        is_finite = np.isfinite(means) & np.isfinite(rates)
        num_finite = int(is_finite.cumprod().sum())  # before the first that is not finite
        if self.comm.world.is_first:
            norm_values = _read_norms(norms)
            lines = _step_lines(steps[:num_finite], epochs, means, rates, norm_values)
            self._append(METRICS_FILE, lines)
            timing = make_timing_line(steps[-1], len(steps), seconds)
            self._append(TIMING_FILE, format_line(timing))
            self._log_scalars(float(means.mean()), rates[-1], norm_values[-1])
            done = sum(counts)
            if self.spec.job.unit == "samples":
                done = len(steps) * self.spec.plan.global_batch
            self.progress_bar.update(steps[-1], float(means[-1]), done)
        if num_finite < len(steps):
            raise _loss_error(
                steps[num_finite], means[num_finite], counts[num_finite], rates[num_finite]
            )

    def _sum_over_ranks(self, losses: Sequence[Loss]) -> tuple[np.ndarray, np.ndarray]:
        """Return losses and times of all ranks, added in one all-reduce.

        Returns:
            Losses over all ranks, shape (steps,), and seconds, shape (world_size, TIMING_KEYS).
        """
        world = self.comm.world
        if self.losses_are_global and not world.is_first:
            own_losses = np.zeros(len(losses))
        else:
            own_losses = _read_losses(losses, self.comm.device)
        seconds = np.zeros((world.world_size, len(TIMING_KEYS)))
        seconds[world.rank] = self.comm.phases.take_seconds()
        sums = self.comm.sum(np.concatenate([own_losses, seconds.reshape(-1)]))
        loss_sums, all_seconds = np.split(sums, [len(losses)])
        return loss_sums, all_seconds.reshape(seconds.shape)

    def _log_scalars(self, loss: float, learning_rate: float, norm: float | None) -> None:
        """Log one point of the training curves, unless the last one is too recent."""
        now = perf_counter()
        if now - self.last_scalars_time <= SCALARS_INTERVAL_S:
            return
        self.last_scalars_time = now
        values = {"train/loss": loss, "train/lr": learning_rate}
        if norm is not None:
            values["train/grad_norm"] = norm
        self._log(values)

    def end_epoch(self) -> None:
        """Write the mean loss and the metrics of an epoch, or of a run's last steps.

        All steps of the epoch must be flushed before.
        """
        state = self.state
        state.set_train_loss()
        epoch = self.spec.plan.epoch_of_step(state.step - 1)
        if self.comm.world.is_first:
            values = {"train_loss": state.train_loss, **state.metrics}
            line = {"step": state.step, "epoch": epoch, **values}
            self._append(METRICS_FILE, format_line(line))
            self._log({f"eval/{name}": value for name, value in state.metrics.items()})
            self.progress_bar.show_evaluation(state.step, epoch, values)
        if state.step % self.spec.plan.steps_per_epoch == 0:
            state.clear_epoch()

    def _log(self, values: dict[str, float]) -> None:
        for logger in self.loggers:
            logger.log(self.state.step, values)

    def close(self) -> None:
        """Close files, loggers and display, each of them even if another one fails."""
        with ExitStack() as at_end:
            at_end.callback(self.ledger.close)
            if self.files:  # on the first rank
                for logger in self.loggers:
                    at_end.callback(logger.close)
                at_end.callback(self.progress_bar.close)
                at_end.callback(self.close_files)


def _read_losses(losses: Sequence[Loss], device: torch.device) -> np.ndarray:
    """Return losses as numbers, shape (steps,). On a GPU all are read at once, in one wait."""
    if device.type == "cpu":
        return np.array([float(loss) if loss is not None else 0.0 for loss in losses])
    zero = torch.zeros((), device=device)
    tensors = [loss if isinstance(loss, Tensor) else zero for loss in losses]
    stacked = torch.stack(tensors)
    return stacked.double().cpu().numpy()


def _read_norms(norms: Sequence[Tensor | None]) -> list[float | None]:
    """Return norms as numbers, read at once. None for no norm, or one that JSON cannot express."""
    tensors = [norm for norm in norms if norm is not None]
    values = iter(torch.stack(tensors).tolist() if tensors else [])
    numbers: list[float | None] = []
    for norm in norms:
        number = math.nan if norm is None else next(values)
        numbers.append(number if math.isfinite(number) else None)
    return numbers


def _step_lines(
    steps: Sequence[int],
    epochs: Sequence[int],
    means: np.ndarray,
    rates: Sequence[float],
    norms: Sequence[float | None],
) -> str:
    """Return a line of metrics.jsonl for each of `steps`, without json.dumps, which is slower."""
    lines = []
    rows = zip(steps, epochs, means.tolist(), rates, norms, strict=False)
    for step, epoch, mean, rate, norm in rows:
        line = f'"step": {step}, "epoch": {epoch}, "loss": {mean!r}, "lr": {rate!r}'
        if norm is not None:
            line += f', "grad_norm": {norm!r}'
        lines.append(f"{{{line}}}\n")
    return "".join(lines)


def _loss_error(step: int, mean: float, count: float, rate: float) -> InputError:
    """Return the error for a step whose mean loss or learning rate is not a finite number."""
    if not math.isfinite(rate):
        return InputError(
            f"the learning rate of step {step} is {rate}", "a schedule that returns finite rates"
        )
    if not count > 0:
        return InputError(
            f"the loss of step {step} counts {count:g}, over all ranks",
            "loss(model, batch) -> (sum, count), where count is above 0",
        )
    return InputError(
        f"the loss of step {step} is {mean}",
        "a smaller --lr or --warmup-steps N; a snapshot that is there is kept",
    )
