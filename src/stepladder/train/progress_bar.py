"""The display of a training run on the terminal of the first rank."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from stepladder.core.console import LossyStream, is_terminal, make_printable, wrap_lines, write_text
from stepladder.core.terminal import make_console

PLAIN_LINE_INTERVAL_S = 10.0


class ProgressBar:
    """Shows steps, loss and speed on stderr: as a bar on a terminal, else as plain lines.

    Args:
        is_shown: Whether anything is shown; on the first rank only.
        num_steps: Steps of the whole run.
        first_step: Steps done by earlier attempts.
        unit: What the speed counts, such as "samples".
    """

    def __init__(self, is_shown: bool, num_steps: int, first_step: int, unit: str) -> None:
        self.num_steps = num_steps
        self.unit = unit
        self.done = 0.0
        self.start_time = time.monotonic()
        self.last_line_time = self.start_time
        self.stream: TextIO | None = None
        if is_shown:
            self.stream = sys.stderr
        self.bar: Progress | None = None
        if self.stream is not None and is_terminal(self.stream):
            self.bar = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TimeRemainingColumn(),
                TextColumn("loss {task.fields[loss]:.4f}"),
                TextColumn("{task.fields[speed]:,.0f} " + f"{make_printable(unit)}/s"),
                console=make_console(file=LossyStream(self.stream)),  # the terminal may be closed
                transient=True,
            )
            self.bar.add_task("", total=num_steps, completed=first_step, loss=0.0, speed=0.0)
            self.bar.start()

    def update(self, step: int, loss: float, done: float) -> None:
        """Show that the steps up to `step` are done.

        Args:
            step: The last step.
            loss: Its mean loss.
            done: How many units were trained since the last call.
        """
        self.done += done
        now = time.monotonic()
        speed = self.done / max(now - self.start_time, 1e-9)
        if self.bar is not None:
            task = self.bar.task_ids[0]
            self.bar.update(task, completed=step, loss=loss, speed=speed)
        elif self.stream is not None and now - self.last_line_time > PLAIN_LINE_INTERVAL_S:
            self._show_line(
                f"step {step}/{self.num_steps}  loss {loss:.4f}  {speed:,.0f} {self.unit}/s"
            )

    def show_evaluation(self, step: int, epoch: int, metrics: dict[str, float]) -> None:
        """Show the metrics after the last step of an epoch, counted from 0."""
        values = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        self._show_line(f"epoch {epoch + 1} done, step {step}/{self.num_steps}  {values}")

    def close(self) -> None:
        """Remove the bar from the terminal."""
        if self.bar is not None:
            self.bar.stop()

    def _show_line(self, text: str) -> None:
        self.last_line_time = time.monotonic()
        if self.bar is not None and self.stream is not None:
            text = wrap_lines(make_printable(text), self.stream)
            self.bar.console.print(text, highlight=False, markup=False, soft_wrap=True)
        else:
            write_text(text, self.stream)
