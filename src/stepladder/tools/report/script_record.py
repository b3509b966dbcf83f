"""The run of a script as its run directory has it: launches, and the step times of each rank."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from stepladder.core.jsonl import JsonlReader, Line, is_count, is_finite_number, is_unix_time
from stepladder.core.world import MAX_RANKS
from stepladder.rank.progress import STEP_KEYS
from stepladder.tools.report.launches import (
    LAUNCHES_FILE,
    STEPS_FOLDER,
    LaunchRecord,
    describe_state,
    read_launches,
)
from stepladder.tools.report.series import RankTimes

MAX_START_ROWS = 256  # a multiple of two


class _RankStart:
    """One start of one rank."""

    def __init__(self, line: Line) -> None:
        # The name of the start, which all of its ranks write.
        self.start: str = line["start"]
        self.world_size: int = line["world_size"]
        # Unix time of its first line.
        self.begun: float = line["time"]
        # Unix time of its newest line.
        self.ended: float = line["time"]
        # Whether the rank used a GPU, so that the phases of a step were not measured one by one.
        self.has_gpu = bool(line.get("gpu"))
        # (steps so far, seconds so far of each phase). The first row is at step 1, whose own time
        # is not known. If there are many rows, every second one is dropped, which leaves the sums
        # right.
        self.rows: list[tuple[float, ...]] = [(1.0, *(0.0 for _ in STEP_KEYS))]

    def add(self, line: Line) -> None:
        previous = self.rows[-1][1:]
        sums = [total + line[key] for total, key in zip(previous, STEP_KEYS, strict=True)]
        self.rows.append((line["step"], *sums))
        self.ended = line["time"]
        if len(self.rows) == MAX_START_ROWS + 1:
            self.rows = self.rows[::2]

    @property
    def last_step(self) -> int:
        return int(self.rows[-1][0])


@dataclass(frozen=True)
class _ScriptStart:
    """One start of all ranks.

    Args:
        steps: The steps that rank 0 has made.
        begun: Unix time of its first line.
        ended: Unix time of its last known step.
        missing: The ranks that wrote no times into this folder.
        gpu: The phases of a step could not be measured one by one.
    """

    world_size: int
    steps: int
    begun: float
    ended: float
    missing: list[int]
    gpu: bool


@dataclass(frozen=True)
class ScriptRecord:
    """The files of a script's run at one moment.

    Args:
        state: Such as "running" or "finished".
        name: The script's file name.
        warnings: Sentences about damaged lines.
    """

    launches: list[LaunchRecord]
    state: str
    name: str
    starts: list[_ScriptStart]
    times: RankTimes
    warnings: list[str]

    @property
    def steps(self) -> int:
        """The steps of all starts; a script that resumes may repeat some."""
        return sum(start.steps for start in self.starts)

    @property
    def progress(self) -> str:
        return f"{self.steps} optimizer steps"

    @property
    def is_running(self) -> bool:
        return self.state == "running"

    @property
    def last_write(self) -> float:
        """Unix time of the last known step, 0 if there is none."""
        return self.starts[-1].ended if self.starts else 0.0


class ScriptRunReader:
    """Reads the files of a script's run; each `read` reads only the lines that are new."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._readers: dict[int, JsonlReader] = {}
        self._starts_of_rank: dict[int, list[_RankStart]] = {}

    def read(self) -> ScriptRecord:
        """Return the run as it is now. Raises InputError if launches.jsonl is damaged."""
        launches, warnings = read_launches(self.run_dir)
        state = describe_state(self.run_dir, launches)
        for path in (self.run_dir / STEPS_FOLDER).glob("rank-*.jsonl"):
            rank = path.stem.removeprefix("rank-")
            if rank.isascii() and rank.isdigit() and int(rank[:9]) < MAX_RANKS:
                self._read_rank(int(rank), path)
        for reader in self._readers.values():
            warnings += reader.describe_damage(is_growing=state == "running")
        starts, times = _combine_ranks(self._starts_of_rank)
        name = Path(launches[-1].script).name
        return ScriptRecord(launches, state, name, starts, times, warnings)

    def _read_rank(self, rank: int, path: Path) -> None:
        reader = self._readers.setdefault(rank, JsonlReader(path, _is_step_line))
        if rank not in self._starts_of_rank or reader.restart_if_replaced():
            self._starts_of_rank[rank] = []
        starts = self._starts_of_rank[rank]
        for line in reader.read_new():
            if "start" in line:
                starts.append(_RankStart(line))
            elif starts and line["step"] > starts[-1].last_step:
                starts[-1].add(line)


def read_script_run(run_dir: Path) -> ScriptRecord:
    """Return the script's run as it is now. Raises InputError if launches.jsonl is damaged."""
    return ScriptRunReader(run_dir).read()


def is_script_run(run_dir: Path) -> bool:
    return (run_dir / LAUNCHES_FILE).exists()


def _is_step_line(line: Line) -> bool:
    """Return whether the line begins a start, or has the steps and seconds since the last line."""
    if not is_unix_time(line.get("time")):
        return False
    if "start" in line:
        size = line.get("world_size", 0)
        return isinstance(line["start"], str) and is_count(size) and 0 < size <= MAX_RANKS
    if not is_count(line.get("step")):
        return False
    return all(is_finite_number(line.get(key)) for key in STEP_KEYS)


def _combine_ranks(
    starts_of_rank: dict[int, list[_RankStart]],
) -> tuple[list[_ScriptStart], RankTimes]:
    """Return the starts of rank 0, each with the other ranks' part of it, and the times of all."""
    starts: list[_ScriptStart] = []
    times = RankTimes(STEP_KEYS)
    earlier_steps = 0
    for start in starts_of_rank.get(0, []):
        missing = []
        parts = []
        for rank in range(start.world_size):
            part = _find_same_start(start, starts_of_rank.get(rank, []))
            if part is None:
                missing.append(rank)
            else:
                parts.append(part)
        if not missing:
            _add_windows(times, parts, earlier_steps)
        starts.append(
            _ScriptStart(
                start.world_size, start.last_step, start.begun, start.ended, missing, start.has_gpu
            )
        )
        earlier_steps += start.last_step
    return starts, times


def _find_same_start(start: _RankStart, candidates: list[_RankStart]) -> _RankStart | None:
    """Return a rank's part of rank 0's start, if any.

    Two starts with the same port have the same name; the one nearest in time is returned.
    """
    same_name = [candidate for candidate in candidates if candidate.start == start.start]
    return min(same_name, key=lambda part: abs(part.begun - start.begun), default=None)


def _add_windows(times: RankTimes, parts: list[_RankStart], earlier_steps: int) -> None:
    """Add the windows of rank 0's lines, up to the step that all ranks have reached.

    Other ranks write at other steps: the steps within one of their lines count as equally long.
    """
    reached = min(part.last_step for part in parts)
    edges = [int(row[0]) for row in parts[0].rows if row[0] <= reached]
    sums = [_interpolate_sums(part, edges) for part in parts]
    seconds = np.diff(sums, axis=1)  # (ranks, windows, phases)
    for window, (first, last) in enumerate(pairwise(edges)):
        rows: dict[int | str, list[float]] = dict(enumerate(seconds[:, window].tolist()))
        times.add(earlier_steps + last, last - first, rows, len(parts))


def _interpolate_sums(part: _RankStart, edges: list[int]) -> np.ndarray:
    """Return the rank's seconds by phase from its first step to each edge, (edges, phases)."""
    steps, *sums = zip(*part.rows, strict=True)
    return np.stack([np.interp(edges, steps, column) for column in sums], axis=1)
