"""What a run writes while it trains: metrics.jsonl, timing.jsonl, the ledger, scalars for loggers,
progress.

Losses stay tensors until a flush, so a step never waits for a number. A flush is a collective
(losses and times are added over ranks in one all-reduce); ranks agree on when."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from time import perf_counter
from typing import Any, TextIO

import numpy as np
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from stepladder.core.console import is_terminal, printable, show
from stepladder.core.errors import InputError, placing
from stepladder.core.jsonl import open_to_append
from stepladder.core.terminal import rich_console
from stepladder.rank.progress import TIMING_KEYS
from stepladder.rank.timing import timing_line
from stepladder.storage.ledger import Ledger
from stepladder.storage.rundir import METRICS, TIMING
from stepladder.train.comm import Comm
from stepladder.train.metrics.loggers import Logger, SafeLogger, TensorBoard
from stepladder.train.run_spec import RunSpec
from stepladder.train.state import TrainState

# a flush comes after a second at the latest; what it costs by itself is shared by more steps
MAX_PENDING_ROWS = 1000
FLUSH_INTERVAL_S = 1.0  # a person may be watching
LINE_INTERVAL_S = 10.0
SCALARS_INTERVAL_S = 0.5  # other loggers ask a server; metrics.jsonl has every step

# One step, not yet written: step, epoch, loss (this rank's sum, or everybody's by microbatch),
# counted, lr, the gradient's norm. A plain tuple, made once per step and taken apart hundreds at a
# time.
Loss = torch.Tensor | float | None
Row = tuple[int, int, Loss, float, float, torch.Tensor | None]


class Recorder:
    """The steps that are done and not yet written, and who reads them. Each rank has its ledger;
    all other files are rank 0's.

    state: its step and its sums over the epoch are moved here.  loggers: who gets scalars besides
    TensorBoard."""

    def __init__(
        self,
        spec: RunSpec,
        comm: Comm,
        state: TrainState,
        ledger: Ledger,
        loggers: Sequence[Logger] = (),
    ) -> None:
        self.spec, self.comm, self.state, self.ledger = spec, comm, state, ledger
        curves = partial(TensorBoard, spec.settings.run_dir / "tensorboard")
        self.loggers = [*loggers, SafeLogger("tensorboard", curves, {}, lambda: None)]
        self.rows: list[Row] = []
        self.whole = (
            spec.by_microbatch or comm.device.type == "cpu"
        )  # the losses given are over all ranks
        self.last_flush = perf_counter()
        self.last_scalars = 0.0
        shown = spec.settings.progress and comm.world.is_first
        self.progress = ProgressBar(shown, spec.num_steps, state.step, spec.job.unit)
        self.files: dict[str, TextIO] = {}  # of the first rank, by their names
        if comm.world.is_first:
            self.open_files()

    def open_files(self) -> None:
        """Those of the first rank, to add to them."""
        folder = self.spec.settings.run_dir
        for name in (METRICS, TIMING):
            with placing(folder / name):
                self.files[name] = os.fdopen(open_to_append(folder / name), "a", encoding="utf-8")

    def close_files(self) -> None:
        """Also where this rank has none yet."""
        for name, file in self.files.items():
            with placing(self.spec.settings.run_dir / name):
                file.close()

    def _add(self, name: str, text: str) -> None:
        """Write a text to the end of one of the files, out of this process."""
        with placing(self.spec.settings.run_dir / name):
            self.files[name].write(text)
            self.files[name].flush()

    def take_over(self, loggers: Sequence[Logger]) -> None:
        """Write what the first rank writes, from now on."""
        self.loggers[:0] = loggers
        shown = self.spec.settings.progress
        self.progress = ProgressBar(shown, self.spec.num_steps, self.state.step, self.spec.job.unit)

    def record_samples(self, indices: list[Any]) -> None:
        """This rank's part of the next step is computed. indices: of the data set, as its batches
        held them.

        Before the ranks meet, and out of this process where there are others: a step that some rank
        has done is in the ledger of each, whichever is killed next."""
        step = self.state.step
        self.ledger.record(step + 1, self.spec.plan.epoch_of_step(step), indices)
        if not self.comm.alone:
            self.ledger.flush()

    def step(self, loss: Loss, counted: float, lr: float, norm: torch.Tensor | None = None) -> None:
        """A step is done. loss: the sum over everybody's samples, on a GPU in one pass over this
        rank's; shape ().

        counted: what the loss counts, over all ranks.  norm: of the gradient, shape ().
        """
        state = self.state
        epoch = self.spec.plan.epoch_of_step(state.step)
        state.step += 1
        self.rows.append((state.step, epoch, loss, counted, lr, norm))

    @property
    def is_full(self) -> bool:
        return len(self.rows) >= MAX_PENDING_ROWS

    def is_flush_due(self, now: float) -> bool:
        """Whether a person watching has waited long enough."""
        return now - self.last_flush > FLUSH_INTERVAL_S

    def flush(self, durable: bool = False) -> None:
        """Write what was recorded. durable: the ledger past the operating system's cache. A
        collective.

        Raises InputError at the first loss that is not finite.
        """
        self.last_flush = perf_counter()
        if self.rows:
            self._write_rows()
        self.ledger.flush(lasting=durable)

    def _write_rows(self) -> None:
        steps, epochs, tensors, counts, rates, tensor_norms = zip(*self.rows, strict=True)
        self.rows.clear()
        losses, times = self._gather(tensors)
        for loss in (
            losses.tolist()
        ):  # one by one: when the ring was flushed must not change the sum's bits
            self.state.epoch_loss += loss
        self.state.epoch_count += sum(counts)
        means = losses / np.where(np.array(counts) > 0, counts, np.nan)
        finite = int(np.isfinite(means).cumprod().sum())  # how many before the first that is not
        if self.comm.world.is_first:
            norms = read_norms(tensor_norms)
            self._write_steps(
                steps[:finite], epochs, zip(means.tolist(), rates, norms, strict=True)
            )
            self._write_times(steps[-1], len(steps), times)
            if perf_counter() - self.last_scalars > SCALARS_INTERVAL_S:
                self.last_scalars = perf_counter()
                told = {} if norms[-1] is None else {"train/grad_norm": norms[-1]}
                self._log({"train/loss": float(means.mean()), "train/lr": rates[-1], **told})
            in_samples = self.spec.job.unit == "samples"
            done = len(steps) * self.spec.plan.global_batch if in_samples else sum(counts)
            self.progress.update(steps[-1], float(means[-1]), done)
        if finite < len(steps):
            if not counts[finite] > 0:
                found = (
                    f"the loss of step {steps[finite]} counts {counts[finite]:g}, over all ranks"
                )
                raise InputError(
                    found, "loss(model, batch) -> (sum, count), where count is above 0"
                )
            raise InputError(
                f"the loss of step {steps[finite]} is {means[finite]}",
                "a smaller --lr or --warmup-steps N; the last good snapshot is kept",
            )

    def _gather(self, tensors: tuple[Loss, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Losses over all ranks, shape (steps,), and seconds per rank and key, shape (world_size,
        keys).
        """
        if self.comm.device.type == "cpu":
            mine = np.array([0.0 if loss is None else float(loss) for loss in tensors])
        else:  # all at once
            zero = torch.zeros((), device=self.comm.device)
            losses = torch.stack(
                [loss if isinstance(loss, torch.Tensor) else zero for loss in tensors]
            )
            mine = losses.double().cpu().numpy()
        if self.whole and not self.comm.world.is_first:
            mine = np.zeros_like(mine)
        times = np.zeros((self.comm.world.world_size, len(TIMING_KEYS)))
        times[self.comm.world.rank] = self.comm.phases.take_seconds()
        both = self.comm.sum(np.concatenate([mine, times.reshape(-1)]))
        return both[: len(mine)], both[len(mine) :].reshape(times.shape)

    def _write_steps(
        self, steps: Any, epochs: Any, values: Iterable[tuple[float, float, float | None]]
    ) -> None:
        lines = [
            f'{{"step": {step}, "epoch": {epoch}, "loss": {mean!r}, "lr": {rate!r}'
            + ("}\n" if norm is None else f', "grad_norm": {norm!r}}}\n')
            for step, epoch, (mean, rate, norm) in zip(steps, epochs, values, strict=False)
        ]
        self._add(METRICS, "".join(lines))

    def _write_times(self, step: int, count: int, times: np.ndarray) -> None:
        self._add(TIMING, json.dumps(timing_line(step, count, times)) + "\n")

    def end_epoch(self) -> None:
        """The mean loss of an epoch whose steps are all flushed, and a line for it and the state's
        metrics.
        """
        state = self.state
        state.train_loss = state.epoch_loss / state.epoch_count if state.epoch_count else math.nan
        epoch = self.spec.plan.epoch_of_step(state.step - 1)
        if self.comm.world.is_first:
            values = {"train_loss": state.train_loss, **state.metrics}
            self._add(METRICS, json.dumps({"step": state.step, "epoch": epoch, **values}) + "\n")
            self._log(
                {f"eval/{name}": value for name, value in values.items() if name != "train_loss"}
            )
            self.progress.evaluated(state.step, epoch, values)
        if state.step % self.spec.plan.steps_per_epoch == 0:
            state.epoch_loss, state.epoch_count = 0.0, 0.0

    def _log(self, values: dict[str, float]) -> None:
        for logger in self.loggers:
            logger.log(self.state.step, values)

    def close(self) -> None:
        """Write what is left in buffers and end the display; each of them, though one before has
        failed.
        """
        with ExitStack() as at_end:
            at_end.callback(self.ledger.close)
            if self.files:  # the first rank's
                for logger in self.loggers:
                    at_end.callback(logger.close)
                at_end.callback(self.progress.close)
                at_end.callback(self.close_files)


