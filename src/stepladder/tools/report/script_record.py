"""What the run directory of a script says: its launches, and the times of its optimizer steps on
each rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np

from stepladder.core.jsonl import JsonlReader, Line, is_count, is_finite_number, is_unix_time
from stepladder.core.world import MAX_RANKS
from stepladder.rank.progress import STEP_KEYS
from stepladder.tools.report.launches import (
    LAUNCHES_FILE,
    STEPS_FOLDER,
    describe_state,
    read_launches,
)
from stepladder.tools.report.series import RankTimes

MAX_START_ROWS = 256  # of a rank's start; a multiple of two


@dataclass
class RankPart:
    """One start of one rank. rows: steps that it had made, and what they had taken in all by phase;
    the first knows nothing of its first step. Of many every other one is kept: what was added up
    stays right."""

    start: str
    world_size: int
    begun: float
    gpu: bool
    ended: float = 0.0
    rows: list[tuple[float, ...]] = field(
        default_factory=lambda: [(1.0, *(0.0 for _ in STEP_KEYS))]
    )

    def add(self, line: Line) -> None:
        sums = [total + line[key] for total, key in zip(self.rows[-1][1:], STEP_KEYS, strict=True)]
        self.rows.append((line["step"], *sums))
        self.ended = line["time"]
        if len(self.rows) == MAX_START_ROWS + 1:
            self.rows = self.rows[::2]

    @property
    def last(self) -> int:
        return int(self.rows[-1][0])


@dataclass(frozen=True)
class ScriptStart:
    """One start of the ranks. steps: that rank 0 has made.  missing: ranks that left no times here.

    begun, ended: Unix time of its first and last known step.  gpu: the parts of a step could not be
    told."""

    world_size: int
    steps: int
    begun: float
    ended: float
    missing: list[int]
    gpu: bool


class ScriptRecord:
    """A script's run, and with `look` what has come since. Raises InputError where a file is not
    what was written.

    state: such as "running" or "finished".
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.lines: dict[int, JsonlReader] = {}
        self.parts: dict[int, list[RankPart]] = {}
        self.look()

    def look(self) -> None:
        """Read what is new."""
        self.launches, self._said = read_launches(self.run_dir)
        self.state, self.name = (
            describe_state(self.run_dir, self.launches),
            Path(self.launches[-1].script).name,
        )
        for path in (self.run_dir / STEPS_FOLDER).glob("rank-*.jsonl"):
            number = path.stem.removeprefix("rank-")
            if number.isascii() and number.isdigit() and int(number[:9]) < MAX_RANKS:
                self._read(int(number), path)
        self.starts, self.times = starts_of(self.parts)

    def _read(self, rank: int, path: Path) -> None:
        lines = self.lines.setdefault(rank, JsonlReader(path, is_step_line))
        if rank not in self.parts or lines.restart_if_replaced():
            self.parts[rank] = []
        parts = self.parts[rank]
        for line in lines.read_new():
            if "start" in line:
                parts.append(
                    RankPart(
                        line["start"],
                        line["world_size"],
                        line["time"],
                        bool(line.get("gpu")),
                        line["time"],
                    )
                )
            elif parts and line["step"] > parts[-1].last:
                parts[-1].add(line)

    def warnings(self) -> list[str]:
        growing = self.state == "running"
        return [
            *self._said,
            *(text for lines in self.lines.values() for text in lines.describe_damage(growing)),
        ]

    @property
    def steps(self) -> int:
        """Of all starts: a script that resumes may make some again."""
        return sum(start.steps for start in self.starts)

    @property
    def progress(self) -> str:
        return f"{self.steps} optimizer steps"


def is_script_run(run_dir: Path) -> bool:
    return (run_dir / LAUNCHES_FILE).exists()


def is_step_line(line: Line) -> bool:
    """Whether it begins a start, or says how far the rank has come since."""
    if not is_unix_time(line.get("time")):
        return False
    if "start" in line:
        size = line.get("world_size", 0)
        return isinstance(line["start"], str) and is_count(size) and 0 < size <= MAX_RANKS
    return is_count(line.get("step")) and all(is_finite_number(line.get(key)) for key in STEP_KEYS)


def starts_of(parts: dict[int, list[RankPart]]) -> tuple[list[ScriptStart], RankTimes]:
    """In the order of time: rank 0's, each with what the other ranks say of it."""
    starts: list[ScriptStart] = []
    times = RankTimes(STEP_KEYS)
    before = 0  # steps of earlier starts
    for own in parts.get(0, []):
        found = [_same_start(own, parts.get(rank, [])) for rank in range(own.world_size)]
        missing = [rank for rank, part in enumerate(found) if part is None]
        if not missing:
            _add_windows(times, [part for part in found if part is not None], before)
        starts.append(ScriptStart(len(found), own.last, own.begun, own.ended, missing, own.gpu))
        before += own.last
    return starts, times


def _same_start(own: RankPart, parts: list[RankPart]) -> RankPart | None:
    """A rank's part of the start that rank 0 calls so, if any; the nearest, for a fixed port comes
    again.
    """
    same = [part for part in parts if part.start == own.start]
    return min(same, key=lambda part: abs(part.begun - own.begun), default=None)


def _add_windows(times: RankTimes, ranks: list[RankPart], before: int) -> None:
    """As rank 0 cut them, as far as all ranks have come. Within a line of another rank, steps are
    equally long.
    """
    reached = min(part.last for part in ranks)
    edges = [int(row[0]) for row in ranks[0].rows if row[0] <= reached]
    seconds = np.diff([_spent(part, edges) for part in ranks], axis=1)  # (ranks, windows, phases)
    for number, (first, last) in enumerate(pairwise(edges)):
        rows: dict[int | str, list[float]] = dict(enumerate(seconds[:, number].tolist()))
        times.add(before + last, last - first, rows, len(ranks))


def _spent(part: RankPart, edges: list[int]) -> np.ndarray:
    """Seconds by phase from this rank's first step to each of `edges`; shape (edges, phases)."""
    steps, *sums = zip(*part.rows, strict=True)
    return np.stack([np.interp(edges, steps, column) for column in sums], axis=1)
