"""The check of a script: static rules, runs in a copy of its folder, rules over what was recorded."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

from stepladder.core.process_count import validate_process_count
from stepladder.core.scratch import get_scratch_folder
from stepladder.core.signals import exit_on_signals
from stepladder.tools.check.attempts import ScriptRun, ScriptRuns
from stepladder.tools.check.failure import NotChecked
from stepladder.tools.check.finding import Fault, worst_first
from stepladder.tools.check.isolation.report import Isolation, blame_refusal, describe
from stepladder.tools.check.isolation.sandbox import Protected, Sandbox
from stepladder.tools.check.ranks import Launched, RankLaunch
from stepladder.tools.check.recording import Recording
from stepladder.tools.check.resume import resumed_faults
from stepladder.tools.check.rules.base import Seen
from stepladder.tools.check.rules.every import judge, without_consequences
from stepladder.tools.check.rules.static import ALWAYS, judge_static
from stepladder.tools.check.settings import ProbeSettings
from stepladder.tools.check.tree import Code, read_source

GPU_WORDS = ("cuda", "nccl", "torch.accelerator", "accelerate", "lightning")
GROUP_WORDS = (
    "torch.distributed",
    "init_process_group",
    "accelerate",
    "lightning",
    "RANK",
    "torch.multiprocessing",
    "dist.",
)


@dataclass(frozen=True)
class Request:
    """What was asked for: flags of the command."""

    script: Path
    args: tuple[str, ...] = ()
    nproc: int = 2
    steps: int = 0
    epochs: int = 0
    resume: bool = False
    static: bool = False
    timeout: float = 600.0
    patience: float = 25.0
    gpus: bool = (
        False  # pretended from the first run on, and not only where the script fails without
    )
    writes: tuple[Path, ...] = ()  # folders that the script may write for real


@dataclass
class Report:
    """What was found. not_checked: why the run proves nothing, where it broke off or trained
    nothing.
    """

    faults: list[Fault] = field(default_factory=list)
    not_checked: NotChecked | None = None
    ran: str = ""
    notes: list[str] = field(default_factory=list)
    isolation: Isolation | None = None

    @property
    def code(self) -> int:
        if any(fault.severity != "note" for fault in self.faults):
            return 1
        return 3 if self.not_checked else 0


Tell = Callable[[Fault], None]


class Check:
    """One script's check. tell: called with each finding as soon as it is certain."""

    def __init__(self, request: Request, tell: Tell) -> None:
        self.request, self.tell = request, tell
        self.folder = Path.cwd()
        script = request.script.absolute()
        if not script.is_relative_to(self.folder):
            self.folder = script.parent
        self.source: Code = read_source(script, self.folder)
        self.told: dict[tuple[str, str, int], Fault] = {}
        self.report = Report()

    def run(self) -> Report:
        rules = {} if self.request.static else {"only": ALWAYS}
        self.add(
            [
                f
                for f in judge_static(self.source, **rules)
                if not self.source.ignored(f.rule, f.place.file, f.place.line)
            ]
        )
        if not self.request.static:
            with exit_on_signals(), tempfile.TemporaryDirectory(dir=get_scratch_folder()) as place:
                self.run_in(Path(place).resolve())
        self.report.faults = worst_first(list(self.told.values()))
        return self.report

    def add(self, faults: list[Fault]) -> None:
        for fault in faults:
            if fault.key not in self.told and not self.same_elsewhere(fault):
                self.told[fault.key] = fault
                self.tell(fault)

    def same_elsewhere(self, fault: Fault) -> bool:
        """Rules that are asked twice, of the source and of the run, speak once."""
        return fault.rule in ("unsafe-load", "cuda-only", "no-destroy") and any(
            rule == fault.rule for rule, *_ in self.told
        )

    def run_in(self, place: Path) -> None:
        (place / "recordings").mkdir()
        protected = Protected(
            place, place / "copy", self.folder, self.request.args, self.request.writes
        )
        with closing(Sandbox(protected)) as sandbox:
            self.run_isolated(place, sandbox)
            self.report.isolation = describe(sandbox)
        self.report.not_checked = blame_refusal(self.report.not_checked, self.report.isolation)

    def run_isolated(self, place: Path, sandbox: Sandbox) -> None:
        attempts = ScriptRuns(self.source, self.tell_early)
        attempt = attempts.run(self.start_in(place, sandbox))
        self.report.notes += attempts.notes
        recording = attempt.recording
        found = judge(Seen(recording, self.source))
        self.report.not_checked = self.why_not_checked(attempt, found)
        self.say_what_ran(recording, attempt.launched)
        if self.request.resume and not self.report.not_checked:
            start = self.fresh(attempt.launch, place)
            faults, note = resumed_faults(Seen(recording, self.source), start)
            found = without_consequences([*found, *faults])
            self.report.notes += [note] if note else []
        self.add(found)

    def fresh(self, start: RankLaunch, place: Path) -> RankLaunch:
        """Another copy, for the run that is stopped."""
        copy = place / "again"
        start.sandbox.move_to(copy, keeps_written=True)
        settings = replace(
            start.settings, copy=str(copy), roots=(str(place), *start.settings.roots[1:])
        )
        return replace(start, settings=settings)

    def start_in(self, place: Path, sandbox: Sandbox) -> RankLaunch:
        copy = sandbox.protected.copy
        script = self.request.script.absolute().relative_to(self.folder)
        roots = (str(place), str(self.folder))
        settings = ProbeSettings(str(place / "recordings"), roots, str(copy), str(self.folder))
        settings = replace(settings, epochs=self.request.epochs, steps=self.request.steps)
        single = not self.source.has(*GROUP_WORDS)
        spawns = self.source.has("mp.spawn(", "start_processes(") and not self.source.has("RANK")
        if single:
            self.report.notes.append("the script knows no other ranks: it was run as one process")
        pretends = self.request.gpus or self.source.has(*GPU_WORDS)
        start = RankLaunch(
            str(script),
            self.request.args,
            self.request.nproc,
            settings,
            sandbox,
            pretends,
            self.request.gpus,
            alone=single or spawns,
        )
        nodes = (
            1 if self.source.has("lightning") else 2
        )  # it refuses ranks that it has not counted itself
        return replace(
            start, nodes=nodes, seconds=self.request.timeout, patience=self.request.patience
        )

    def tell_early(self, recording: Recording) -> None:
        """Tell what is certain while the script still runs."""
        self.add(judge(Seen(recording, self.source), early=True))

    def why_not_checked(self, attempt: ScriptRun, found: list[Fault]) -> NotChecked | None:
        """Return why this run of the script proves nothing, where no finding explains how it ended."""
        launched = attempt.launched
        explained = any(fault.rule in ("uneven-steps", "collective-order") for fault in found)
        if launched.late:
            self.report.notes.append(
                f"the script was ended after {self.request.timeout:g} s: --timeout, or --steps 20"
            )
        elif (
            launched.stalled
            and not explained
            and not any(fault.severity == "error" for fault in found)
        ):
            seconds = f"{self.request.patience:g}"
            line = f"the script failed by itself: it stood still for {seconds} s, and was ended; or --patience 100"
            return NotChecked("script", line)
        elif launched.failed and not explained:
            return attempt.failure
        return None if attempt.trains else no_training(attempt)

    def say_what_ran(self, recording: Recording, attempt: Launched) -> None:
        first = recording.ranks[0] if recording.ranks else None
        steps = len(first.of("step")) if first else 0
        epochs = len(first.training) if first else 0
        end = (
            "then it stood still"
            if attempt.stalled
            else "then the check ended it"
            if recording.of("enough")
            else "to its end"
        )
        self.report.ran = (
            f"{len(recording.ranks)} ranks, {epochs} epochs, {steps} steps on each, {end}"
        )


def no_training(attempt: ScriptRun) -> NotChecked:
    end = "was ended" if attempt.launched.late or attempt.launched.stalled else "ended"
    line = f"no training was seen: the script {end} without an optimizer step and without a backward pass"
    return NotChecked("no training", line, attempt.printed)


def check(request: Request, tell: Tell = lambda _: None) -> Report:
    validate_process_count(request.nproc)
    return Check(request, tell).run()
