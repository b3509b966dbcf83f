"""Runs with frozen weights: the script on one process and on all ranks.

- `reference`: one process. Where the script needs several: all ranks.
- `compared`: all ranks. Where the script needs several: twice as many.

Where these differ, two more runs of the first kind tell which differences count:

- `shuffled`: other random numbers after the weights were made, and a faster clock. What differs
  from the reference may legally differ.
- `reweighted`: other weights. What differs from the reference is made of the model's outputs; what
  does not is a setting or a counter.
"""

from __future__ import annotations

import math
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from stepladder.tools.check.isolation.sandbox import Sandbox
from stepladder.tools.check.rank_processes import LaunchOutcome, RankLaunch, run_together
from stepladder.tools.check.recording import Recording, read_recording
from stepladder.tools.probe.events import CodeLine

Variant = Literal["plain", "shuffled", "reweighted"]
MAX_SECONDS = 120.0
MIN_SECONDS = 20.0
MAX_TIMES = 3  # as long as the first run
SAME_RATIO = 0.02  # the relative difference of ratios that are the same


@dataclass(frozen=True)
class Violation:
    """The first violation of a relation at one line.

    Args:
        relation: Its name, such as `shown-numbers`.
        line: The line of the user's code.
        certainty: How often the difference is larger than what is allowed.
        evidence: What was seen, in words.
        ratio: How many times the value of one process that of several is; nan if it is no multiple.
    """

    relation: str
    line: CodeLine | None
    certainty: float
    evidence: str
    ratio: float = math.nan


class NotComparable(Exception):
    """Runs with frozen weights prove nothing; the text says why.

    Args:
        reason: Why.
        run: The recording of the run that shows it, if there is one.
        needs_ranks: Whether the script ends, or waits, where there is one process.
    """

    def __init__(
        self, reason: str, run: Recording | None = None, needs_ranks: bool = False
    ) -> None:
        super().__init__(reason)
        self.run = run
        self.needs_ranks = needs_ranks


@dataclass(frozen=True)
class FrozenRuns:
    """The recordings of runs with frozen weights; the last two exist where they were needed."""

    reference: Recording
    compared: Recording
    shuffled: Recording | None = None
    reweighted: Recording | None = None

    @property
    def base(self) -> str:
        """What all ranks are compared with, in words."""
        return name_processes(len(self.reference.ranks))

    @property
    def factor(self) -> float:
        """How many times as many ranks are compared."""
        return len(self.compared.ranks) / len(self.reference.ranks)


class FrozenScript:
    """A script that is run with frozen weights.

    Args:
        launch: How the script was started when it trained.
        scratch: The folder of the check.
        ranks: The number of ranks of that run.
        neutral: Whether dropout, batch statistics and random augmentation have no effect.
        seconds: How long that run took.
    """

    def __init__(
        self,
        launch: RankLaunch,
        scratch: Path,
        ranks: int,
        neutral: bool = False,
        seconds: float = MAX_SECONDS,
    ) -> None:
        limits = MAX_SECONDS, MIN_SECONDS + MAX_TIMES * seconds, launch.timeout_s
        self.launch = replace(launch, timeout_s=min(limits))
        self.scratch = scratch
        self.ranks = ranks
        self.neutral = neutral

    def compare(self) -> FrozenRuns:
        """Run the script on one process and on all ranks, or on all and on twice as many.

        Raises:
            NotComparable: It does not train so.
        """
        try:
            return self.compare_on(1, self.ranks)
        except NotComparable as error:
            if error.needs_ranks:
                with suppress(NotComparable):
                    return self.compare_on(self.ranks, 2 * self.ranks)
            raise

    def compare_on(self, base: int, ranks: int) -> FrozenRuns:
        runs = self.run({"reference": "plain", "compared": "plain"}, base, ranks)
        if len(runs["compared"].ranks) != ranks or len(runs["reference"].ranks) != base:
            raise NotComparable("the script cannot be run on one process")
        return FrozenRuns(**runs)

    def measure_noise(self, runs: FrozenRuns) -> FrozenRuns:
        """Add the runs that tell which differences count.

        Raises:
            NotComparable: The script does not train so.
        """
        base = len(runs.reference.ranks)
        variants: dict[str, Variant] = {"shuffled": "shuffled", "reweighted": "reweighted"}
        return replace(runs, **self.run(variants, base))

    def run(self, variants: dict[str, Variant], base: int, ranks: int = 0) -> dict[str, Recording]:
        """Run the script in several variants, each in a copy of its own.

        They run at once. Where one fails they run one by one: two may serve at one port.

        Args:
            variants: How the weights are treated in each run, by its name.
            base: The number of processes of the runs that are compared with.
            ranks: The number of processes of the run that is compared.
        """
        prefix = f"{'neutral' if self.neutral else 'frozen'}-{base}"
        starts = {
            name: (kind, ranks if name == "compared" else base) for name, kind in variants.items()
        }
        outcomes = self.run_at_once(starts, prefix)
        if len(starts) > 1 and any(outcome.failed for outcome, _ in outcomes.values()):
            for name, start in starts.items():
                outcomes |= self.run_at_once({name: start}, f"{prefix}-alone")
        recordings = {}
        for name, (outcome, recording) in outcomes.items():
            if reason := reason_against(outcome, self.launch.timeout_s):
                text = f"with frozen weights ({name}) the script {reason}"
                needs_ranks = name == "reference" and base == 1 and not outcome.late
                raise NotComparable(text, recording, needs_ranks)
            recordings[name] = recording
        return recordings

    def run_at_once(
        self, starts: dict[str, tuple[Variant, int]], prefix: str
    ) -> dict[str, tuple[LaunchOutcome, Recording]]:
        with ExitStack() as stack:
            launches = {}
            for name, (variant, nproc) in starts.items():
                folders = replace(
                    self.launch.sandbox.folders, copy=self.scratch / f"{prefix}-{name}"
                )
                sandbox = stack.enter_context(closing(Sandbox(folders)))
                launches[f"{prefix}-{name}"] = self.launch_of(variant, sandbox, nproc)
            outcomes = run_together(launches)
        recorded = {}
        for name, (key, launch) in zip(starts, launches.items(), strict=True):
            outcome = outcomes[key]
            settings = launch.settings
            recording = read_recording(outcome.folder, settings.original, settings.copy)
            recorded[name] = outcome, outcome.complete(recording)
        return recorded

    def launch_of(self, variant: Variant, sandbox: Sandbox, nproc: int) -> RankLaunch:
        launch = self.launch
        settings = replace(
            launch.settings,
            frozen=variant,
            neutral=self.neutral,
            copy=str(sandbox.folders.copy),
            enough_after_s=-math.inf,
        )
        return replace(
            launch,
            settings=settings,
            sandbox=sandbox,
            nproc=nproc,
            nodes=1,  # so each rank has a local rank of its own, and a GPU
        )


def name_processes(number: int) -> str:
    return "one process" if number == 1 else f"{number} processes"


def reason_against(outcome: LaunchOutcome, timeout_s: float) -> str:
    """Return why a run proves nothing; empty where it was good."""
    if outcome.late:
        return f"takes more than {timeout_s:.0f} s"
    if outcome.has_stalled:
        return "stands still"
    return "fails" if outcome.failed else ""
