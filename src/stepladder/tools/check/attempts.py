"""Starting the script until it trains: alone where it makes its own ranks, on one node, with or
without GPUs.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from stepladder.tools.check.failure import Folders, NotChecked, as_users_see_it, failure_of
from stepladder.tools.check.isolation.sandbox import OVERLAID
from stepladder.tools.check.ranks import Launched, RankLaunch, read_refused, run_ranks
from stepladder.tools.check.recording import Recording, read
from stepladder.tools.check.tree import Code

WRAPPERS_ON_GPUS = ("DistributedDataParallel", "FullyShardedDataParallel", "fully_shard", "nccl")
ASKS = ("is_available", "current_accelerator")
CHOOSE_THE_DEVICE = (
    "accelerate",
    "lightning",
    "lightning_fabric",
    "pytorch_lightning",
    "transformers",
)
NODE_WORDS = (
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "local_rank",
    "lightning",
)  # a script that knows its node
MAKES_A_GROUP = ("init_process_group", "accelerate", "lightning", "deepspeed", "transformers")
MEETS_WITHOUT_A_GROUP = ("init_rpc", "Store(", "horovod", "mpi4py")
MODEL_PARALLEL = ("parallelize_module", "torch.distributed.pipelining", "PipelineStage(")
TRAINS = ("step", "backward", "graded")
WORKS = ("forward", "backward", "step", "coll")
SECONDS_BETWEEN_READINGS = 1.5  # of a run that is under way
MOST_BYTES_TO_READ = 4 << 20
LINES_SHOWN = 20

LOST_PEER = re.compile(
    r"Connection (?:closed|reset|refused) ?(?:by peer)?|Broken pipe|recvVal failed"
)

Watch = Callable[[Recording], None]


@dataclass(frozen=True)
class ScriptRun:
    """One start of the script: how it was started, how it ended, and what was recorded."""

    launch: RankLaunch
    launched: Launched
    recording: Recording

    @property
    def printed(self) -> str:
        """The last lines that the first rank has printed."""
        lines = as_users_see_it(self.launched.output(0), self.folders).rstrip().splitlines()
        return "\n".join(lines[-LINES_SHOWN:])

    @property
    def works(self) -> bool:
        return bool(self.recording.of(*WORKS))

    @property
    def trains(self) -> bool:
        """Whether any process has trained: also one that the script has made itself."""
        logs = [*self.recording.ranks, *self.recording.others]
        return any(log.of(*TRAINS) for log in logs)

    @property
    def folders(self) -> Folders:
        return Folders(self.launch.settings.copy, self.launch.settings.original)

    @property
    def failure(self) -> NotChecked | None:
        """Who is at fault, where a rank has failed: a fault of the check's on any rank counts
        first.
        """
        codes = self.launched.codes
        failed = [rank for rank, code in enumerate(codes) if code not in (0, None)]
        if not failed:
            return None
        outputs = [
            self.launched.output(rank).rstrip() or f"exit code {codes[rank]}" for rank in failed
        ]
        failures = [failure_of(output, self.folders, self.launch.pretends) for output in outputs]
        of_check = [failure for failure in failures if failure.cause == "check"]
        first = [failure for failure in failures if not LOST_PEER.search(failure.output)]
        return [*of_check, *first, *failures][0]


def first_answer(source: Code) -> bool:
    """Return what `torch.cuda.is_available()` answers at the first start.

    A script that asks, and wraps its model for several GPUs or names nccl, wraps it on a GPU and
    often nowhere else: a machine with GPUs is where it is meant to run. Libraries that choose the
    device themselves work with either answer, and choose a backend that is not simulated where
    there are GPUs."""
    return (
        source.has(*WRAPPERS_ON_GPUS)
        and source.has(*ASKS)
        and not source.imports(*CHOOSE_THE_DEVICE)
    )


class ScriptRuns:
    """Starts one script as often as it takes.

    Args:
        source: The script's files.
        watch: Called now and then with the recording of a start that will not be repeated.
    """

    def __init__(self, source: Code, watch: Watch) -> None:
        self.source = source
        self.watch = watch
        self.notes: list[str] = []
        self.read_at = 0.0
        self.used_copy: Path | None = None

    def run(self, launch: RankLaunch) -> ScriptRun:
        """Return the start that counts. All others are as if they had never been."""
        if self.source.has(*MODEL_PARALLEL):
            self.notes.append(
                "the script is not data parallel: rules that compare ranks do not apply"
            )
        if launch.gpus or not launch.pretends:
            return self.alone_where_ranks_never_meet(self.on_nodes(launch, "run", is_last=True))
        first = first_answer(self.source)
        attempt = self.on_nodes(replace(launch, gpus=first), "run", is_last=False)
        if depends_on_gpus(attempt):
            second = self.on_nodes(
                replace(launch, gpus=not first), "gpus" if not first else "no-gpus", is_last=True
            )
            if is_fine(second) or second.launch.gpus:
                attempt = second
        return self.alone_where_ranks_never_meet(attempt)

    def on_nodes(self, launch: RankLaunch, name: str, is_last: bool) -> ScriptRun:
        """Start it on two nodes that are played, and on one if that fails and the script knows its
        node.
        """
        knows_node = launch.nodes > 1 and not launch.alone and self.source.has(*NODE_WORDS)
        attempt = self.start(launch, name, is_last and not knows_node)
        if attempt.launched.failed and knows_node and not attempt.launch.alone:
            attempt = self.start(replace(launch, nodes=1), f"{name}-one-node", is_last)
        return attempt

    def start(self, launch: RankLaunch, name: str, is_last: bool) -> ScriptRun:
        """Start it, and once more as one process where the script makes its ranks itself.

        Once more, too, where a change outside the copy was refused, and an overlay can be laid
        there."""
        launch = self.in_fresh_copy(launch, name)
        launched = run_ranks(launch, name, self.watching(launch, is_last))
        if launched.spawns and not launch.alone:
            launch = self.in_fresh_copy(replace(launch, alone=True), f"{name}-alone")
            launched = run_ranks(launch, f"{name}-alone", self.watching(launch, is_last))
        if launch.sandbox.can_cover(refused := read_refused(launched.folder)):
            launch = self.in_fresh_copy(launch, f"{name}{OVERLAID}", refused)
            launched = run_ranks(launch, f"{name}{OVERLAID}", self.watching(launch, is_last))
        return ScriptRun(launch, launched, self.recording(launched.folder, launch, launched))

    def in_fresh_copy(
        self, launch: RankLaunch, name: str, writes: Sequence[str] = ()
    ) -> RankLaunch:
        """Return the launch in a copy without what an earlier start has written: a script may go on
        from that.

        Args:
            launch: How the script is started.
            name: Of this start.
            writes: Paths outside that the script was seen to write.
        """
        copy = Path(launch.settings.copy)
        if self.used_copy is not None:
            shutil.rmtree(self.used_copy, ignore_errors=True)
            copy = copy.parent / f"copy-{name}"
            launch.sandbox.move_to(copy, writes)
        self.used_copy = copy
        return replace(launch, settings=replace(launch.settings, copy=str(copy)))

    def alone_where_ranks_never_meet(self, attempt: ScriptRun) -> ScriptRun:
        """Start a one-process command as such: ranks that never make a group are only copies of it.

        What the ranks did counts where it fails alone, or where it fails and could have made a
        group later."""
        fails_early = attempt.launched.failed and self.source.has(*MAKES_A_GROUP)
        if (
            attempt.launch.alone
            or attempt.launched.late
            or fails_early
            or not self.are_separate(attempt.recording)
        ):
            return attempt
        note = (
            "the script's processes never meet in a process group: it was run alone, as one process"
        )
        alone = self.start(replace(attempt.launch, alone=True), "one-process", is_last=True)
        if alone.launched.failed:
            note = "the script's processes never meet in a process group: rules that compare ranks do not apply"
            alone = attempt
        if not alone.launched.failed:
            self.notes.append(note)
        return alone

    def watching(self, launch: RankLaunch, is_last: bool) -> Callable[[Path], None]:
        def look(folder: Path) -> None:
            is_early = time.monotonic() - self.read_at < SECONDS_BETWEEN_READINGS
            if (
                not is_last
                or is_early
                or sum(p.stat().st_size for p in folder.glob("*.jsonl")) > MOST_BYTES_TO_READ
            ):
                return
            recording = self.recording(folder, launch)
            will_be_repeated = recording.of("refused", "spawns")
            if (launch.alone or recording.of("who")) and not will_be_repeated:
                self.watch(recording)
            self.read_at = time.monotonic()

        return look

    def recording(
        self, folder: Path, launch: RankLaunch, launched: Launched | None = None
    ) -> Recording:
        settings = launch.settings
        recording = read(folder, settings.original, settings.copy)
        if launched is not None:
            recording.stalled = launched.stalled or launched.failed
            recording.finished = all(code == 0 for code in launched.codes)
        recording.single = launch.alone
        if self.are_separate(recording) or self.source.has(*MODEL_PARALLEL):
            recording.keep_first_rank()
        return recording

    def are_separate(self, recording: Recording) -> bool:
        """Return whether the ranks have nothing to do with each other.

        Workers that the script has made itself, and that train nothing, can still be compared: what
        they draw."""
        met = recording.of("who", "init") or shares_samples(recording)
        only_draw = recording.single and not recording.of(*TRAINS)
        return not met and not only_draw and not self.source.has(*MEETS_WITHOUT_A_GROUP)


def is_fine(attempt: ScriptRun) -> bool:
    return attempt.works and not attempt.launched.failed


def depends_on_gpus(attempt: ScriptRun) -> bool:
    """Return whether the other answer may help: the script has asked, and then failed, or done no
    work.
    """
    if is_fine(attempt) or attempt.launched.late:
        return False
    failure = attempt.failure
    return bool(attempt.recording.of("asked")) or (failure is not None and failure.cause == "check")


def shares_samples(recording: Recording) -> bool:
    """Return whether a sampler divides the samples among several ranks: they are meant to train
    together.
    """
    return any((event.get("replicas") or 1) > 1 for _, event in recording.of("pass"))