def read_norms(tensors: Sequence[torch.Tensor | None]) -> list[float | None]:
    """Of the gradients, all read at once; None where there is none, or none that JSON could say."""
    known = [norm for norm in tensors if norm is not None]
    read = iter(torch.stack(known).tolist() if known else [])
    found = [None if norm is None else next(read) for norm in tensors]
    return [norm if norm is not None and math.isfinite(norm) else None for norm in found]


class ProgressBar:
    """Steps, loss and speed on stderr: a bar on a terminal, elsewhere plain lines. Rank 0 only."""

    def __init__(self, shown: bool, num_steps: int, start: int, unit: str) -> None:
        self.num_steps, self.unit, self.done = num_steps, unit, 0.0
        self.began = self.last_line = time.monotonic()
        self.stream: TextIO | None = sys.stderr if shown else None
        self.bar: Progress | None = None
        if is_terminal(self.stream):
            self.bar = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TimeRemainingColumn(),
                TextColumn("loss {task.fields[loss]:.4f}"),
                TextColumn("{task.fields[speed]:,.0f} " + f"{printable(unit)}/s"),
                console=rich_console(file=self.stream),
                transient=True,
            )
            self.task = self.bar.add_task("", total=num_steps, completed=start, loss=0.0, speed=0.0)
            self.bar.start()

    def update(self, step: int, loss: float, done: float) -> None:
        """Steps up to `step` are done; `loss` is the last one's mean. done: samples, or of another
        unit, since the last call."""
        self.done += done
        speed = self.done / max(time.monotonic() - self.began, 1e-9)
        if self.bar:
            self.bar.update(self.task, completed=step, loss=loss, speed=speed)
        elif self.stream and time.monotonic() - self.last_line > LINE_INTERVAL_S:
            self._line(f"step {step}/{self.num_steps}  loss {loss:.4f}  {speed:,.0f} {self.unit}/s")

    def evaluated(self, step: int, epoch: int, metrics: dict[str, float]) -> None:
        values = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        self._line(f"epoch {epoch + 1} done, step {step}/{self.num_steps}  {values}")

    def _line(self, text: str) -> None:
        self.last_line = time.monotonic()
        if self.bar:
            self.bar.console.print(printable(text), highlight=False, markup=False)
        else:
            show(text, self.stream)

    def close(self) -> None:
        if self.bar:
            self.bar.stop()
