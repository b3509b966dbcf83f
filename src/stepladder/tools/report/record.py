"""The run of a job as its run directory has it: curves, times of every rank, starts.

It is read without torch and in little memory, also while the run is under way. Damaged lines are
left out, with a warning.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

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
from stepladder.storage.metrics_file import is_metrics_line
from stepladder.storage.run_config import open_config
from stepladder.storage.run_files import (
    CONFIG_FILE,
    LEDGER_FILE_NAME,
    LEDGER_FOLDER,
    METRICS_FILE,
    RESULT_FILE,
    TIMING_FILE,
    suggest_run_dirs,
)
from stepladder.storage.start_records import StartRecord, read_start_records
from stepladder.tools.report.launches import LAUNCHES_FILE
from stepladder.tools.report.series import Curve, Label, RankTimes

MAX_METRICS = 100


@dataclass(frozen=True)
class RunStart:
    """One start of the ranks: the steps `first` to `last` of an attempt on `world_size` ranks."""

    attempt: int
    world_size: int
    first: int
    last: int


@dataclass(frozen=True)
class StoredConfig:
    """The parts of a config.json that a record needs."""

    definition: dict[str, Any]
    config: dict[str, Any]
    environment: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _BestValue:
    """The best evaluation of a run, by the metric that the job names."""

    metric: str
    value: float
    step: int


@dataclass(frozen=True)
class _ResultSummary:
    """The parts of a result.json that a record needs."""

    steps: int
    weights_sha256: str
    best: _BestValue | None = None


class _MetricCurves:
    """The curves of a metrics.jsonl."""

    def __init__(self) -> None:
        # The last step.
        self.step = 0
        # The training loss by step.
        self.losses = Curve()
        # The learning rate by step.
        self.rates = Curve()
        # The curve of each metric of the evaluations, at most MAX_METRICS.
        self.evaluations: dict[str, Curve] = {}
        # The step of the last evaluation.
        self.evaluated_step = 0
        # The values of the last evaluation.
        self.last_evaluation: dict[str, float] = {}

    def add(self, line: Line) -> None:
        if "lr" in line:
            self.step = line["step"]
            self.losses.add(self.step, line["loss"])
            self.rates.add(self.step, line["lr"])
            return
        self.evaluated_step = line["step"]
        self.last_evaluation = _get_metric_values(line)
        for name, value in self.last_evaluation.items():
            if name in self.evaluations or len(self.evaluations) < MAX_METRICS:
                self.evaluations.setdefault(name, Curve()).add(line["step"], value)


@dataclass(frozen=True)
class RunRecord:
    """The files of a job's run at one moment.

    Args:
        name: The recipe or job.
        epochs: The epochs of the job's Config, if it has such a field.
        result: None until the run has finished.
        is_running: A process holds the lock of the run directory.
        warnings: Sentences about damaged lines.
        start_records: When and where each attempt began; older runs have none.
        last_write: Unix time of the newest line of metrics.jsonl, 0 if there is none.
    """

    run_dir: Path
    name: str
    config: StoredConfig
    plan: Plan
    epochs: int | None
    metrics: _MetricCurves
    times: RankTimes
    starts: list[RunStart]
    result: _ResultSummary | None
    is_running: bool
    warnings: list[str]
    start_records: dict[int, StartRecord]
    last_write: float

    @property
    def progress(self) -> str:
        """Such as "120 of 470 steps"; without epochs the number of all steps is not known."""
        if self.result is not None:
            return f"{self.result.steps} of {self.result.steps} steps"
        if self.epochs:
            return f"{self.metrics.step} of {self.epochs * self.plan.steps_per_epoch} steps"
        return f"{self.metrics.step} steps"


class RunReader:
    """Reads the files of a job's run; each `read` reads only the lines that are new.

    Raises InputError if the folder is no run directory, or config.json is damaged.
    """

    def __init__(self, run_dir: Path) -> None:
        if not (run_dir / CONFIG_FILE).exists():
            raise InputError(
                f"{run_dir} is not a run directory: it has no {CONFIG_FILE}",
                f"{suggest_run_dirs(run_dir, CONFIG_FILE, LAUNCHES_FILE)};"
                " a script has one with `stepladder run --run-dir DIR SCRIPT`",
            )
        self.run_dir = run_dir
        with open_config(run_dir) as config:
            self.config = convert(config, StoredConfig)
            self.plan = Plan.from_json(config["plan"])
            self.name = convert(self.config.definition["recipe"], str)
            self.epochs = convert(self.config.config.get("epochs"), int | None)
        self._metrics_reader = JsonlReader(run_dir / METRICS_FILE, is_metrics_line)
        self._timing_reader = JsonlReader(run_dir / TIMING_FILE, is_timing_line)
        self._metrics = _MetricCurves()
        self._times = RankTimes(TIMING_KEYS)

    def read(self) -> RunRecord:
        """Return the run as it is now. Raises InputError if result.json is damaged."""
        if self._metrics_reader.restart_if_replaced():
            self._metrics = _MetricCurves()
        if self._timing_reader.restart_if_replaced():
            self._times = RankTimes(TIMING_KEYS)
        for line in self._metrics_reader.read_new():
            self._metrics.add(line)
        for window in group_timing_lines(self._timing_reader.read_new()):
            self._times.add(window.last_step, window.steps, window.rows, window.world_size)
        starts = list(_read_starts(self.run_dir / LEDGER_FOLDER))
        result = read_result(self.run_dir / RESULT_FILE)
        is_running = result is None and is_locked(self.run_dir)
        # The last line of a file that is being written may be half written, which is no damage.
        warnings = [
            *self._metrics_reader.describe_damage(is_running),
            *self._timing_reader.describe_damage(is_running),
        ]
        return RunRecord(
            run_dir=self.run_dir,
            name=self.name,
            config=self.config,
            plan=self.plan,
            epochs=self.epochs,
            metrics=self._metrics,
            times=self._times,
            starts=starts,
            result=result,
            is_running=is_running,
            warnings=warnings,
            start_records=read_start_records(self.run_dir),
            last_write=_get_last_write(self.run_dir / METRICS_FILE),
        )


def _get_last_write(path: Path) -> float:
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def read_run(run_dir: Path) -> RunRecord:
    """Return the run as it is now. Raises InputError if there is none, or it is damaged."""
    return RunReader(run_dir).read()


def _get_metric_values(evaluation: Line) -> dict[str, float]:
    return {
        name: value
        for name, value in evaluation.items()
        if name not in ("step", "epoch") and is_finite_number(value)
    }


class _TimingWindow(NamedTuple):
    """The seconds of ranks by phase in `steps` steps up to `last_step`."""

    last_step: int
    steps: int
    world_size: int
    rows: dict[Label, list[float]]


def group_timing_lines(lines: Iterator[Line]) -> Iterator[_TimingWindow]:
    """Yield the window of each line.

    Older runs have one line for each rank: those of ranks 0, 1, ... in a row are one window.
    """
    group: list[Line] = []
    for line in lines:
        if group and line.get("rank", 0) == 0:
            yield _make_window(group)
            group = []
        group.append(line)
        if "rank" not in line:
            yield _make_window(group)
            group = []
    if group:
        yield _make_window(group)


def _make_window(group: list[Line]) -> _TimingWindow:
    first = group[0]
    rows: dict[Label, list[float]] = {}
    for line in group:
        rows.update(get_timing_rows(line))
    return _TimingWindow(first["step"], first["steps"], first.get("world_size", len(rows)), rows)


def read_result(path: Path) -> _ResultSummary | None:
    with suppress(FileNotFoundError):
        return typed_file.load_json(
            path, _ResultSummary, f"rm {path}, and start the run again: it is written anew"
        )
    return None


def _read_starts(folder: Path) -> Iterator[RunStart]:
    """Yield the start of each ledger of rank 0; damaged ledgers are left to `audit`."""
    for path in sorted(folder.glob("attempt-*.rank-0.jsonl")):
        match = LEDGER_FILE_NAME.fullmatch(path.name)
        if match is None:
            continue
        with suppress(OSError, ValueError):
            start = _read_start(path, match)
            if start is not None:
                yield start


def _read_start(path: Path, match: re.Match[str]) -> RunStart | None:
    """Return the start of a ledger: its first line has the attempt, its last line the last step."""
    with open_to_read(path) as file:
        header = parse_header(file.readline(MAX_LEDGER_LINE_BYTES), int(match[1]))
    if header is None:
        return None
    last = header.start
    for line in read_last_lines(path, MAX_LEDGER_LINE_BYTES):
        if is_count(line.get("step")):
            last = line["step"]
    return RunStart(header.number, header.world_size, header.start, last)
