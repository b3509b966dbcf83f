"""Train the same steps on several numbers of processes and compare every step.

One more training is stopped and resumed on other numbers of processes. The first difference ends
the comparison and is reported with its likely cause.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from stepladder.core.errors import InputError
from stepladder.core.plan import Plan
from stepladder.core.process_count import validate_process_count
from stepladder.core.scratch import temporary_folder
from stepladder.core.settings import Settings, TrainRequest
from stepladder.storage.run_files import CONFIG_FILE
from stepladder.tools.trial.ranks import make_trial_request, run_on_ranks
from stepladder.tools.verify.causes import (
    NONDETERMINISTIC,
    ProbeResult,
    Symptoms,
    find_likely_cause,
    read_probe_results,
    write_probe_result,
)
from stepladder.tools.verify.trial import (
    WEIGHT_TOLERANCE_FACTOR,
    Difference,
    Trial,
    find_first_difference,
    train_part,
)

DEFAULT_SIZES = [1, 2, 3]
HEADER = f"{'processes':<12} steps  {'last loss':<20} {'weights_sha256':<16}  ledger"
DDP_TOLERANCE = 1e-5  # relative; in exact mode every bit counts


@dataclass(frozen=True)
class Proof:
    """The trainings that were compared, and their first difference.

    `resumed` has pairs [from, to] of numbers of processes.
    """

    sizes: list[int]
    resumed: list[list[int]]
    steps: int
    difference: Difference | None
    weights_sha256: str | None

    def as_json(self) -> dict[str, Any]:
        fields = None
        if self.difference:
            fields = asdict(self.difference)
            del fields["relative"]
        return {
            "schema": 1,
            "equal": fields is None,
            "sizes": self.sizes,
            "resumed": self.resumed,
            "steps": self.steps,
            "first_difference": fields,
            "weights_sha256": self.weights_sha256,
        }


def prove(
    job_file: Path,
    config: dict[str, Any],
    settings: Settings,
    sizes: list[int] | None = None,
    steps: int | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> Proof:
    """Train a job on each number of processes, and compare losses and weights at every step.

    Args:
        job_file: The job file, or the name of a recipe.
        config: Fields of the job's Config.
        settings: The settings of every training.
        sizes: The numbers of processes. None for DEFAULT_SIZES.
        steps: How many steps to train. None for about 12, never more than the job has.
        report: Is called with a line per training.

    Raises:
        InputError: The job cannot be trained on one of the numbers of processes.
    """
    if settings.batch_per_rank is not None:
        raise InputError(
            "with --batch-per-rank the batch grows with the processes", "--global-batch B"
        )
    if steps is not None and steps < 2:
        raise InputError(f"--steps {steps} leaves no step to resume at", "--steps 2 or more")
    validate_process_count(max(sizes or DEFAULT_SIZES))
    settings = replace(settings, steps=None, threads=settings.threads or 1)
    request = TrainRequest(job_file, config, settings)
    with temporary_folder() as folder:
        return _Comparison(folder, request, steps, report).run(sizes)


class _Comparison:
    """Compares trainings with the first one, the reference, and deletes those that are equal."""

    def __init__(
        self, folder: Path, request: TrainRequest, steps: int | None, report: Callable[[str], None]
    ) -> None:
        self.folder = folder
        self.request = request
        self.steps = steps
        self.report = report
        self.tolerance = 0.0 if request.settings.sync == "exact" else DDP_TOLERANCE
        self.num_trials = 0

    def run(self, requested_sizes: list[int] | None) -> Proof:
        first_size = (requested_sizes or DEFAULT_SIZES)[0]
        reference = self.train([first_size])
        difference = self.check_trial(reference)
        trained = [first_size]
        resumed: list[list[int]] = []
        if difference is None:
            sizes = requested_sizes or self.find_possible_sizes(reference)
            for size in sizes[1:]:
                trained.append(size)
                difference = self.compare(reference, [size])
                if difference is not None:
                    break
            resume_sizes = _make_resume_sizes(sizes, reference.steps)
            if difference is None and len(resume_sizes) > 1:
                difference = self.compare(reference, resume_sizes)
                resumed = [list(pair) for pair in pairwise(resume_sizes)]
        return Proof(trained, resumed, reference.steps, difference, reference.weights_sha256)

    def find_possible_sizes(self, reference: Trial) -> list[int]:
        """Return the default sizes of which each process has at least one microbatch."""
        plan = Plan.from_json(reference.read(CONFIG_FILE)["plan"])
        return [size for size in DEFAULT_SIZES if size <= plan.num_microbatches]

    def check_trial(self, trial: Trial) -> Difference | None:
        """Return the difference within one training; report a row of the table if there is none."""
        difference = trial.find_inner_difference()
        if difference is not None:
            return difference
        if self.num_trials == 1:
            self.report(HEADER)
        sizes = " > ".join(map(str, trial.sizes))
        last_loss = list(trial.read_losses().values())[-1]
        weights = (trial.weights_sha256 or "")[:16]
        self.report(f"{sizes:<12} {trial.steps:>5}  {last_loss:<20.12g} {weights}  ok")
        return None

    def compare(self, reference: Trial, sizes: list[int]) -> Difference | None:
        """Train on `sizes` and compare; a difference comes with its likely cause."""
        trial = self.train(sizes)
        inner = self.check_trial(trial)
        difference = inner or find_first_difference(reference, trial, self.tolerance)
        if difference is None:
            shutil.rmtree(trial.folder)
            return None
        # A training that differs within itself, or was resumed, is not repeated.
        trials = [reference] if inner or len(sizes) > 1 else [reference, trial]
        return self.find_nondeterminism(trials) or self.add_cause(difference, reference, trial)

    def find_nondeterminism(self, trials: list[Trial]) -> Difference | None:
        """Repeat each training and return the first difference between two equal ones.

        If there is one, the number of processes is not its cause.
        """
        for trial in trials:
            rerun = self.train(trial.sizes)
            if rerun.find_inner_difference() is None:
                difference = find_first_difference(trial, rerun, self.tolerance)
                if difference:
                    return replace(difference, cause=NONDETERMINISTIC)
            shutil.rmtree(rerun.folder)
        return None

    def add_cause(self, difference: Difference, reference: Trial, trial: Trial) -> Difference:
        if difference.cause:
            return difference
        results: list[ProbeResult] = []
        for size in sorted({*reference.sizes, *trial.sizes}):
            results += self.probe(size)
        is_resumed = len(trial.sizes) > 1
        symptoms = Symptoms(difference, results, self.request.settings, is_resumed)
        return replace(difference, cause=find_likely_cause(symptoms))

    def train(self, sizes: list[int]) -> Trial:
        """Train a part of the steps on each of `sizes`, each part resuming the one before."""
        self.num_trials += 1
        trial = Trial(self.folder / f"trial-{self.num_trials}", sizes)
        request = make_trial_request(
            self.request, trial.folder, snapshot_every=1, keep=10**9, guard_every=1
        )
        for part, size in enumerate(sizes, 1):
            try:
                work = partial(train_part, request, self.steps, part, len(sizes))
                run_on_ranks(work, size, self.request)
            except InputError:
                if not trial.guard_report:
                    raise
            if trial.guard_report:
                break
        return trial

    def probe(self, size: int) -> list[ProbeResult]:
        """Return the probe's result of every rank, on this number of processes."""
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            work = partial(write_probe_result, self.request, Path(folder))
            run_on_ranks(work, size, self.request)
            return read_probe_results(Path(folder), size)


