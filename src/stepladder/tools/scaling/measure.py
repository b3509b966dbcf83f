"""Measure a job or an unmodified script on several numbers of processes.

TimedJob and TimedScript, the subjects of a measurement, have the same methods:

- `run` measures on a number of processes of this machine,
- `make_command` returns the arguments after `stepladder`, and the environment, of a batch job that
  measures,
- `read` returns the measurement that either has written to a folder, which was empty before.

`run` and `read` raise InputError if the measurement has failed or is incomplete.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np

from stepladder.core.console import echo
from stepladder.core.errors import InputError
from stepladder.core.numbers import format_count
from stepladder.core.process_count import validate_process_count
from stepladder.core.scratch import temporary_folder
from stepladder.core.settings import TrainRequest
from stepladder.launcher.local.outcome import BadInput, Failure
from stepladder.launcher.local.supervisor import stopping_on_signals
from stepladder.launcher.options import Options
from stepladder.launcher.run import make_script_group
from stepladder.launcher.script import Script
from stepladder.tools.pages.figures import format_amount
from stepladder.tools.probe.attach import (
    OBSERVER_VARIABLE,
    make_listener_variables,
    temporary_environment,
)
from stepladder.tools.probe.ranks import read_step_counts
from stepladder.tools.scaling.efficiency import (
    STEP_PARTS,
    TIMES_FILE,
    SizeResult,
    compute_parts,
    trim_steps,
)
from stepladder.tools.scaling.script_timer import StepTimer, times_path
from stepladder.tools.scaling.step_times import time_steps
from stepladder.tools.trial.ranks import make_trial_request, run_on_ranks

SCRIPT_END_TIMEOUT_S = 10.0
MAX_LOG_LINES = 20  # shown of the rank that has failed


@dataclass(frozen=True)
class Round:
    """One measurement on a number of processes.

    `times` has seconds, of shape (ranks, steps, COLUMNS), without the warm-up. `batch` has the
    samples per step, or a number in proportion to them. `launch` has the seconds from the start to
    the end of the first step. So many `optimizers` step in turn. `is_capped` says whether the job's
    schedule has fewer steps than were requested.
    """

    times: np.ndarray
    batch: int
    launch: float
    optimizers: int = 1
    is_capped: bool = False

    @property
    def seconds(self) -> float:
        """The mean seconds per step, to which the parts add up."""
        return float(trim_steps(self.times)[:, :, 0].mean())


def list_turns(sizes: list[int], rounds: int) -> list[tuple[int, int]]:
    """Return (round, size) in the order of the measurements.

    Every second round goes backwards, so a machine that gets slower affects all sizes alike.
    """
    turns = []
    for number in range(rounds):
        ordered = sizes[::-1] if number % 2 else sizes
        turns += [(number, size) for size in ordered]
    return turns


def measure(
    sizes: list[int],
    rounds: int,
    run: Callable[[int, int], Round],
    report: Callable[[str], None],
    unit: str,
) -> dict[int, SizeResult]:
    """Call run(round, size) in turns, and return the results by size."""
    measured: dict[int, list[Round]] = {size: [] for size in sizes}
    for number, size in list_turns(sizes, rounds):
        result = run(number, size)
        measured[size].append(result)
        milliseconds = format_amount(1e3 * result.seconds)
        where = format_count(size, unit)
        line = f"round {number + 1} of {rounds}: {where}, {milliseconds} ms per step"
        if result.is_capped:
            line += f", in {result.times.shape[1]} steps, where the job's schedule ends"
        report(line)
    return {size: summarize_rounds(results) for size, results in measured.items()}


def measure_locally(
    subject: TimedJob | TimedScript, sizes: list[int], rounds: int, report: Callable[[str], None]
) -> list[SizeResult]:
    """Measure on these numbers of processes; raise InputError if they are too many."""
    validate_process_count(max(sizes))
    with temporary_folder() as scratch:

        def run(number: int, size: int) -> Round:
            folder = scratch / f"{size}-{number}"
            folder.mkdir()
            return subject.run(size, folder)

        return list(measure(sizes, rounds, run, report, "process").values())


def summarize_rounds(rounds: list[Round]) -> SizeResult:
    """Return the result of one size, with the parts of the median round.

    With an even number of rounds, they are the mean of the two in the middle.
    """
    ordered = sorted(rounds, key=lambda result: result.seconds)
    median_rounds = ordered[(len(rounds) - 1) // 2 : len(rounds) // 2 + 1]
    median_parts = [compute_parts(result.times) for result in median_rounds]
    parts = {
        name: sum(parts[name] for parts in median_parts) / len(median_parts) for name in STEP_PARTS
    }
    last = rounds[-1]
    return SizeResult(
        nproc=len(last.times),
        batch=last.batch,
        rounds=[result.seconds for result in rounds],
        parts=parts,
        launch=min(result.launch for result in rounds),
        optimizers=last.optimizers,
    )


@dataclass(frozen=True)
class TimedJob:
    """A recipe or job file, of which the settings' steps are measured after `warmup` more.

    With `weak` the global batch grows with the number of processes.
    """

    request: TrainRequest
    warmup: int
    weak: bool

    @property
    def name(self) -> str:
        return self.request.job.stem

    @property
    def threads(self) -> int:
        return self.request.settings.threads or 1

    def run(self, nproc: int, folder: Path) -> Round:
        start_time = time.time()
        function = partial(time_steps, self._make_request(folder), self.weak, self.warmup)
        run_on_ranks(function, nproc, self.request)
        return self.read(nproc, folder, start_time)

    def make_command(self, folder: Path) -> tuple[list[str], dict[str, str]]:
        request = asdict(self._make_request(folder))
        content = {**request, "weak": self.weak, "warmup": self.warmup}
        file = folder.absolute() / "request.json"
        file.write_text(json.dumps(content, default=str), encoding="utf-8")
        args = ["run", "-m", "stepladder.tools.scaling.step_times", str(file)]
        return args, {"OMP_NUM_THREADS": str(self.threads)}

    def read(self, nproc: int, folder: Path, start_time: float) -> Round:
        try:
            content = np.load(folder / "run" / TIMES_FILE)
        except OSError as error:
            raise InputError(
                f"{self.name} has written no times", f"stepladder train {self.name}"
            ) from error
        times = content["times"][:, self.warmup :]
        return Round(
            times,
            batch=int(content["batch"]),
            launch=float(content["first_at"]) - start_time,
            is_capped=times.shape[1] < (self.request.settings.steps or 0),
        )

    def _make_request(self, folder: Path) -> TrainRequest:
        steps = self.request.settings.steps
        assert steps is not None
        run_dir = folder.absolute() / "run"
        return make_trial_request(self.request, run_dir, steps=steps + self.warmup)


@dataclass(frozen=True)
class TimedScript:
    """An unmodified script.

    With `weak` it has a fixed batch per process; else it divides one batch among its processes.
    """

    script: Script
    steps: int
    warmup: int
    weak: bool
    threads: int

    @property
    def name(self) -> str:
        return Path(self.script.name).stem

    def run(self, nproc: int, folder: Path) -> Round:
        os.environ.setdefault("OMP_NUM_THREADS", str(self.threads))
        start_time = time.time()
        env = self._make_listener(folder)
        options = Options(local_ranks=frozenset(), log_dir=folder / "log")
        with temporary_environment(**env):
            group = make_script_group(
                self.script,
                options,
                nproc,
                alone=False,
                variables={OBSERVER_VARIABLE: env[OBSERVER_VARIABLE]},
            )
            with stopping_on_signals(group):
                group.start_single_node(nproc)
                while not group.poll():
                    if self._is_measured(folder, nproc):
                        group.attempt.end_within(SCRIPT_END_TIMEOUT_S)
                outcome = group.attempt.end()
        if group.stop_signal:
            raise KeyboardInterrupt
        if isinstance(outcome, BadInput):
            raise outcome.input_error
        if isinstance(outcome, Failure) and not self._is_measured(folder, nproc):
            _show_log(folder / "log", outcome.rank or 0)
            group.restart_policy.report(outcome)
            command = f"stepladder run --nproc {nproc} {self.script.name}"
            processes = format_count(nproc, "process")
            raise InputError(f"{self.name} failed on {processes}, see above", command)
        return self.read(nproc, folder, start_time)

    def make_command(self, folder: Path) -> tuple[list[str], dict[str, str]]:
        env = self._make_listener(folder) | {"OMP_NUM_THREADS": str(self.threads)}
        return ["run", self.script.name, *self.script.args], env

    def read(self, nproc: int, folder: Path, start_time: float) -> Round:
        if not self._is_measured(folder, nproc):
            raise self._make_incomplete_error(nproc, folder)
        results = [np.load(times_path(folder, rank)) for rank in range(nproc)]
        if nproc > 1 and not all(result["together"] for result in results):
            raise InputError(
                f"{self.script.name} opened no process group: each of its {nproc} processes trained"
                " alone",
                "init_process_group and DistributedDataParallel, or a job file: stepladder train"
                " --help",
            )
        return Round(
            times=np.stack([result["times"] for result in results]),
            batch=nproc if self.weak else 1,
            launch=float(results[0]["first_at"]) - start_time,
            optimizers=int(results[0]["optimizers"]),
        )

    def _make_listener(self, folder: Path) -> dict[str, str]:
        """Return the environment that makes the ranks of the script write their times."""
        return make_listener_variables(
            StepTimer, folder=folder.absolute(), warmup=self.warmup, steps=self.steps
        )

    def _is_measured(self, folder: Path, nproc: int) -> bool:
        return all(times_path(folder, rank).exists() for rank in range(nproc))

    def _make_incomplete_error(self, nproc: int, folder: Path) -> InputError:
        """Return the error of a script that has ended without failure before it was measured."""
        counts = read_step_counts(folder, nproc)
        processes = format_count(nproc, "process")
        if not any(counts):
            return InputError(
                f"{self.script.name} made no step of a torch optimizer on {processes}",
                "a script that trains with torch.optim, and its arguments",
            )
        return InputError(
            f"{self.script.name} made {min(counts)} optimizer steps on {processes}, of"
            f" {self.warmup + self.steps} needed (--warmup {self.warmup}, --steps {self.steps})",
            "fewer --steps, or arguments that let it train longer",
        )


def _show_log(log_dir: Path, rank: int) -> None:
    """Print the end of a rank's log to stderr."""
    for file in sorted(log_dir.glob(f"*rank-{rank}.log")):
        lines = file.read_text(errors="replace", encoding="utf-8").splitlines()
        for line in lines[-MAX_LOG_LINES:]:
            echo(line, err=True)
