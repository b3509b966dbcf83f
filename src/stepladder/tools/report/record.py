"""What a run directory says of its run: curves, times of every rank, starts. Read without torch,
also of a run that is under way, and in little memory. What is damaged is left out, and said."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepladder.core import typed_file
from stepladder.core.errors import InputError
from stepladder.core.jsonl import JsonlReader, Line, is_count, is_finite_number, read_last_lines
from stepladder.core.plan import Plan
from stepladder.core.typed_file import convert, open_to_read
from stepladder.rank.progress import TIMING_KEYS
from stepladder.rank.timing import get_timing_rows, is_timing_line
from stepladder.storage.ledger_attempts import parse_header
from stepladder.storage.ledger_rank_reader import MAX_LEDGER_LINE_BYTES
from stepladder.storage.lock import is_locked
from stepladder.storage.run_config import open_config
from stepladder.storage.run_files import (
    CONFIG_FILE,
    LEDGER_FILE_NAME,
    LEDGER_FOLDER,
    METRICS_FILE,
    RESULT_FILE,
    TIMING_FILE,
)
from stepladder.tools.report.series import Curve, RankTimes

MOST_METRICS = 100


@dataclass(frozen=True)
class RunStart:
    """One start of the ranks: by which attempt, on how many, from which step, up to which."""

    attempt: int
    world_size: int
    first: int
    last: int


@dataclass(frozen=True)
class StoredConfig:
    """What is read of a config.json."""

    definition: dict[str, Any]
    config: dict[str, Any]
    environment: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ResultSummary:
    """What is read of a result.json."""

    steps: int
    weights_sha256: str


class RunRecord:
    """A run, as its directory has it, and with `look` what has come since. Raises InputError where
    there is none.

    epochs: as the job's Config has them, if it does.  losses, rates: by step.  evaluations: by
    metric and step. last_evaluation: of all metrics; its step."""

    def __init__(self, run_dir: Path) -> None:
        if not (run_dir / CONFIG_FILE).exists():
            raise InputError(
                f"{run_dir} is not a run directory: it has no {CONFIG_FILE}",
                "that of a train, or of a `stepladder run --run-dir DIR SCRIPT`",
            )
        self.run_dir = run_dir
        with open_config(run_dir) as config:
            self.config, self.plan = convert(config, StoredConfig), Plan.from_json(config["plan"])
            self.name = convert(self.config.definition["recipe"], str)
            self.epochs = convert(self.config.config.get("epochs"), int | None)
        self.metrics, self.timing = (
            JsonlReader(run_dir / METRICS_FILE, is_metrics_line),
            JsonlReader(run_dir / TIMING_FILE, is_timing_line),
        )
        self._begin_curves()
        self._begin_times()
        self.look()

    def _begin_curves(self) -> None:
        self.done, self.losses, self.rates = 0, Curve(), Curve()
        self.evaluations: dict[str, Curve] = {}
        self.evaluated, self.last_evaluation = 0, dict[str, float]()

    def _begin_times(self) -> None:
        self.times = RankTimes(TIMING_KEYS)

    def look(self) -> None:
        """Read what is new."""
        if self.metrics.restart_if_replaced():
            self._begin_curves()
        if self.timing.restart_if_replaced():
            self._begin_times()
        for line in self.metrics.read_new():
            self._take(line)
        for step, steps, size, rows in group_timing_lines(self.timing.read_new()):
            self.times.add(step, steps, rows, size)
        self.starts = list(read_starts(self.run_dir / LEDGER_FOLDER))
        self.result = read_result(self.run_dir / RESULT_FILE)

    def _take(self, line: Line) -> None:
        if "lr" in line:
            self.done = line["step"]
            self.losses.add(self.done, line["loss"])
            self.rates.add(self.done, line["lr"])
            return
        self.evaluated, self.last_evaluation = line["step"], get_metric_values(line)
        for name, value in self.last_evaluation.items():
            if name in self.evaluations or len(self.evaluations) < MOST_METRICS:
                self.evaluations.setdefault(name, Curve()).add(line["step"], value)

    @property
    def progress(self) -> str:
        """Such as "120 of 470 steps"; no end is known without epochs."""
        if self.result is not None:
            return f"{self.result.steps} of {self.result.steps} steps"
        in_all = f" of {self.epochs * self.plan.steps_per_epoch}" if self.epochs else ""
        return f"{self.done}{in_all} steps"

    @property
    def is_running(self) -> bool:
        return self.result is None and is_locked(self.run_dir)

    def warnings(self) -> list[str]:
        """What was left out. Of a running run the last line may be half written."""
        return [
            text
            for lines in (self.metrics, self.timing)
            for text in lines.describe_damage(self.is_running)
        ]


def is_metrics_line(line: Line) -> bool:
    """Whether it is a line of a step or of an evaluation."""
    return is_count(line.get("step")) and (
        "lr" not in line or (is_finite_number(line["lr"]) and is_finite_number(line.get("loss")))
    )


def get_metric_values(evaluation: Line) -> dict[str, float]:
    return {
        name: value
        for name, value in evaluation.items()
        if name not in ("step", "epoch") and is_finite_number(value)
    }


def group_timing_lines(
    lines: Iterator[Line],
) -> Iterator[tuple[int, int, int, Mapping[int | str, list[float]]]]:
    """Per flush its last step, how many, how many ranks, and their seconds.

    Where there is a line for each rank, those of ranks 0, 1, ... in a row are one.
    """
    group: list[Line] = []
    for line in lines:
        if group and (line.get("rank", 0) == 0):
            yield make_window(group)
            group = []
        group.append(line)
        if "rank" not in line:
            yield make_window(group)
            group = []
    if group:
        yield make_window(group)


def make_window(group: list[Line]) -> tuple[int, int, int, Mapping[int | str, list[float]]]:
    first = group[0]
    rows = {label: row for line in group for label, row in get_timing_rows(line).items()}
    return first["step"], first["steps"], first.get("world_size", len(rows)), rows


def read_result(path: Path) -> ResultSummary | None:
    with suppress(FileNotFoundError):
        return typed_file.load_json(
            path, ResultSummary, f"rm {path}, and start the run again: it is written anew"
        )
    return None


def read_starts(folder: Path) -> Iterator[RunStart]:
    """From rank 0's ledgers: the first line says who, the last how far. What is damaged there,
    `audit` says.
    """
    for path in sorted(folder.glob("attempt-*.rank-0.jsonl")):
        found = LEDGER_FILE_NAME.fullmatch(path.name)
        with suppress(OSError, ValueError), open_to_read(path) as file:
            header = (
                parse_header(file.readline(MAX_LEDGER_LINE_BYTES), int(found[1])) if found else None
            )
            if header is not None:
                steps = [
                    line["step"]
                    for line in read_last_lines(path, MAX_LEDGER_LINE_BYTES)
                    if is_count(line.get("step"))
                ]
                yield RunStart(
                    header.number,
                    header.world_size,
                    header.start,
                    steps[-1] if steps else header.start,
                )
