"""Times on several sizes, in turns: of a job, or of an unmodified script; here, or where a batch
job is.

Both subjects have these. folder: of one measurement, empty at first.  weak: N processes do N times the work.
run     measures on so many processes of this machine; InputError where it cannot be trained on them
batch   the words after `stepladder` that do the same, and variables for their environment
read    what was measured; InputError where it is not whole
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from stepladder.core.console import echo
from stepladder.core.errors import InputError
from stepladder.core.process_count import validate_process_count
from stepladder.core.scratch import get_scratch_folder
from stepladder.core.settings import TrainRequest
from stepladder.launcher.local.outcome import BadInput, Failure
from stepladder.launcher.local.supervisor import handle_signals
from stepladder.launcher.options import Options
from stepladder.launcher.run import make_script_group
from stepladder.launcher.script import Script
from stepladder.tools.local_ranks import run_on_ranks
from stepladder.tools.pages.figures import format_amount
from stepladder.tools.scaling.loss import PARTS, TIMES, Size, parts_of, trimmed
from stepladder.tools.scaling.on_ranks import time_steps
from stepladder.tools.steps.clock import StepTimer, times_file
from stepladder.tools.steps.hook import OBSERVER, count_file, environment, variables

SECONDS_TO_LEAVE = 10.0  # for a script that was asked to end
LINES_TO_SHOW = 20  # of what the rank that failed has printed


@dataclass(frozen=True)
class Round:
    """One measurement. times: shape (ranks, steps, COLUMNS), warm-up left out.  batch: samples per
    step, or what stands for them.  launch: seconds to the first step's end.  optimizers: how many
    step in turn. is_capped: the job's schedule has no more steps."""

    times: np.ndarray
    batch: int
    launch: float
    optimizers: int = 1
    is_capped: bool = False

    @property
    def seconds(self) -> float:
        """Per step: what the parts add up to."""
        return float(trimmed(self.times)[:, :, 0].mean())


def turns(sizes: list[int], rounds: int) -> list[tuple[int, int]]:
    """(round, size) in order: every second round goes backwards, so a machine that slows down meets
    all alike.
    """
    return [
        (number, size) for number in range(rounds) for size in sizes[:: -1 if number % 2 else 1]
    ]


def measured(
    sizes: list[int],
    rounds: int,
    run: Callable[[int, int], Round],
    say: Callable[[str], None],
    unit: str,
) -> dict[int, Size]:
    """run(round, size) in turns; what came of it, by size."""
    found: dict[int, list[Round]] = {size: [] for size in sizes}
    for number, size in turns(sizes, rounds):
        found[size].append(run(number, size))
        step = format_amount(1e3 * found[size][-1].seconds)
        count = found[size][-1].times.shape[1]
        capped = (
            f", in {count} steps, where the job's schedule ends"
            if found[size][-1].is_capped
            else ""
        )
        say(f"round {number + 1} of {rounds}: {size} {unit}, {step} ms per step{capped}")
    return {size: summed_up(each) for size, each in found.items()}


def measured_here(
    subject: TimedJob | TimedScript, sizes: list[int], rounds: int, say: Callable[[str], None]
) -> list[Size]:
    """On numbers of processes of this machine. Raises InputError where they are too many for it."""
    validate_process_count(max(sizes))
    with tempfile.TemporaryDirectory(dir=get_scratch_folder()) as folder:

        def run(number: int, size: int) -> Round:
            place = Path(folder) / f"{size}-{number}"
            place.mkdir()
            return subject.run(size, place)

        return list(measured(sizes, rounds, run, say, "process(es)").values())