def _make_resume_sizes(sizes: list[int], steps: int) -> list[int]:
    """Return the sizes of the resumed training, the last one first and at most one a step."""
    if len(sizes) == 1:
        return (sizes * 2)[:steps]
    return [sizes[-1], *sizes[:-1]][:steps]


def describe_proof(proof: Proof, exact: bool) -> str:
    """Return the result as one sentence."""
    difference = proof.difference
    if difference is None:
        return f"equal: {_describe_equality(proof, exact)}"
    name = difference.tensor
    if not name.startswith(difference.kind):
        name = f"{difference.kind} {name}"
    time = f"at step {difference.step}" if difference.step else "before the first step"
    amount = ""
    if difference.relative is not None:
        amount = f", by {difference.relative:.1e} relative"
    return (
        f"different: {name} {time}, {_format_sizes(difference.sizes)}{amount}."
        f" Likely cause: {difference.cause}"
    )


def _describe_equality(proof: Proof, exact: bool) -> str:
    if exact:
        compared = "every bit of every loss and weight"
    else:
        weight_tolerance = WEIGHT_TOLERANCE_FACTOR * DDP_TOLERANCE
        compared = f"losses within {DDP_TOLERANCE:g}, weights within {weight_tolerance:g}"
    resumed = ""
    if proof.resumed:
        chain = [size for size, _ in proof.resumed] + [proof.resumed[-1][1]]
        resumed = f", resumed {' > '.join(map(str, chain))}"
    return f"{compared}, in {proof.steps} steps {_format_sizes(proof.sizes)}{resumed}"


def _format_sizes(sizes: list[int]) -> str:
    """Return "on 1, 2 and 3 processes"; one number twice means two runs."""
    if len(sizes) == 2 and sizes[0] == sizes[1]:
        return f"in two runs {_format_sizes(sizes[:1])}"
    *first_sizes, last_size = map(str, sizes)
    text = f"{', '.join(first_sizes)} and {last_size}" if first_sizes else last_size
    return f"on {text} process{'' if sizes == [1] else 'es'}"
