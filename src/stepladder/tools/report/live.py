"""`stepladder watch`: a run's progress in the terminal, from its files alone, so on any machine
that sees them.

Of a batch job also what Slurm says."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.live import Live
from rich.text import Text

from stepladder.core.console import make_printable
from stepladder.slurm.submitted_jobs import SLURM_POLL_INTERVAL_S, find_job
from stepladder.storage.run_files import CONFIG_FILE
from stepladder.tools.report.record import RunRecord
from stepladder.tools.report.script_record import ScriptRecord, is_script_run
from stepladder.tools.report.series import Curve, RankTimes

BLOCKS, MOST_BLOCKS = "▁▂▃▄▅▆▇█", 40
SECONDS_BETWEEN_LOOKS = 1.0

Look = tuple[list[str], bool]  # lines, and whether there will be no others


def watch(target: str, once: bool, console: Console) -> None:
    """Show the run of a run directory until it has finished, or a batch job until it is over; or
    once.

    Raises InputError where there is neither.
    """
    if re.fullmatch(r"[0-9]{1,16}(_[0-9]{1,9})?", target) and not Path(target).exists():
        followers: dict[Path, Follower] = {}
        show(looks(lambda: look_at_job(target, followers), SLURM_POLL_INTERVAL_S), once, console)
    else:
        show(looks(Follower(Path(target)).look, SECONDS_BETWEEN_LOOKS), once, console)


def looks(look: Callable[[], Look], seconds: float) -> Iterator[list[str]]:
    """Again and again, and at last when it is over."""
    while True:
        lines, is_over = look()
        yield [make_printable(line) for line in lines]
        if is_over:
            return
        time.sleep(seconds)


class Follower:
    """Reads of a run what has come since the last look. With another run in its place, it begins
    again.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.record: RunRecord | ScriptRecord | None = None
        self.begun: tuple[int, int] | None = None

    def look(self) -> Look:
        """A job's run is over with its result, a script's with its launchers."""
        begun = self._begun()
        if self.record is None or begun != self.begun:
            self.record, self.begun = (
                (ScriptRecord if is_script_run(self.run_dir) else RunRecord)(self.run_dir),
                begun,
            )
        else:
            self.record.look()
        if isinstance(self.record, ScriptRecord):
            return describe_script(self.record), self.record.state != "running"
        return describe(self.record), self.record.result is not None

    def _begun(self) -> tuple[int, int] | None:
        with suppress(OSError):
            about = (self.run_dir / CONFIG_FILE).stat()
            return about.st_ino, about.st_mtime_ns
        return None


def look_at_job(job: str, followers: dict[Path, Follower]) -> Look:
    """By Slurm's word, and its run; of a script the last line that it printed."""
    known = find_job(job)
    run_dir = Path(known.job_dir) if known.job_dir else None
    is_job = run_dir is not None and (run_dir / CONFIG_FILE).is_file()
    lines = [known.describe()]
    if run_dir is not None and (is_job or is_script_run(run_dir)):
        lines += followers.setdefault(run_dir, Follower(run_dir)).look()[0]
    if not is_job:
        with suppress(OSError):  # there is none as long as the job waits
            printed = Path(known.output).read_text(errors="replace", encoding="utf-8").splitlines()
            lines += [line for line in printed if line.strip()][-1:]
    return lines, known.is_over


def show(looks: Iterator[list[str]], once: bool, console: Console) -> None:
    """Lines where there is no terminal, when they change."""
    if once or not console.is_terminal:
        seen: list[str] = []
        for lines in islice(looks, 1) if once else looks:
            if lines != seen:
                console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)
            seen = lines
        return
    first = next(looks)  # what is refused is refused before the display begins
    with Live(Text("\n".join(first)), console=console, refresh_per_second=4) as live:
        for lines in looks:
            live.update(Text("\n".join(lines)))


def describe(record: RunRecord) -> list[str]:
    state = (
        "finished" if record.result else f"epoch {record.done // record.plan.steps_per_epoch + 1}"
    )
    if not record.result and not record.is_running:
        state += " (not running)"
    lines = [position(record, state)]
    if record.losses.last is not None:
        lines.append(f"loss {record.losses.last[1]:.4g}  {sparkline(record.losses)}")
    if record.last_evaluation:
        values = (f"{name} {value:.4g}" for name, value in record.last_evaluation.items())
        lines.append(f"evaluated after step {record.evaluated}: " + "  ".join(values))
    if record.times.speeds.last is not None:
        lines.append(
            f"{record.times.speeds.last[1] * record.plan.global_batch:.0f} samples per second"
        )
    return lines + slow_ranks(record.times) + record.warnings()


def describe_script(record: ScriptRecord) -> list[str]:
    lines = [position(record, record.state)]
    speeds = record.times.speeds
    if speeds.last is not None:
        lines.append(f"{speeds.last[1]:.3g} steps per second  {sparkline(speeds)}")
    return lines + slow_ranks(record.times) + record.warnings()


def position(record: RunRecord | ScriptRecord, state: str) -> str:
    size = record.starts[-1].world_size if record.starts else 0
    return f"{record.name}: {record.progress}, {state}, {size} process(es), {len(record.starts)} start(s)"


def slow_ranks(times: RankTimes) -> list[str]:
    return [
        f"rank {rank} takes {factor:.1f} times as long as the others"
        for rank, factor in times.stragglers()
    ]


def sparkline(curve: Curve) -> str:
    """The curve in one line of blocks: means of a few parts, from their least to their most."""
    values = [value for _, value in curve.points]
    means = [float(part.mean()) for part in np.array_split(values, min(len(values), MOST_BLOCKS))]
    lo, hi = min(means), max(means)
    return "".join(BLOCKS[int((mean - lo) / (hi - lo) * 7.999) if hi > lo else 0] for mean in means)
