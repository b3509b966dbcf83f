"""What a run directory says of its run: curves, times of every rank, starts. Read without torch, also of a run
that is under way, whose last line may be half written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stepladder.core.errors import InputError
from stepladder.rank.progress import TIMING_KEYS
from stepladder.storage.run_config import config_of
from stepladder.storage.rundir import CONFIG, LEDGER, METRICS, RESULT, TIMING


@dataclass(frozen=True)
class Window:
    """Steps (last - count, last] of one group of ranks. seconds: shape (ranks, phases)."""

    last: int
    count: int
    seconds: np.ndarray

    @property
    def own(self) -> np.ndarray:
        """Seconds per step that each rank spends on its own share, before it waits for others; shape (ranks,)."""
        seconds: np.ndarray = self.seconds[:, :2].sum(1) / self.count
        return seconds

    @property
    def whole(self) -> float:
        """Seconds per step, of the slowest rank."""
        return float(self.seconds.sum(1).max()) / self.count


@dataclass(frozen=True)
class Start:
    """One start of the ranks: by which attempt, on how many, from which step, up to which."""

    attempt: int
    world_size: int
    first: int
    last: int


@dataclass(frozen=True)
class Record:
    """A run, as its directory has it. steps: lines of training; evaluations: lines of evaluation.

    epochs: as the job's Config has them, if it does.
    """

    run_dir: Path
    config: dict[str, Any]
    name: str
    batch: int
    steps_per_epoch: int
    epochs: int | None
    result: dict[str, Any] | None
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    windows: list[Window]
    starts: list[Start]

    @property
    def done(self) -> int:
        return int(self.steps[-1]["step"]) if self.steps else 0

    @property
    def progress(self) -> str:
        """Such as "120 of 470 steps"; no end is known without epochs."""
        if self.result is not None:
            return f"{self.result['steps']} of {self.result['steps']} steps"
        in_all = f" of {self.epochs * self.steps_per_epoch}" if self.epochs else ""
        return f"{self.done}{in_all} steps"


def read_record(run_dir: Path) -> Record:
    """Raises InputError where there is no run, or where a file of it is damaged."""
    if not (run_dir / CONFIG).is_file():
        raise InputError(
            f"{run_dir} is no run directory: it has no {CONFIG}",
            "that of a train, or of a `stepladder run --run-dir DIR SCRIPT`",
        )
    with config_of(run_dir) as config:
        name, batch = config["definition"]["recipe"], int(config["plan"]["global_batch"])
        steps_per_epoch, epochs = int(config["derived"]["steps_per_epoch"]), config["config"].get("epochs")
    rows = list(sound_lines(run_dir / METRICS, "step"))
    steps, evaluations = [r for r in rows if "lr" in r], [r for r in rows if "lr" not in r]
    result, windows = result_in(run_dir / RESULT), windows_in(run_dir / TIMING)
    return Record(
        run_dir, config, name, batch, steps_per_epoch, epochs, result, steps, evaluations, windows,
        starts_in(run_dir / LEDGER),
    )  # fmt: skip


def values_of(evaluation: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in evaluation.items() if name not in ("step", "epoch")}


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """The number and object of each whole line; None for a damaged one. Nothing where there is no file yet."""
    if path.is_file():
        with path.open(errors="replace") as file:
            for number, line in enumerate(file, start=1):
                if line.endswith("\n"):
                    yield number, json_object(line)


def json_object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def sound_lines(path: Path, *names: str) -> Iterator[dict[str, Any]]:
    """Objects that have these names. Raises InputError at a damaged line."""
    for number, line in json_lines(path):
        if line is None or not line.keys() >= set(names):
            raise InputError(f"line {number} of {path} is damaged", f"sed -i {number}d {path} leaves it out")
        yield line


def result_in(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    result = json_object(path.read_text(errors="replace"))
    if result is None or "steps" not in result:
        raise InputError(f"{path} is damaged", f"rm {path}, and start the run again: it is written anew")
    return result


def windows_in(path: Path) -> list[Window]:
    """One window per flush: the lines of ranks 0, 1, ... in a row."""
    groups: list[list[dict[str, Any]]] = []
    for line in sound_lines(path, "step", "steps", "rank", *TIMING_KEYS):
        if line["rank"] == 0 or not groups:
            groups.append([])
        groups[-1].append(line)
    return [
        Window(
            group[0]["step"], group[0]["steps"], np.array([[line[key] for key in TIMING_KEYS] for line in group])
        )
        for group in groups
    ]


def starts_in(folder: Path) -> list[Start]:
    """From rank 0's ledgers: the first line says who, the last how far. What is damaged there, `audit` says."""
    starts = []
    for path in sorted(folder.glob("attempt-*.rank-0.jsonl")):
        lines = [line for _, line in json_lines(path) if line is not None]
        if lines and "resumed_from_step" in lines[0]:
            header, last, first = lines[0], lines[-1], lines[0]["resumed_from_step"]
            starts.append(Start(header["attempt"], header["world_size"], first, last.get("step", first)))
    return starts


def speeds(windows: list[Window], batch: int = 1) -> list[tuple[float, float]]:
    """(step, steps per second) of each window; with a batch, samples per second."""
    return [(window.last, batch / window.whole) for window in windows if window.whole > 0]


def stragglers(windows: list[Window], factor: float = 1.2) -> list[tuple[int, float]]:
    """(rank, how many times the others' time) of ranks that take `factor` times as long for their own share.

    Of the ranks of the last start's size. Medians over windows and over ranks: one slow moment names nobody.
    """
    if not windows:
        return []
    size = len(windows[-1].seconds)
    own = np.array([window.own for window in windows if len(window.seconds) == size])
    ranks = np.median(own, axis=0)
    found = []
    for rank in range(size if size > 1 else 0):
        others = float(np.median(np.delete(ranks, rank)))
        if others > 0 and ranks[rank] > factor * others:
            found.append((rank, float(ranks[rank] / others)))
    return found
