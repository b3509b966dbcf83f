"""Parity of a script: runs on one process and on several, and what differs beyond rounding."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from stepladder.core.numbers import format_count
from stepladder.core.scratch import temporary_folder
from stepladder.core.signals import exit_on_signals
from stepladder.tools.check.check import Check, Request
from stepladder.tools.check.failure import NotChecked, choose_exit_code
from stepladder.tools.check.isolation.summary import Isolation, blame_refusal, summarize
from stepladder.tools.check.rank_processes import RankLaunch
from stepladder.tools.check.rules.evidence import RunEvidence
from stepladder.tools.check.script_runs import ScriptRun, ScriptRuns
from stepladder.tools.findings.finding import Catalogue, Finding
from stepladder.tools.parity.causes import NamedCause, find_cause, loader_line, processes
from stepladder.tools.parity.compare import FirstDifference, Runs, find_difference
from stepladder.tools.parity.events import PARITY_VARIABLE
from stepladder.tools.parity.steps import read_steps
from stepladder.tools.probe.attach import temporary_environment

PARITY_TEXTS = Catalogue("stepladder.tools.parity")
NO_OTHER_RANKS = (
    "the script does not ask for its rank: on several processes, each would do the same"
)
NOT_SEEDED = (
    "two runs with the same arguments begin with other weights or other samples: seed the script "
    "(torch.manual_seed before the model, a seeded generator or sampler for the order)"
)
LATE_HINT = "--timeout, or --steps 20"
NO_STEPS = "no optimizer step was seen: nothing can be compared"
NO_GRADIENTS = (
    "no parameter has a readable gradient under the same name in both runs: nothing can be compared"
)


@dataclass(frozen=True)
class Size:
    """A number of processes, and the arguments with which the script is started on them."""

    nproc: int
    args: tuple[str, ...] = ()


@dataclass(frozen=True)
class ParityRequest:
    """The request of the command.

    Args:
        check: How the script is run, as for `check`; its number of processes is not used.
        reference: The first size.
        compared: The second size.
    """

    check: Request
    reference: Size
    compared: Size


@dataclass(frozen=True)
class ParityReport:
    """The result of a comparison.

    Args:
        findings: The difference, if there is one, and what is legal.
        difference: Where the runs differ first; None where they are the same, but for what is
            legal.
        not_judged: Why the runs prove nothing.
        steps: The number of compared steps.
        sizes: The two numbers of processes, in words.
        notes: Remarks on how the script was run.
        isolation: What the script tried to change outside of its copy.
    """

    findings: list[Finding] = field(default_factory=list)
    difference: FirstDifference | None = None
    not_judged: NotChecked | None = None
    steps: int = 0
    sizes: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)
    isolation: Isolation | None = None

    @property
    def exit_code(self) -> int:
        return choose_exit_code(self.findings, self.not_judged)


class NotJudged(Exception):
    """A run that proves nothing.

    Args:
        reason: Why, for the report.
    """

    def __init__(self, reason: NotChecked) -> None:
        super().__init__(reason.line)
        self.reason = reason


class Parity:
    """The comparison of one script on two numbers of processes.

    Args:
        request: What to compare.
    """

    def __init__(self, request: ParityRequest) -> None:
        self.request = request
        self.check = Check(request.check, lambda _: None)
        self.runs = ScriptRuns(lambda _: None)

    def run(self) -> ParityReport:
        with exit_on_signals(), temporary_folder() as folder:
            return self.compare_in_scratch(folder.resolve())

    def compare_in_scratch(self, scratch_folder: Path) -> ParityReport:
        request = self.request
        args = (*request.reference.args, *request.compared.args)
        watched = temporary_environment(**{PARITY_VARIABLE: "1"})
        with watched, self.check.open_launch(scratch_folder, args) as launch:
            try:
                report = self.compare(launch)
            except NotJudged as error:
                report = ParityReport(not_judged=error.reason)
            isolation = summarize(launch.sandbox)
        return replace(
            report,
            not_judged=blame_refusal(report.not_judged),
            notes=[*self.check.notes, *self.runs.notes],
            isolation=isolation,
        )

    def compare(self, launch: RankLaunch) -> ParityReport:
        """Run the script on both sizes. If they differ, run both again without legal causes."""
        compared = self.run_first(launch)
        runs = self.run_references(compared, neutral=False)
        report = self.compare_runs(runs)
        legal = legal_causes(runs, report.difference)
        if not legal:
            return report
        neutral = self.run_size("neutral", compared.launch, self.request.compared, neutral=True)
        report = self.compare_runs(self.run_references(neutral, neutral=True))
        notes = [self.finding(runs, cause) for cause in legal]
        return replace(report, findings=[*report.findings, *notes])

    def run_first(self, launch: RankLaunch) -> ScriptRun:
        """Run the script on the second size, in the way in which it trains.

        Raises:
            NotJudged: It is no script for several processes, or has not trained.
        """
        compared = self.request.compared
        launch = replace(launch, nproc=compared.nproc, args=compared.args, nodes=1)
        run = self.runs.run(launch)
        if not (run.outcome.knows_other_ranks or run.outcome.failed):
            raise NotJudged(NotChecked("script", NO_OTHER_RANKS))
        return self.validate(run, compared)

    def run_size(
        self, name: str, launch: RankLaunch, size: Size, neutral: bool, perturbed: bool = False
    ) -> ScriptRun:
        """Run the script on one size, started as another run of it."""
        settings = replace(launch.settings, neutral=neutral, perturbed=perturbed)
        launch = replace(launch, nproc=size.nproc, args=size.args, settings=settings)
        return self.validate(self.runs.run_once(launch, name), size)

    def run_references(self, compared: ScriptRun, neutral: bool) -> Runs:
        """Run the reference and the perturbed reference as the compared run was started."""
        prefix = "neutral-" if neutral else ""
        size = self.request.reference
        launch = compared.launch
        reference = self.run_size(f"{prefix}reference", launch, size, neutral)
        perturbed = self.run_size(f"{prefix}perturbed", launch, size, neutral, perturbed=True)
        return Runs(*[read_steps(run.recording) for run in (reference, compared, perturbed)])

    def validate(self, run: ScriptRun, size: Size) -> ScriptRun:
        """Return a run that can be compared.

        Raises:
            NotJudged: It failed, or did not train on this number of processes.
        """
        outcome = run.outcome
        if outcome.failed and run.failure is not None:
            where = format_count(size.nproc, "process")
            raise NotJudged(replace(run.failure, line=f"on {where}: {run.failure.line}"))
        if outcome.late:
            line = f"the script was ended after {self.request.check.timeout:g} s: {LATE_HINT}"
            raise NotJudged(NotChecked("script", line, run.last_output))
        if outcome.has_stalled:
            line = f"the script stood still on {size.nproc} processes, and was ended"
            raise NotJudged(NotChecked("script", line, run.last_output))
        if not run.has_trained:
            raise NotJudged(NotChecked("no training", NO_STEPS, run.last_output))
        ranks = len(run.recording.ranks)
        if ranks != size.nproc:
            line = f"asked for {size.nproc} processes, the script has trained one model on {ranks}"
            raise NotJudged(NotChecked("script", line, run.last_output))
        return run

    def compare_runs(self, runs: Runs) -> ParityReport:
        """Return what differs first, and why."""
        if not runs.repeats:
            raise NotJudged(NotChecked("script", NOT_SEEDED))
        if not runs.common_steps:
            raise NotJudged(NotChecked("no training", NO_STEPS))
        if not have_common_gradients(runs):
            raise NotJudged(NotChecked("check", NO_GRADIENTS))
        sizes = (processes(runs.reference), processes(runs.compared))
        report = ParityReport(steps=runs.common_steps, sizes=sizes)
        difference = find_difference(runs)
        if difference is None:
            return report
        cause = find_cause(runs, difference)
        finding = self.finding(runs, cause)
        not_judged = None
        if finding.severity == "note":
            not_judged = NotChecked("script", f"{finding.what} Nothing after it was compared.")
        return replace(report, findings=[finding], difference=difference, not_judged=not_judged)

    def finding(self, runs: Runs, cause: NamedCause) -> Finding:
        evidence = RunEvidence(runs.compared.recording, self.check.source)
        return PARITY_TEXTS.finding(cause.rule, evidence.location(cause.line), cause.evidence)


def legal_causes(runs: Runs, difference: FirstDifference | None) -> list[NamedCause]:
    """Return what may legally explain that a tensor differs: what each rank draws or computes."""
    if difference is None or difference.deviation is None:
        return []
    steps = runs.compared.steps[: difference.step]
    causes = []
    for layer in ("dropout", "batch-norm"):
        calls = sum(step.count_calls()[layer] for step in steps)
        if calls:
            evidence = f"{calls} calls in training, in {len(steps)} steps of all ranks"
            causes.append(NamedCause(layer, evidence, steps[0].first.backward_line))
    if runs.reference.augments or runs.compared.augments:
        evidence = "random numbers are drawn while samples are fetched"
        causes.append(NamedCause("augmentation", evidence, loader_line(runs.compared)))
    return causes


def have_common_gradients(runs: Runs) -> bool:
    """Return whether both runs have gradients of the same parameters, by their names."""
    pairs = zip(runs.reference.steps, runs.compared.steps, strict=False)
    return any(reference.grads.keys() & compared.grads.keys() for reference, compared in pairs)


def compare_sizes(request: ParityRequest) -> ParityReport:
    return Parity(request).run()