def summed_up(rounds: list[Round]) -> Size:
    """One size from all its rounds; its parts are those of the median, or of the two in the middle."""
    ordered = sorted(rounds, key=lambda one: one.seconds)
    middle = [parts_of(one.times) for one in ordered[(len(rounds) - 1) // 2 : len(rounds) // 2 + 1]]
    parts = {name: sum(parts[name] for parts in middle) / len(middle) for name in PARTS}
    launch, last = min(one.launch for one in rounds), rounds[-1]
    seconds = [one.seconds for one in rounds]
    return Size(len(last.times), last.batch, seconds, parts, launch, optimizers=last.optimizers)


@dataclass(frozen=True)
class TimedJob:
    """A recipe or job file. Its settings' steps are measured after `warmup` more. weak: the global
    batch grows.
    """

    request: TrainRequest
    warmup: int
    weak: bool

    @property
    def name(self) -> str:
        return self.request.job.stem

    def asked(self, folder: Path) -> TrainRequest:
        settings, run_dir = self.request.settings, folder.absolute() / "run"
        assert settings.steps is not None
        steps = settings.steps + self.warmup
        settings = replace(
            settings, steps=steps, snapshot_every=10**9, progress=False, run_dir=run_dir
        )
        return replace(self.request, settings=settings)

    def run(self, ranks: int, folder: Path) -> Round:
        began, threads = time.time(), self.request.settings.threads or 1
        run_on_ranks(
            partial(time_steps, self.asked(folder), self.weak, self.warmup),
            ranks,
            threads,
            self.request,
        )
        return self.read(ranks, folder, began)

    def batch(self, folder: Path) -> tuple[list[str], dict[str, str]]:
        file, threads = folder.absolute() / "asked.json", self.request.settings.threads or 1
        file.write_text(
            json.dumps(
                {**asdict(self.asked(folder)), "weak": self.weak, "warmup": self.warmup},
                default=str,
            ),
            encoding="utf-8",
        )
        words = ["run", "-m", "stepladder.tools.scaling.on_ranks", str(file)]
        return words, {"OMP_NUM_THREADS": str(threads)}

    def read(self, ranks: int, folder: Path, began: float) -> Round:
        try:
            found = np.load(folder / "run" / TIMES)
        except OSError as error:
            raise InputError(
                f"{self.name} has left no times", f"stepladder train {self.name}"
            ) from error
        times = found["times"][:, self.warmup :]
        is_capped = times.shape[1] < (self.request.settings.steps or 0)
        return Round(
            times, int(found["batch"]), float(found["first_at"]) - began, is_capped=is_capped
        )


@dataclass(frozen=True)
class TimedScript:
    """A script as it is. weak: its batch per process stays; else it shares one out among its
    processes itself.
    """

    script: Script
    steps: int
    warmup: int
    weak: bool
    threads: int

    @property
    def name(self) -> str:
        return Path(self.script.name).stem

    def run(self, ranks: int, folder: Path) -> Round:
        os.environ.setdefault("OMP_NUM_THREADS", str(self.threads))
        began, env = time.time(), self._observer(folder)
        options = Options(local_ranks=frozenset(), log_dir=folder / "log")
        with environment(**env):
            group = make_script_group(
                self.script, options, ranks, alone=False, variables={OBSERVER: env[OBSERVER]}
            )
            with handle_signals(group):
                group.start_single_node(ranks)
                while not group.poll():
                    if self._is_measured(folder, ranks):
                        group.end_within(SECONDS_TO_LEAVE)
                outcome = group.end()
        if group.stop_signal:
            raise KeyboardInterrupt
        if isinstance(outcome, BadInput):
            raise outcome.input_error
        if isinstance(outcome, Failure) and not self._is_measured(folder, ranks):
            for file in sorted((folder / "log").glob(f"*rank-{outcome.rank or 0}.log")):
                for line in file.read_text(errors="replace", encoding="utf-8").splitlines()[
                    -LINES_TO_SHOW:
                ]:
                    echo(line, err=True)
            group.restart_policy.report(outcome)
            command = f"stepladder run --nproc {ranks} {self.script.name}"
            raise InputError(f"{self.name} failed on {ranks} process(es), see above", command)
        return self.read(ranks, folder, began)

    def _is_measured(self, folder: Path, ranks: int) -> bool:
        return all(times_file(folder, rank).exists() for rank in range(ranks))

    def _observer(self, folder: Path) -> dict[str, str]:
        return variables(StepTimer, folder=folder.absolute(), warmup=self.warmup, steps=self.steps)

    def batch(self, folder: Path) -> tuple[list[str], dict[str, str]]:
        env = self._observer(folder) | {"OMP_NUM_THREADS": str(self.threads)}
        return ["run", self.script.name, *self.script.args], env

    def read(self, ranks: int, folder: Path, began: float) -> Round:
        if not self._is_measured(folder, ranks):
            raise self._too_short(ranks, folder)
        each = [np.load(times_file(folder, rank)) for rank in range(ranks)]
        if ranks > 1 and not all(one["together"] for one in each):
            raise InputError(
                f"{self.script.name} opened no process group: each of its {ranks} processes trained alone",
                "init_process_group and DistributedDataParallel, or a job file: stepladder train --help",
            )
        times = np.stack([one["times"] for one in each])
        first = float(each[0]["first_at"]) - began
        return Round(times, ranks if self.weak else 1, first, int(each[0]["optimizers"]))

    def _too_short(self, ranks: int, folder: Path) -> InputError:
        """For a script that has ended well, but before it was measured."""
        shorts = [count_file(folder, rank) for rank in range(ranks)]
        made = [int(file.read_bytes()) for file in shorts if file.exists()]
        if not any(made):
            return InputError(
                f"{self.script.name} made no step of a torch optimizer on {ranks} process(es)",
                "a script that trains with torch.optim, and its arguments",
            )
        needed = self.warmup + self.steps
        return InputError(
            f"{self.script.name} made {min(made)} optimizer steps on {ranks} process(es), of {needed} needed"
            f" (--warmup {self.warmup}, --steps {self.steps})",
            "fewer --steps, or arguments that let it train longer",
        )
