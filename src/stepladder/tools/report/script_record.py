"""What the run directory of a script says: its launches, and the times of its optimizer steps on each rank."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from stepladder.core.errors import InputError
from stepladder.rank.progress import STEP_KEYS
from stepladder.tools.report.launches import LAUNCHES, STEPS, LaunchRecord, read_launches, state_of
from stepladder.tools.report.record import Window, sound_lines

Line = dict[str, Any]


@dataclass(frozen=True)
class ScriptStart:
    """One start of the ranks. steps: that rank 0 has made.  missing: ranks that left no times here.

    begun, ended: Unix time of its first and last known step.  gpu: the parts of a step could not be told.
    """

    world_size: int
    steps: int
    begun: float
    ended: float
    missing: list[int]
    gpu: bool
    windows: list[Window]


@dataclass(frozen=True)
class ScriptRecord:
    """A script's run. state: such as "running" or "finished"."""

    run_dir: Path
    name: str
    launches: list[LaunchRecord]
    state: str
    starts: list[ScriptStart]

    @property
    def steps(self) -> int:
        """Of all starts: a script that resumes may make some again."""
        return sum(start.steps for start in self.starts)

    @property
    def progress(self) -> str:
        return f"{self.steps} optimizer steps"

    @property
    def windows(self) -> list[Window]:
        return [window for start in self.starts for window in start.windows]


def is_script(run_dir: Path) -> bool:
    return (run_dir / LAUNCHES).is_file()


def read_script(run_dir: Path) -> ScriptRecord:
    """Raises InputError where a file is not what was written."""
    try:
        launches = read_launches(run_dir)
        name, state = Path(launches[-1].script).name, state_of(run_dir, launches)
        return ScriptRecord(run_dir, name, launches, state, starts_in(run_dir / STEPS))
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise InputError(
            f"{run_dir} is damaged: {type(error).__name__}: {error}", f"mv {run_dir} {run_dir}.damaged"
        ) from error


def starts_in(folder: Path) -> list[ScriptStart]:
    """In the order of time: rank 0's, each with what the other ranks say of it."""
    ranks = {int(path.stem.removeprefix("rank-")): parts_of(path) for path in folder.glob("rank-*.jsonl")}
    starts: list[ScriptStart] = []
    before = 0  # steps of earlier starts
    for own in ranks.get(0, []):
        head, last = own[0], own[-1]
        found = [_same_start(head, ranks.get(rank, [])) for rank in range(head["world_size"])]
        missing = [rank for rank, part in enumerate(found) if not part]
        windows = [] if missing else _windows(found, before)
        starts.append(
            ScriptStart(len(found), last["step"], head["time"], last["time"], missing, head["gpu"], windows)
        )
        before += last["step"]
    return starts


def parts_of(path: Path) -> list[list[Line]]:
    """A rank's lines by start; the first of each says who it was when it had made a step, whose times it lacks."""
    parts: list[list[Line]] = []
    for line in sound_lines(path):
        if "start" in line:
            parts.append([])
            line |= {"step": 1, **dict.fromkeys(STEP_KEYS, 0.0)}
        parts[-1].append(line)
    return parts


def _same_start(head: Line, parts: list[list[Line]]) -> list[Line]:
    """A rank's part of the start that rank 0 calls so, or nothing; the nearest, for a fixed port comes again."""
    same = [part for part in parts if part[0]["start"] == head["start"]]
    return min(same, key=lambda part: abs(part[0]["time"] - head["time"]), default=[])


def _windows(ranks: list[list[Line]], before: int) -> list[Window]:
    """As rank 0 cut them, as far as all ranks have come. Within a line of another rank, steps are equally long."""
    reached = min(part[-1]["step"] for part in ranks)
    edges = [line["step"] for line in ranks[0] if line["step"] <= reached]
    seconds = np.diff([_spent(part, edges) for part in ranks], axis=1)  # (ranks, windows, phases)
    return [
        Window(before + last, last - first, seconds[:, number])
        for number, (first, last) in enumerate(pairwise(edges))
    ]


def _spent(part: list[Line], edges: list[int]) -> np.ndarray:
    """Seconds by phase from this rank's first step to each of `edges`; shape (edges, phases)."""
    steps = [line["step"] for line in part]
    seconds = np.cumsum([[line[phase] for phase in STEP_KEYS] for line in part], axis=0)
    return np.stack([np.interp(edges, steps, column) for column in seconds.T], axis=1)
