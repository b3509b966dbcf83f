"""The check of a script: static rules, a run in a copy of its folder, rules over the recording."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from pathlib import Path

from stepladder.core.errors import InputError
from stepladder.core.process_count import validate_process_count
from stepladder.core.scratch import temporary_folder
from stepladder.core.signals import exit_on_signals
from stepladder.tools.check.events import Forward, ModelDivided, OptimizerStep, Save
from stepladder.tools.check.failure import STOPPED_BY_USER, NotChecked, choose_exit_code
from stepladder.tools.check.fork_servers import ForkServers
from stepladder.tools.check.held import describe_run
from stepladder.tools.check.isolation.sandbox import Sandbox, SandboxFolders
from stepladder.tools.check.isolation.summary import Isolation, blame_refusal, summarize
from stepladder.tools.check.launch_style import LaunchStyle, find_styles, finds_what_is_missing
from stepladder.tools.check.preempt import rehearse
from stepladder.tools.check.probe_settings import ProbeSettings
from stepladder.tools.check.rank_processes import RankLaunch
from stepladder.tools.check.recording import Recording
from stepladder.tools.check.relations.comparison import (
    RELATIONS,
    causes_of,
    compare_with_one_process,
    describe_not_compared,
)
from stepladder.tools.check.relations.frozen_runs import FrozenScript, NotComparable
from stepladder.tools.check.resume import compare_resumed_run
from stepladder.tools.check.rules.all_rules import (
    add_measured_damage,
    apply_rules,
    apply_source_rules,
    drop_consequences,
    drop_known,
    drop_suppressed,
)
from stepladder.tools.check.rules.evidence import CHECK_TEXTS, Comparison, RunEvidence
from stepladder.tools.check.rules.process import shared_gpus
from stepladder.tools.check.run_summary import no_training, no_training_in_source, summarize_run
from stepladder.tools.check.script_runs import ScriptRun, ScriptRuns
from stepladder.tools.check.script_source import ScriptSource, read_source
from stepladder.tools.findings.finding import Finding, sort_by_severity

RESUME_NOT_COMPARED = "resume: not compared; to stop the script and start it again: --resume"
EXPLAINS_A_HANG = ("uneven-steps", "collective-order", "hang")
# Rules that examine the source as well as the recording: a finding of one is enough.
STATIC_AND_DYNAMIC_RULES = ("unsafe-load",)


@dataclass(frozen=True)
class Request:
    """The request of a check, as the flags of the command.

    Args:
        simulate_gpus: Whether GPUs are simulated from the first run on, and not only if the script
            fails without.
        writable_folders: Folders that the script may write for real.
        batches: The number of batches of each loader; 0 for all. With fewer the ranks are not
            compared with one process.
        root: The folder that is copied, in place of the working folder.
        resume_args: More arguments for the start that resumes.
        preempt: At how many moments the script is interrupted as a cluster does it.
        preempt_signal: The warning signal.
        shows_notes: Whether notes are shown that many sound scripts get.
        unsafe: Whether the script may run where no kernel protects the files outside the copy.
        relations_only: Whether no rule is applied, so that relations alone are judged.
        leaves: Whether the gradients of each rank alone are recorded.
        texts: The texts with which files of the script run, by their paths in the folder.
    """

    script: Path
    args: tuple[str, ...] = ()
    nproc: int = 2
    steps: int = 0
    epochs: int = 0
    batches: int = 0
    resume: bool = False
    static: bool = False
    timeout: float = 600.0
    patience: float = 25.0
    simulate_gpus: bool = False
    writable_folders: tuple[Path, ...] = ()
    root: Path | None = None
    resume_args: tuple[str, ...] = ()
    preempt: int = 0
    preempt_signal: int = signal.SIGTERM
    shows_notes: bool = False
    unsafe: bool = False
    relations_only: bool = False
    leaves: bool = False
    texts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """The result of a check.

    Args:
        findings: All findings, the most severe ones first.
        not_checked: Why the run proves nothing, if it failed or trained nothing.
        run_summary: What has run, in one line.
        held: What held, a line for each relation.
        notes: Remarks on how the script was run.
        isolation: What the script tried to change outside of its copy.
        folder: The folder to which the files of findings are relative.
        trains_alone: Whether the script trains in each process without the others.
        evidence: What the run recorded; None where nothing ran.
    """

    findings: list[Finding] = field(default_factory=list)
    not_checked: NotChecked | None = None
    run_summary: str = ""
    held: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    isolation: Isolation | None = None
    folder: Path = Path()
    trains_alone: bool = False
    evidence: RunEvidence | None = None

    @property
    def exit_code(self) -> int:
        return choose_exit_code(self.findings, self.not_checked)


OnFinding = Callable[[Finding], None]


class Check:
    """The check of one script.

    Args:
        request: What to check.
        on_finding: Called with each finding that is certain before the report, and only once. What
            the report says of it does not depend on the moment at which it was certain.
    """

    def __init__(self, request: Request, on_finding: OnFinding) -> None:
        self.request = request
        self.on_finding = on_finding
        self.script = request.script.absolute()
        self.styles = find_styles(self.script, Path.cwd(), request.root)
        self.style = self.styles[0]
        self.source: ScriptSource = read_source(self.script, self.style.root)
        self.findings: dict[tuple[str, str, int], Finding] = {}
        self.told: dict[tuple[str, str, int], Finding] = {}
        # Those of a start that is over; a later start may add to them, or drop consequences.
        self.preliminary_findings: list[Finding] = []
        self.notes: list[str] = []

    def run(self) -> Report:
        source_findings = apply_source_rules(self.source)
        self.add_findings(source_findings)
        report = Report(notes=self.notes)
        if not self.request.static:
            self.tell_early(source_findings)
            with exit_on_signals():
                try:
                    report = self.try_styles()
                except KeyboardInterrupt:
                    self.findings = self.told | self.findings
                    self.add_findings(self.preliminary_findings)
                    report = Report(not_checked=STOPPED_BY_USER, notes=self.notes)
        elif not self.findings:
            report = Report(not_checked=no_training_in_source(self.source), notes=self.notes)
        by_rule = sorted(self.findings.values(), key=attrgetter("rule"))
        findings = sort_by_severity(by_rule)
        return replace(report, findings=findings, folder=self.style.folder)

    @property
    def folder(self) -> Path:
        """The folder that is copied."""
        return self.style.root

    def try_styles(self) -> Report:
        """Check the script, and in another way if that finds a module or a file that was missing.

        Where no way helps, the report is that of the first one.
        """
        first_report = self.check_in_temporary_folder()
        for style in self.styles[1:]:
            if not finds_what_is_missing(style, first_report.not_checked):
                continue
            tried = self.style
            self.begin(style)
            try:
                report = self.check_in_temporary_folder()
            except InputError as error:
                first_report.notes.append(f"not started as {style}: {error.problem}")
            else:
                if not finds_what_is_missing(style, report.not_checked):
                    why = f"because a module or a file was not found as {tried}"
                    report.notes.append(f"started as {style}, {why}")
                    return report
            self.begin(tried)
        return first_report

    def check_in_temporary_folder(self) -> Report:
        with temporary_folder() as folder:
            return self.check_in_scratch(folder.resolve())

    def begin(self, style: LaunchStyle) -> None:
        """Forget the notes of an earlier way to start the script, and take this one."""
        self.notes = []
        if style.root != self.style.root:
            self.source = read_source(self.script, style.root)
        self.style = style

    def add_findings(self, findings: list[Finding]) -> None:
        """Add findings to the report; a later start knows more than an earlier one."""
        for finding in self.shown(findings):
            known_rules = {known for known, _, _ in self.findings}
            if finding.rule not in known_rules.intersection(STATIC_AND_DYNAMIC_RULES):
                self.findings[finding.key] = finding

    def tell_early(self, findings: list[Finding]) -> None:
        """Pass on the findings that were not passed on before."""
        for finding in self.shown(findings):
            if finding.key not in self.told:
                self.told[finding.key] = finding
                self.on_finding(finding)

    def shown(self, findings: list[Finding]) -> list[Finding]:
        """Return the findings that are asked for, as the user knows their files."""
        shown = []
        for finding in sort_by_severity(findings):
            if self.request.shows_notes or not CHECK_TEXTS.texts[finding.rule].on_request:
                shown.append(self.style.with_shown_path(finding))
        return shown

    def check_in_scratch(self, scratch_folder: Path) -> Report:
        with self.open_launch(scratch_folder, self.request.args) as launch:
            report = self.check_in_sandbox(scratch_folder, launch)
            isolation = summarize(launch.sandbox)
        not_checked = blame_refusal(report.not_checked)
        return replace(report, not_checked=not_checked, isolation=isolation)

    @contextmanager
    def open_launch(self, scratch_folder: Path, args: tuple[str, ...]) -> Iterator[RankLaunch]:
        """Open a sandbox, and yield how the script is started first.

        Args:
            scratch_folder: The folder of this check.
            args: The arguments of the script in any start, which may name folders.
        """
        (scratch_folder / "recordings").mkdir()
        folders = SandboxFolders(
            scratch_folder,
            scratch_folder / "copy",
            self.folder,
            args,
            self.request.writable_folders,
            is_unsafe=self.request.unsafe,
            texts=self.request.texts,
        )
        with closing(Sandbox(folders)) as sandbox, closing(ForkServers()) as servers:
            yield self.make_launch(scratch_folder, sandbox, servers)

    def check_in_sandbox(self, scratch_folder: Path, launch: RankLaunch) -> Report:
        runs = ScriptRuns(self.watch)
        run = runs.run(launch)
        self.notes += runs.notes
        launch.servers.preload(run.recording, launch.sandbox)
        evidence = RunEvidence(run.recording, self.source)
        findings = [] if self.request.relations_only else apply_rules(evidence)
        if self.request.batches:  # a shorter loader loses samples
            findings = [item for item in findings if family_of(item) != "data"]
        self.preliminary_findings = findings
        if run.launch.is_alone or run.launch.nodes == 1:
            findings += shared_gpus(evidence)
        not_checked = self.reason_not_checked(run, findings)
        held = list(describe_run(evidence))
        comparisons = self.compare(run, evidence, scratch_folder, findings)
        for comparison in comparisons if not not_checked else ():
            more = drop_suppressed(comparison.findings, self.source)
            findings = drop_consequences([*add_measured_damage(findings, more), *more])
            held += comparison.held
            self.notes += filter(None, [comparison.note])
            if comparison.not_checked:
                not_checked = NotChecked("resume", comparison.not_checked)
        if not self.request.resume and evidence.run.select(Save):
            held.append(RESUME_NOT_COMPARED)
        self.add_findings(findings)
        return Report(
            not_checked=not_checked,
            run_summary=summarize_run(run),
            held=held,
            notes=self.notes,
            trains_alone=run.recording.is_single_process and run.has_trained,
            evidence=evidence,
        )

    def compare_with_one(
        self, run: ScriptRun, evidence: RunEvidence, scratch_folder: Path, known: list[Finding]
    ) -> Comparison:
        """Compare the ranks with one process by frozen weights, where that can be."""
        ranks = len(run.recording.ranks)
        has_steps = bool(run.recording.select(OptimizerStep))
        is_divided = bool(run.recording.select(ModelDivided))
        is_cut = (
            bool(self.request.steps or self.request.batches)
            or run.outcome.late
            or run.outcome.failed
        )
        is_cut |= run.outcome.has_stalled
        if ranks < 2 or is_cut or not has_steps or is_divided:
            return Comparison()
        causes = causes_of(known)
        if len(causes) == len(RELATIONS):
            return Comparison(held=describe_not_compared(causes))
        calls = evidence.rank_0.select(Forward)
        # Dropout hides differences, and batch statistics of a share are others than those of all.
        neutral = any(event.grad and event.moded_on for event in calls)
        try:
            script = FrozenScript(run.launch, scratch_folder, ranks, neutral, run.outcome.seconds)
            comparison = compare_with_one_process(script, evidence, causes)
            return replace(comparison, findings=drop_known(comparison.findings, known))
        except NotComparable as error:
            held = [f"not compared with one process: {error}"]
            on_one_node = error.run
        findings = []
        if on_one_node and on_one_node.has_stalled and run.launch.nodes > 1:
            for finding in apply_rules(RunEvidence(on_one_node, self.source)):
                if finding.rule in EXPLAINS_A_HANG:
                    text = f"on one node, where each rank has a local rank: {finding.evidence}"
                    findings.append(replace(finding, evidence=text))
        return Comparison(findings, held=held)

    def compare(
        self, run: ScriptRun, evidence: RunEvidence, scratch_folder: Path, known: list[Finding]
    ) -> Iterator[Comparison]:
        """Yield the comparisons with other runs of the script: on one process, and restarted.

        Args:
            run: The run as it is.
            evidence: Its recording.
            scratch_folder: The folder of this check.
            known: What the rules have found.
        """
        request = self.request
        yield self.compare_with_one(run, evidence, scratch_folder, known)
        launch_in = partial(launch_in_new_copy, run.launch, scratch_folder)
        if request.resume:
            yield compare_resumed_run(evidence, launch_in("again"), request.resume_args)
        if request.preempt:
            moments = (request.preempt, request.preempt_signal, request.resume_args)
            yield rehearse(evidence, launch_in, *moments)

    def make_launch(
        self, scratch_folder: Path, sandbox: Sandbox, servers: ForkServers
    ) -> RankLaunch:
        """Return how the script is started first."""
        request = self.request
        settings = ProbeSettings(
            str(scratch_folder / "recordings"),
            roots=(str(scratch_folder), str(self.folder)),
            copy=str(sandbox.folders.copy),
            original=str(self.folder),
            epochs=request.epochs,
            steps=request.steps,
            batches=request.batches,
            leaves=request.leaves,
        )
        return RankLaunch(
            self.style.python_args,
            request.args,
            request.nproc,
            settings,
            sandbox,
            servers,
            folder=self.style.subfolder,
            gpus_available=True if request.simulate_gpus else None,
            timeout_s=request.timeout,
            patience_s=request.patience,
        )

    def watch(self, recording: Recording) -> None:
        """Pass on what is certain while the script still runs."""
        self.tell_early(apply_rules(RunEvidence(recording, self.source), early=True))

    def reason_not_checked(self, run: ScriptRun, findings: list[Finding]) -> NotChecked | None:
        """Return why a run proves nothing, unless a finding explains how it ended."""
        outcome = run.outcome
        is_explained = any(finding.rule in EXPLAINS_A_HANG for finding in findings)
        has_error = any(finding.severity == "error" for finding in findings)
        where = f": {outcome.position}" if outcome.position else ""
        if outcome.late:
            line = f"the script was ended after {self.request.timeout:g} s{where}"
            if where and not has_error:
                return NotChecked("script", f"{line}; if it only takes long: --timeout 3600")
            self.notes.append(f"{line}; to see more of it: --timeout 3600, or --steps 20")
        elif where and not outcome.has_stalled:
            self.notes.append(f"ranks have waited long{where}")
        elif outcome.has_stalled and not is_explained and not has_error:
            line = (
                f"the script failed by itself: it stood still for {self.request.patience:g} s, and "
                f"was ended{where}; or --patience 100"
            )
            return NotChecked("script", line)
        elif outcome.failed and not is_explained:
            return run.failure
        return None if run.has_trained else no_training(run)


def family_of(finding: Finding) -> str:
    return CHECK_TEXTS.texts[finding.rule].family


def launch_in_new_copy(launch: RankLaunch, scratch_folder: Path, name: str) -> RankLaunch:
    """Return the launch in another copy, of this name, for one more run."""
    copy = scratch_folder / name
    launch.sandbox.move_to(copy, keep_changes=True)
    roots = (str(scratch_folder), *launch.settings.roots[1:])
    return replace(launch, settings=replace(launch.settings, copy=str(copy), roots=roots))


def check(request: Request, on_finding: OnFinding = lambda _: None) -> Report:
    validate_process_count(request.nproc)
    return Check(request, on_finding).run()
