"""Progress on a terminal as a bar, elsewhere as plain lines. Rank 0 only."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

SECONDS_BETWEEN_LINES = 10.0


class ProgressBar:
    """Shows steps, loss and speed. `stream` is stderr by default: stdout is for results."""

    def __init__(self, shown: bool, num_steps: int, start: int, samples_per_step: int) -> None:
        self.num_steps, self.samples_per_step = num_steps, samples_per_step
        self.began, self.start, self.last_line = time.monotonic(), start, time.monotonic()
        self.stream: TextIO | None = sys.stderr if shown else None
        self.bar: Progress | None = None
        if self.stream and self.stream.isatty():
            self.bar = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TimeRemainingColumn(),
                TextColumn("loss {task.fields[loss]:.4f}"),
                TextColumn("{task.fields[speed]:,.0f} samples/s"),
                console=Console(file=self.stream),
                transient=True,
            )
            self.task = self.bar.add_task("", total=num_steps, completed=start, loss=0.0, speed=0.0)
            self.bar.start()

    def samples_per_second(self, step: int) -> float:
        return (step - self.start) * self.samples_per_step / max(time.monotonic() - self.began, 1e-9)

    def update(self, step: int, loss: float) -> None:
        """Steps up to `step` are done; `loss` is the last one's mean."""
        if self.bar:
            self.bar.update(self.task, completed=step, loss=loss, speed=self.samples_per_second(step))
        elif self.stream and time.monotonic() - self.last_line > SECONDS_BETWEEN_LINES:
            self._line(
                f"step {step}/{self.num_steps}  loss {loss:.4f}  {self.samples_per_second(step):,.0f} samples/s"
            )

    def evaluated(self, step: int, epoch: int, metrics: dict[str, float]) -> None:
        values = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        self._line(f"epoch {epoch + 1} done, step {step}/{self.num_steps}  {values}")

    def _line(self, text: str) -> None:
        self.last_line = time.monotonic()
        if self.bar:
            self.bar.console.print(text, highlight=False)
        elif self.stream:
            print(text, file=self.stream, flush=True)

    def close(self) -> None:
        if self.bar:
            self.bar.stop()
