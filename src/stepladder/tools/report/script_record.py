"""What the run directory of a script says: its launches, and the times of its optimizer steps on each rank."""

from __future__ import annotations

from dataclasses import dataclass
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
    missing: tuple[int, ...]
    gpu: bool
    windows: tuple[Window, ...]


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
    """In the order of time."""
    ranks = {int(path.stem.removeprefix("rank-")): parts_of(path) for path in folder.glob("rank-*.jsonl")}
    starts: list[ScriptStart] = []
    before = 0
    for first in ranks.get(0, []):
        starts.append(_start(first, ranks, before))
        before += starts[-1].steps
    return starts


def parts_of(path: Path) -> list[list[Line]]:
    """A rank's lines by start; the first of each says who it was."""
    parts: list[list[Line]] = []
    for line in sound_lines(path):
        if "start" in line:
            parts.append([])
        parts[-1].append(line)
    return parts


def _start(first: list[Line], ranks: dict[int, list[list[Line]]], before: int) -> ScriptStart:
    """first: rank 0's part.  before: steps of earlier starts."""
    head, *lines = first
    found = {rank: _same_start(head, ranks.get(rank, [])) for rank in range(head["world_size"])}
    missing = tuple(rank for rank, part in found.items() if part is None)
    together = [part for part in found.values() if part is not None]
    windows = () if missing else tuple(_windows(together, before))
    steps = lines[-1]["step"] if lines else 1
    return ScriptStart(
        head["world_size"], steps, head["time"], first[-1]["time"], missing, head["gpu"], windows
    )  # fmt: skip


def _same_start(head: Line, parts: list[list[Line]]) -> list[Line] | None:
    """A rank's part of the start that rank 0 calls so; the nearest, for a fixed port comes again."""
    same = [part for part in parts if part[0]["start"] == head["start"]]
    return min(same, key=lambda part: abs(part[0]["time"] - head["time"]), default=None)


def _windows(ranks: list[list[Line]], before: int) -> list[Window]:
    """As rank 0 cut them, as far as all ranks have come. Within a line of another rank, steps are equally long."""
    edges = [1, *(line["step"] for line in ranks[0][1:])]
    reached = min(part[-1].get("step", 1) for part in ranks)
    edges = [edge for edge in edges if edge <= reached]
    spent = np.stack([_spent(part, edges) for part in ranks])  # (ranks, edges, phases)
    return [
        Window(before + edges[i + 1], edges[i + 1] - edges[i], spent[:, i + 1] - spent[:, i])
        for i in range(len(edges) - 1)
    ]


def _spent(part: list[Line], edges: list[int]) -> np.ndarray:
    """Seconds by phase from this rank's first step to each of `edges`; shape (edges, phases)."""
    steps = [1, *(line["step"] for line in part[1:])]
    seconds = np.cumsum(
        [[0.0] * len(STEP_KEYS), *([line[phase] for phase in STEP_KEYS] for line in part[1:])], axis=0
    )
    return np.stack([np.interp(edges, steps, column) for column in seconds.T], axis=1)
