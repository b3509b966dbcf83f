"""Trains the same steps on several numbers of processes, resumes on others, compares, and says what
differs.
"""

from __future__ import annotations

import json
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
from stepladder.core.scratch import get_scratch_folder
from stepladder.core.settings import Settings, TrainRequest
from stepladder.storage.run_files import CONFIG_FILE
from stepladder.tools.local_ranks import run_on_ranks
from stepladder.tools.verify.causes import NONDETERMINISTIC, Symptoms, answer, likely_cause
from stepladder.tools.verify.trial import (
    WEIGHTS_TO_LOSS,
    Difference,
    Trial,
    first_difference,
    train_part,
)

DEFAULT_SIZES = [1, 2, 3]
HEADER = f"{'processes':<12} steps  {'last loss':<20} {'weights_sha256':<16}  ledger"
DDP_TOLERANCE = 1e-5  # relative; in exact mode every bit counts


@dataclass(frozen=True)
class Proof:
    """What was trained, and where it first differed. resumed: [from, to] numbers of processes."""

    sizes: list[int]
    resumed: list[list[int]]
    steps: int
    difference: Difference | None
    weights_sha256: str | None

    def as_json(self) -> dict[str, Any]:
        first = None
        if found := self.difference:
            first = {name: value for name, value in asdict(found).items() if name != "relative"}
        return {
            "schema": 1,
            "equal": first is None,
            "sizes": self.sizes,
            "resumed": self.resumed,
            "steps": self.steps,
            "first_difference": first,
            "weights_sha256": self.weights_sha256,
        }


