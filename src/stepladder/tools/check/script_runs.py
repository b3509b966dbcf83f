"""Runs of the script until it trains: alone if it makes its own ranks, on one node, with GPUs."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from stepladder.tools.check.events import (
    AutogradCall,
    Backward,
    FabricStart,
    Forward,
    GpuQuery,
    GroupInit,
    GroupJoined,
    ModelDivided,
    OptimizerStep,
    OtherGroup,
    PassStart,
    RankOption,
    Refusal,
    ScriptCollective,
    SpawnsRanks,
)
from stepladder.tools.check.failure import (
    WAITED_TOO_LONG,
    Folders,
    NotChecked,
    classify_failure,
    hide_check_frames,
)
from stepladder.tools.check.isolation.sandbox import OVERLAID_SUFFIX
from stepladder.tools.check.rank_processes import LaunchOutcome, RankLaunch, run_ranks
from stepladder.tools.check.recording import Recording, read_recording, read_refused_paths

TRAINING_EVENTS = (OptimizerStep, Backward, AutogradCall)
WORKING_EVENTS = (Forward, Backward, OptimizerStep, ScriptCollective)
EARLY_READ_INTERVAL_S = 1.5
MAX_BYTES_READ_EARLY = 4 << 20
MAX_SHOWN_LINES = 20

LOST_PEER = re.compile(
    r"Connection (?:closed|reset|refused) ?(?:by peer)?|Broken pipe|recvVal failed"
)
NO_DATA_PARALLELISM = "the script is not data parallel: rules that compare ranks do not apply"
MAKES_ITS_RANKS = "the script makes its ranks itself: it was started as one process"
KNOWS_NO_RANKS = "the script does not ask for its rank: it was run as one process"
RAN_ALONE = "the script's processes never meet in a process group: it was run alone, as one process"
RANKS_NOT_COMPARED = (
    "the script's processes never meet in a process group: rules that compare ranks do not apply"
)

Watch = Callable[[Recording], None]


@dataclass(frozen=True)
class ScriptRun:
    """One start of the script: how it was started, how it ended, and what was recorded."""

    launch: RankLaunch
    outcome: LaunchOutcome
    recording: Recording

    @property
    def last_output(self) -> str:
        """The last lines that the first rank has printed."""
        output = hide_check_frames(self.outcome.output(0), self.folders)
        return "\n".join(output.rstrip().splitlines()[-MAX_SHOWN_LINES:])

    @property
    def has_trained(self) -> bool:
        """Whether any process has trained, also one that the script has made itself."""
        logs = [*self.recording.ranks, *self.recording.other_processes]
        return any(log.select(*TRAINING_EVENTS) for log in logs)

    @property
    def is_successful(self) -> bool:
        return bool(self.recording.select(*WORKING_EVENTS)) and not self.outcome.failed

    @property
    def depends_on_gpus(self) -> bool:
        """Whether another answer of `is_available` may help.

        It may if the script has asked and then failed, or done no work, or if a simulation failed.
        """
        if self.is_successful or self.outcome.late:
            return False
        has_asked = bool(self.recording.select(GpuQuery))
        return has_asked or (self.failure is not None and self.failure.cause == "check")

    @property
    def stood_still(self) -> bool:
        """Whether ranks waited for each other until the check ended them, or their own time-out."""
        outcome = self.outcome
        outputs = map(outcome.output, outcome.failed_ranks)
        has_timed_out = outcome.failed and any(map(WAITED_TOO_LONG.search, outputs))
        return outcome.has_stalled or (has_timed_out and not outcome.has_raised)

    @property
    def folders(self) -> Folders:
        return Folders(self.launch.settings.copy, self.launch.settings.original)

    @property
    def failure(self) -> NotChecked | None:
        """The reason why ranks have failed: a failure of the check on any rank comes first."""
        failures = []
        for rank in self.outcome.failed_ranks if self.outcome.failed else ():
            output = self.outcome.output(rank).rstrip()
            code = self.outcome.codes[rank] or 0
            if code < 0 or not output:
                output = f"{output}\nexit code {code}".lstrip()
            failure = classify_failure(output, self.folders)
            failures.append(failure)
        if not failures:
            return None
        by_check = [failure for failure in failures if failure.cause == "check"]
        first_to_fail = [failure for failure in failures if not LOST_PEER.search(failure.output)]
        return [*by_check, *first_to_fail, *failures][0]


class ScriptRuns:
    """Starts one script as often as necessary.

    Args:
        watch: Called now and then with the recording of a start that will not be repeated.
    """

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.notes: list[str] = []
        self.last_read = 0.0
        self.used_copy: Path | None = None

    def run(self, launch: RankLaunch) -> ScriptRun:
        """Run the script, and return the run that counts. All others leave no trace."""
        run = self.run_on_nodes(launch, "run")
        if run.depends_on_gpus and launch.gpus_available is None:
            has_gpus = any(event.answer for _, event in run.recording.select(GpuQuery))
            second_launch = replace(run.launch, gpus_available=not has_gpus)
            second = self.run_on_nodes(second_launch, "no-gpus" if has_gpus else "gpus")
            if second.is_successful or second.launch.gpus_available:
                run = second
        self.notes += notes_on_start(run)
        return self.rerun_if_separate(run)

    def run_on_nodes(self, launch: RankLaunch, name: str) -> ScriptRun:
        """Run the script on two simulated nodes.

        Run it on one if that fails, and the script knows its node, or if it is for one node.
        """
        run = self.run_once(launch, name)
        has_nodes = run.launch.nodes > 1 and not run.launch.is_alone
        may_need_one = run.outcome.failed and run.recording.asks_for_local_rank
        if has_nodes and (may_need_one or run.recording.is_for_one_node):
            run = self.run_once(replace(run.launch, nodes=1), f"{name}-one-node")
        return run

    def run_once(self, launch: RankLaunch, name: str) -> ScriptRun:
        """Run the script, and once more if it was started in a wrong way.

        What its processes do tells that. It is also started again, with more overlays, if a change
        outside the copy was refused that an overlay allows.
        """
        launch, outcome = self.start(launch, name)
        if other := launch.other_start(outcome):
            name = f"{name}-other"
            first = launch
            launch, outcome = self.start(other, name)
            knew_later = launch.is_alone and not launch.spawns and outcome.knows_other_ranks
            if outcome.failed and knew_later:
                name = f"{name}-ranks"  # it has made steps before it asked for its rank
                launch, outcome = self.start(replace(first, keeps_copies=True), name)
        refused = read_refused_paths(outcome.folder)
        if launch.sandbox.can_cover(refused):
            launch, outcome = self.start(launch, f"{name}{OVERLAID_SUFFIX}", refused)
        return self.read_run(launch, outcome)

    def start(
        self, launch: RankLaunch, name: str, written_paths: Sequence[str] = ()
    ) -> tuple[RankLaunch, LaunchOutcome]:
        """Start the script in a fresh copy, and return how it was started and how it ended."""
        launch = self.with_fresh_copy(launch, name, written_paths)
        return launch, run_ranks(launch, name, self.make_watcher(launch))

    def read_run(self, launch: RankLaunch, outcome: LaunchOutcome) -> ScriptRun:
        """Return a start that is over, with its recording."""
        recording = outcome.complete(self.read_recording(outcome.folder, launch))
        return ScriptRun(launch, outcome, recording)

    def with_fresh_copy(
        self, launch: RankLaunch, name: str, written_paths: Sequence[str] = ()
    ) -> RankLaunch:
        """Return a launch in a copy without the files that an earlier start has written.

        The script may resume from those.

        Args:
            launch: How the script is started.
            name: The name of this start.
            written_paths: Paths outside the copy that the script was seen to write.
        """
        copy = Path(launch.settings.copy)
        if self.used_copy is not None:
            shutil.rmtree(self.used_copy, ignore_errors=True)
            copy = copy.parent / f"copy-{name}"
            launch.sandbox.move_to(copy, written_paths)
        self.used_copy = copy
        return replace(launch, settings=replace(launch.settings, copy=str(copy)))

    def rerun_if_separate(self, run: ScriptRun) -> ScriptRun:
        """Run a one-process command as such: ranks that never make a group are copies of it.

        The run with ranks counts if the script fails alone, or if it failed and could have made a
        group later.
        """
        if run.recording.select(ModelDivided):
            self.notes.append(NO_DATA_PARALLELISM)
            return run
        could_make_group = run.outcome.failed and bool(run.recording.ranks_asked_for)
        is_certain = run.launch.is_alone or run.outcome.late or could_make_group
        if is_certain or not self.are_separate(run.recording):
            return run
        note = RAN_ALONE if run.recording.ranks_asked_for else KNOWS_NO_RANKS
        alone = self.run_once(replace(run.launch, is_alone=True), "one-process")
        if alone.outcome.failed:
            note = RANKS_NOT_COMPARED
            alone = run
        if not alone.outcome.failed:
            self.notes.append(note)
        return alone

    def make_watcher(self, launch: RankLaunch) -> Callable[[Path], None]:
        """Return a function that passes on the recording of a run, unless it will be repeated."""

        def read_and_watch(folder: Path) -> None:
            is_early = time.monotonic() - self.last_read < EARLY_READ_INTERVAL_S
            if is_early or size_of_recordings(folder) > MAX_BYTES_READ_EARLY:
                return
            recording = self.read_recording(folder, launch)
            has_group = launch.is_alone or recording.select(GroupJoined)
            if has_group and not may_be_repeated(recording, launch):
                self.watch(recording)
            self.last_read = time.monotonic()

        return read_and_watch

    def read_recording(self, folder: Path, launch: RankLaunch) -> Recording:
        recording = read_recording(folder, launch.settings.original, launch.settings.copy)
        recording = replace(recording, is_single_process=launch.is_alone)
        if self.are_separate(recording) or recording.select(ModelDivided):
            return recording.as_single_process()
        return recording

    def are_separate(self, recording: Recording) -> bool:
        """Return whether the ranks have nothing to do with each other.

        Workers that the script has made itself, and that train nothing, can still be compared by
        the random numbers that they draw.
        """
        has_group = recording.select(GroupJoined, GroupInit) or shares_samples(recording)
        only_draws = recording.is_single_process and not recording.select(*TRAINING_EVENTS)
        if has_group or only_draws:
            return False
        return not recording.select(OtherGroup)


def notes_on_start(run: ScriptRun) -> list[str]:
    """Return what is to be said of the way in which the script was started."""
    notes = []
    if run.launch.spawns and len(run.recording.ranks) > 1:
        notes.append(MAKES_ITS_RANKS)
    elif run.launch.is_alone and not run.launch.spawns:
        notes.append(KNOWS_NO_RANKS)
    for _, event in run.recording.select(RankOption)[:1]:
        notes.append(f"started with its own {event.option} on each rank")
    if run.recording.select(FabricStart):
        notes.append("started as fabric run does it")
    return notes


def may_be_repeated(recording: Recording, launch: RankLaunch) -> bool:
    """Return whether a run that fails is started in another way: with GPUs, or on one node."""
    depends_on_gpus = not launch.gpus_available and bool(recording.select(GpuQuery))
    depends_on_nodes = launch.nodes > 1 and not launch.is_alone and recording.asks_for_local_rank
    return depends_on_gpus or depends_on_nodes or bool(recording.select(Refusal, SpawnsRanks))


def size_of_recordings(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.jsonl"))


def shares_samples(recording: Recording) -> bool:
    """Return whether a sampler divides the samples: then the ranks are meant to train together."""
    return any((event.replicas or 1) > 1 for _, event in recording.select(PassStart))
