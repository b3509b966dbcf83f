"""The check of a script: static rules, runs in a copy of its folder, rules over what was recorded."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from stepladder.core.cores import refuse_too_many
from stepladder.core.scratch import scratch
from stepladder.core.signals import leaving_on_signals
from stepladder.tools.check.copying import copy_folder
from stepladder.tools.check.finding import Fault, worst_first
from stepladder.tools.check.ranks import Launched, RankLaunch, run_ranks
from stepladder.tools.check.recording import Recording, read
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
NODE_WORDS = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "local_rank", "lightning")  # a script that knows its node
LOOK = 1.5  # seconds between looks at a run that is under way


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
    gpus: bool = False  # pretended from the first run on, and not only where the script fails without


@dataclass
class Report:
    """What was found. output: the failing rank's own words, where the script failed by itself."""

    faults: list[Fault] = field(default_factory=list)
    output: str = ""
    ran: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def code(self) -> int:
        if any(fault.severity != "note" for fault in self.faults):
            return 1
        return 3 if self.output else 0


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
        self.looked = 0.0
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
            with leaving_on_signals(), tempfile.TemporaryDirectory(dir=scratch()) as place:
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
        start = self.start_in(place)
        attempt, start = self.attempt(start)
        recording = self.recording(attempt, start)
        found = judge(Seen(recording, self.source))
        if attempt.failed or attempt.late or attempt.stalled:
            self.say_failure(attempt, found)
        self.say_what_ran(recording, attempt)
        if self.request.resume and not self.report.output:
            faults, note = resumed_faults(
                Seen(recording, self.source), replace(start, settings=self.fresh(start, place))
            )
            found = without_consequences([*found, *faults])
            self.report.notes += [note] if note else []
        self.add(found)

    def fresh(self, start: RankLaunch, place: Path) -> ProbeSettings:
        """Another copy, for the run that is stopped."""
        copy_folder(self.folder, place / "again")
        return replace(start.settings, copy=str(place / "again"), roots=(str(place), *start.settings.roots[1:]))

    def start_in(self, place: Path) -> RankLaunch:
        copy = place / "copy"
        copy_folder(self.folder, copy)
        (place / "recordings").mkdir()
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
            str(script), self.request.args, self.request.nproc, settings, pretends, self.request.gpus,
            alone=single or spawns,
        )  # fmt: skip
        nodes = 1 if self.source.has("lightning") else 2  # it refuses ranks that it has not counted itself
        return replace(start, nodes=nodes, seconds=self.request.timeout, patience=self.request.patience)

    def attempt(self, start: RankLaunch) -> tuple[Launched, RankLaunch]:
        """Again as one process where the script makes its ranks itself, with GPUs where it needs them."""
        attempt = run_ranks(start, "run", self.watch(start))
        if attempt.spawns:
            start = replace(start, alone=True)
            attempt = run_ranks(start, "alone", self.watch(start))
        if attempt.failed and not start.alone and start.nodes > 1 and self.source.has(*NODE_WORDS):
            start = replace(start, nodes=1)
            attempt = run_ranks(start, "one-node", self.watch(start))
        if start.pretends and not start.gpus and wants_gpus(attempt):
            start = replace(start, gpus=True)
            attempt = run_ranks(start, "gpus", self.watch(start))
        return attempt, start

    def watch(self, start: RankLaunch) -> Callable[[Path], None]:
        def look(folder: Path) -> None:
            if (
                time.monotonic() - self.looked < LOOK
                or sum(p.stat().st_size for p in folder.glob("*.jsonl")) > 4 << 20
            ):
                return
            recording = read(folder, str(self.folder), start.settings.copy)
            self.add(judge(Seen(recording, self.source), early=True))
            self.looked = time.monotonic()

        return look

    def recording(self, attempt: Launched, start: RankLaunch) -> Recording:
        recording = read(attempt.folder, str(self.folder), start.settings.copy)
        recording.stalled = attempt.stalled or attempt.failed
        recording.finished = all(code == 0 for code in attempt.codes)
        recording.single = start.alone
        return recording

    def say_failure(self, attempt: Launched, found: list[Fault]) -> None:
        explained = any(fault.rule in ("uneven-steps", "collective-order") for fault in found)
        if attempt.stalled or explained:
            return
        if attempt.late:
            self.report.notes.append(
                f"the script was ended after {self.request.timeout:g} s: --timeout, or --steps 20"
            )
            return
        rank = next((rank for rank, code in enumerate(attempt.codes) if code not in (0, None)), 0)
        self.report.output = attempt.output(rank).rstrip() or f"exit code {attempt.codes[rank]}"

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
        self.report.ran = f"{len(recording.ranks)} ranks, {epochs} epochs, {steps} steps on each, {end}"


def wants_gpus(attempt: Launched) -> bool:
    """The script asked whether there are any, and then failed, or left without a look at a model."""
    seen = read(attempt.folder)
    return bool(seen.of("asked")) and (attempt.failed or not seen.of("forward", "backward", "step", "coll"))


def check(request: Request, tell: Tell = lambda _: None) -> Report:
    refuse_too_many(request.nproc)
    return Check(request, tell).run()