def prove(
    job_file: Path,
    given: dict[str, Any],
    settings: Settings,
    sizes: list[int] | None = None,
    steps: int | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Proof:
    """Train the job of `job_file` on each number of processes, and compare losses and weights at
    every step.

    given: fields of its Config.  steps: None for about 12, never more than the job has.  say: gets
    a line per training.  Raises InputError where the job, or a number of processes, cannot be
    trained."""
    if settings.batch_per_rank is not None:
        raise InputError(
            "with --batch-per-rank the batch grows with the processes", "--global-batch B"
        )
    if steps is not None and steps < 2:
        raise InputError(f"--steps {steps} leaves no step to resume at", "--steps 2 or more")
    validate_process_count(max(sizes or DEFAULT_SIZES))
    settings = replace(settings, steps=None, threads=settings.threads or 1)
    with tempfile.TemporaryDirectory(dir=get_scratch_folder()) as folder:
        return Comparison(Path(folder), TrainRequest(job_file, given, settings), steps, say).run(
            sizes
        )


class Comparison:
    """The first training is the reference; each other one is compared with it, and forgotten."""

    def __init__(
        self, folder: Path, request: TrainRequest, steps: int | None, say: Callable[[str], None]
    ) -> None:
        self.folder, self.request, self.steps, self.say = folder, request, steps, say
        self.tolerance = 0.0 if request.settings.sync == "exact" else DDP_TOLERANCE
        self.trials = 0

    def run(self, asked: list[int] | None) -> Proof:
        first = (asked or DEFAULT_SIZES)[0]
        reference = self.train([first])
        if (found := self.own(reference)) is not None:
            return Proof([first], [], reference.steps, found, reference.weights_sha256)
        most = Plan.from_json(reference.read(CONFIG_FILE)["plan"]).num_microbatches
        sizes = asked or [size for size in DEFAULT_SIZES if size <= most]
        chain = ([*sizes[-1:], *sizes[:-1]] if len(sizes) > 1 else sizes * 2)[: reference.steps]
        done, resumed = [first], []
        for size in sizes[1:]:
            if found is None:
                found = self.compare(reference, [size])
                done.append(size)
        if found is None and len(chain) > 1:
            found = self.compare(reference, chain)
            resumed = [list(pair) for pair in pairwise(chain)]
        return Proof(done, resumed, reference.steps, found, reference.weights_sha256)

    def own(self, trial: Trial) -> Difference | None:
        """A difference within one training; a row of the table where there is none."""
        found = trial.own_difference()
        if found is None:
            last = list(trial.losses().values())[-1]
            sizes = " > ".join(map(str, trial.sizes))
            if self.trials == 1:
                self.say(HEADER)
            self.say(
                f"{sizes:<12} {trial.steps:>5}  {last:<20.12g} {(trial.weights_sha256 or '')[:16]}  ok"
            )
        return found

    def compare(self, reference: Trial, sizes: list[int]) -> Difference | None:
        """Train on `sizes` and compare; a difference comes with its likely cause."""
        other = self.train(sizes)
        broken = self.own(other)
        found = broken or first_difference(reference, other, self.tolerance)
        if found is None:
            shutil.rmtree(other.folder)
            return None
        return self.repeated(reference, other, broken) or self.explained(found, reference, other)

    def repeated(
        self, reference: Trial, other: Trial, broken: Difference | None
    ) -> Difference | None:
        """The difference between two equal runs, if there is one: then no number of processes is to
        blame.
        """
        for trial in [reference] if broken or len(other.sizes) > 1 else [reference, other]:
            again = self.train(trial.sizes)
            if again.own_difference() is None and (
                found := first_difference(trial, again, self.tolerance)
            ):
                return replace(found, cause=NONDETERMINISTIC)
            shutil.rmtree(again.folder)
        return None

    def explained(self, found: Difference, reference: Trial, other: Trial) -> Difference:
        if found.cause:
            return found
        answers = [
            answer for size in sorted({*reference.sizes, *other.sizes}) for answer in self.ask(size)
        ]
        symptoms = Symptoms(found, answers, self.request.settings, resumed=len(other.sizes) > 1)
        return replace(found, cause=likely_cause(symptoms))

    def train(self, sizes: list[int]) -> Trial:
        """Train on so many processes; with several numbers, stop and resume on the next one."""
        self.trials += 1
        trial = Trial(self.folder / f"trial-{self.trials}", sizes)
        settings = replace(
            self.request.settings,
            run_dir=trial.folder,
            snapshot_every=1,
            keep=10**9,
            guard_every=1,
            progress=False,
        )
        for number, size in enumerate(sizes, 1):
            request = replace(self.request, settings=settings)
            try:
                self._on_ranks(size, partial(train_part, request, self.steps, number, len(sizes)))
            except InputError:
                if not trial.stopped:
                    raise
            if trial.stopped:
                break
        return trial

    def ask(self, size: int) -> list[dict[str, Any]]:
        """Every rank's answers about the job, on so many processes."""
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            self._on_ranks(size, partial(answer, self.request, Path(folder)))
            return [
                json.loads((Path(folder) / f"{rank}.json").read_bytes()) for rank in range(size)
            ]

    def _on_ranks(self, size: int, work: Callable[[], int]) -> None:
        run_on_ranks(work, size, self.request.settings.threads or 1, self.request)


def verdict(proof: Proof, exact: bool) -> str:
    """One sentence."""
    found = proof.difference
    if found is None:
        about = (
            f"losses within {DDP_TOLERANCE:g}, weights within {WEIGHTS_TO_LOSS * DDP_TOLERANCE:g}"
        )
        how = "every bit of every loss and weight" if exact else about
        chain = [a for a, _ in proof.resumed] + [b for _, b in proof.resumed[-1:]]
        resumed = f", resumed {' > '.join(map(str, chain))}" if chain else ""
        return f"equal: {how}, in {proof.steps} steps {where(proof.sizes)}{resumed}"
    name = found.kind if found.tensor.startswith(found.kind) else f"{found.kind} {found.tensor}"
    when = f"at step {found.step}" if found.step else "before the first step"
    by = "" if found.relative is None else f", by {found.relative:.1e} relative"
    return f"different: {name} {when}, {where(found.sizes)}{by}. Likely cause: {found.cause}"


def where(sizes: list[int]) -> str:
    """As in: on 1, 2 and 3 processes. One number twice means two runs."""
    if len(sizes) == 2 and sizes[0] == sizes[1]:
        return f"in two runs {where(sizes[:1])}"
    before = f"{', '.join(map(str, sizes[:-1]))} and " if len(sizes) > 1 else ""
    return f"on {before}{sizes[-1]} process{'' if sizes == [1] else 'es'}"
