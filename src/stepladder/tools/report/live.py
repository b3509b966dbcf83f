"""`stepladder watch`: show a run's progress in the terminal.

It reads only the files of the run, so it works on any machine that has them. For a batch job it
also asks Slurm for the job's state.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.live import Live
from rich.text import Text

from stepladder.core.console import make_printable
from stepladder.core.numbers import format_count
from stepladder.launcher.batch.cluster import open_cluster
from stepladder.launcher.batch.jobs import CLUSTER_POLL_INTERVAL_S, find_job
from stepladder.storage.run_files import CONFIG_FILE
from stepladder.tools.report.record import RunReader, RunRecord
from stepladder.tools.report.script_record import ScriptRecord, ScriptRunReader, is_script_run
from stepladder.tools.report.series import Curve

SPARKLINE_BLOCKS = "▁▂▃▄▅▆▇█"
MAX_SPARKLINE_LENGTH = 40
RUN_POLL_INTERVAL_S = 1.0
SILENT_S = 30.0  # a thousand ranks write every 16 s
JOB_NUMBER = re.compile(r"[0-9]{1,16}(_[0-9]{1,9})?")  # array tasks have an index


class _RunView(NamedTuple):
    """The lines to show, and whether they will not change any more."""

    lines: list[str]
    is_final: bool


def watch(target: str, once: bool, console: Console) -> None:
    """Show a run until it has finished, or a batch job until it has ended; or show it once.

    The target is a run directory or a job number. Raises InputError if it is neither.
    """
    if JOB_NUMBER.fullmatch(target) and not Path(target).exists():
        follow = cache(Follower)
        updates = _poll_repeatedly(lambda: _poll_job(target, follow), CLUSTER_POLL_INTERVAL_S)
    else:
        updates = _poll_repeatedly(Follower(Path(target)).poll, RUN_POLL_INTERVAL_S)
    _show(updates, once, console)


def _poll_repeatedly(poll: Callable[[], _RunView], interval_s: float) -> Iterator[list[str]]:
    """Yield the lines of each poll, up to the final one."""
    while True:
        lines, is_final = poll()
        yield [make_printable(line) for line in lines]
        if is_final:
            return
        time.sleep(interval_s)


class Follower:
    """Follows the run in a run directory; each poll reads only what is new.

    When another run has replaced it in the directory, the new run is read from its begin.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._reader: RunReader | ScriptRunReader | None = None
        self._config_identity: tuple[int, int] | None = None

    def poll(self) -> _RunView:
        """Return the view of the run. It is final with a job's result, or a script's launchers."""
        config_identity = self._get_config_identity()
        if self._reader is None or config_identity != self._config_identity:
            make_reader = ScriptRunReader if is_script_run(self.run_dir) else RunReader
            self._reader = make_reader(self.run_dir)
            self._config_identity = config_identity
        record = self._reader.read()
        if isinstance(record, ScriptRecord):
            return _RunView(describe_script(record), not record.is_running)
        return _RunView(describe(record), record.result is not None)

    def _get_config_identity(self) -> tuple[int, int] | None:
        with suppress(OSError):
            status = (self.run_dir / CONFIG_FILE).stat()
            return status.st_ino, status.st_mtime_ns
        return None


def _poll_job(number: str, follow: Callable[[Path], Follower]) -> _RunView:
    """Return a batch job's state in the queue, and the view of its run.

    Other scripts have the last line of their output in place of a run.
    """
    job = find_job(open_cluster(), number)
    run_dir = Path(job.job_dir)
    is_job_run = job.job_dir != "" and (run_dir / CONFIG_FILE).is_file()
    lines = [job.describe()]
    if is_job_run or (job.job_dir and is_script_run(run_dir)):
        lines += follow(run_dir).poll().lines
    if not is_job_run:
        with suppress(OSError):  # there is no output while the job waits in the queue
            output = Path(job.output).read_text(errors="replace", encoding="utf-8").splitlines()
            lines += [line for line in output if line.strip()][-1:]
    return _RunView(lines, job.is_over)


def _show(updates: Iterator[list[str]], once: bool, console: Console) -> None:
    """Show the updates in place in a terminal; elsewhere print lines when they change."""
    if once:
        updates = islice(updates, 1)
    if once or not console.is_terminal:
        shown: list[str] = []
        for lines in updates:
            if lines != shown:
                console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)
            shown = lines
        return
    first = next(updates)  # an InputError comes before the display begins
    with Live(Text("\n".join(first)), console=console, refresh_per_second=4) as live:
        for lines in updates:
            live.update(Text("\n".join(lines)))


def describe(record: RunRecord) -> list[str]:
    metrics = record.metrics
    lines = [_describe_position(record, _describe_epoch(record))]
    if metrics.losses.newest is not None:
        lines.append(f"loss {metrics.losses.newest[1]:.4g}  {_draw_sparkline(metrics.losses)}")
    if metrics.last_evaluation:
        values = "  ".join(f"{name} {value:.4g}" for name, value in metrics.last_evaluation.items())
        lines.append(f"evaluated after step {metrics.evaluated_step}: {values}")
    if record.times.speeds.newest is not None:
        samples_per_s = record.times.speeds.newest[1] * record.plan.global_batch
        lines.append(f"{samples_per_s:.0f} samples per second")
    return lines + record.times.describe_stragglers() + record.warnings


def _describe_epoch(record: RunRecord) -> str:
    if record.result:
        return "finished"
    epoch = record.metrics.step // record.plan.steps_per_epoch + 1
    if not record.is_running:
        return f"epoch {epoch} (not running)"
    return f"epoch {epoch}"


def describe_script(record: ScriptRecord) -> list[str]:
    lines = [_describe_position(record, record.state)]
    speeds = record.times.speeds
    if speeds.newest is not None:
        lines.append(f"{speeds.newest[1]:.3g} steps per second  {_draw_sparkline(speeds)}")
    return lines + record.times.describe_stragglers() + record.warnings


def _describe_position(record: RunRecord | ScriptRecord, state: str) -> str:
    if record.is_running and 0 < record.last_write < time.time() - SILENT_S:
        # The time of day: what is printed again when it changes must not count seconds.
        state += time.strftime(", no step since %H:%M:%S", time.localtime(record.last_write))
    starts = record.starts
    world_size = starts[-1].world_size if starts else 0
    return (
        f"{record.name}: {record.progress}, {state},"
        f" {format_count(world_size, 'process')}, {format_count(len(starts), 'start')}"
    )


def _draw_sparkline(curve: Curve) -> str:
    """Return the curve as one line of blocks, each the mean of a part, from minimum to maximum."""
    values = [value for _, value in curve.points]
    length = min(len(values), MAX_SPARKLINE_LENGTH)
    means = [float(part.mean()) for part in np.array_split(values, length)]
    lo = min(means)
    hi = max(means)
    if hi <= lo:
        return SPARKLINE_BLOCKS[0] * length
    heights = [int((mean - lo) / (hi - lo) * 7.999) for mean in means]
    return "".join(SPARKLINE_BLOCKS[height] for height in heights)
