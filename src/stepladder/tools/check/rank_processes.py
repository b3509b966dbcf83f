"""The processes of the script's ranks: they are started with the probe, followed, and ended."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from stepladder.core.address import find_free_port
from stepladder.core.console import print_message
from stepladder.core.process_count import count_cores
from stepladder.launcher.diagnose.deadlock import are_stuck
from stepladder.launcher.diagnose.explanation import Explanation
from stepladder.launcher.diagnose.hang import find_rank_to_blame
from stepladder.tools.check.events import (
    EnoughPasses,
    GroupInit,
    GroupJoined,
    Halt,
    NeedsOneNode,
    OptimizerStep,
    OtherGroup,
    Paused,
    RankRead,
    SpawnsRanks,
)
from stepladder.tools.check.failure import has_own_error
from stepladder.tools.check.fork_servers import ForkedProcess, ForkServers
from stepladder.tools.check.forked_rank import ForkRequest
from stepladder.tools.check.isolation.sandbox import Sandbox
from stepladder.tools.check.probe_settings import (
    PROBE_SETTINGS,
    SIGNALLED_FILE,
    SIMULATED_GPUS,
    SIMULATED_GPUS_AVAILABLE,
    ProbeSettings,
)
from stepladder.tools.check.recording import Recording
from stepladder.tools.check.standstill import (
    GrowingFiles,
    ObservedProcesses,
    describe_positions,
    is_blocked,
)
from stepladder.tools.probe.attach import prepend_startup_folder

POLL_INTERVAL_S = 0.1
# Without an event or work of any rank after one has halted: another may not have come so far yet.
HALT_DELAY_S = 1.0
FAILURE_DELAY_S = 3.0  # the same after one has failed
STILL_S = 5.0  # without an event when the time is over: then ranks that wait are named
MAX_DELAY_S = 20.0  # without an event, or after a failure, even if the others work
JUDGEMENT_INTERVAL_S = 2.0
# What a process does that is one of several.
KNOWS_OTHER_RANKS = (RankRead, GroupInit, GroupJoined, OtherGroup, SpawnsRanks)
RANK_VARIABLES_OF_TORCHRUN = {
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
}

Variables = dict[str, str]
Processes = list[ForkedProcess]


class Interruption:
    """Sends a signal to ranks once rank 0 has paused, and SIGKILL to all after a time of grace.

    Args:
        number: The signal.
        grace_s: The seconds between the signal and SIGKILL.
        last_rank_only: Whether the signal is for the last rank alone.
    """

    def __init__(self, number: int, grace_s: float, last_rank_only: bool = False) -> None:
        self.number = number
        self.grace_s = grace_s
        self.last_rank_only = last_rank_only
        self.signalled_at = 0.0

    def poll(self, added: bytes, processes: Processes, folder: Path) -> None:
        """Send what is due.

        Args:
            added: What was recorded since the last call.
            processes: The ranks.
            folder: The folder of the recordings.
        """
        if not self.signalled_at and Paused.marker() in added:
            for process in processes[-1:] if self.last_rank_only else processes:
                process.send_signal(self.number)
            (folder / SIGNALLED_FILE).touch()
            self.signalled_at = time.monotonic()
        elif self.signalled_at and time.monotonic() - self.signalled_at > self.grace_s:
            for process in processes:
                process.send_signal(signal.SIGKILL)


@dataclass(frozen=True)
class LaunchOutcome:
    """The outcome of one start of the script.

    Args:
        folder: The folder of the recordings and outputs.
        codes: The exit codes of the processes; None of those that the check has ended.
        has_stalled: Whether nothing happened for so long that the check ended the ranks.
        spawns: Whether the script makes its ranks itself.
        needs_one_node: Whether the script takes its local rank for its rank.
        knows_other_ranks: Whether a process has asked for its rank, or for a group.
        has_stepped: Whether an optimizer step was seen.
        halted: Whether a rank has halted after its snapshot.
        late: Whether the timeout was over.
        deadlock: Why ranks could not go on together, where that is certain.
        has_raised: Whether a rank has failed by an exception that tells of no other rank.
        enough: How many ranks the check has ended, since they have trained enough.
        rank_count: The number of ranks that were seen.
        position: Where the ranks were when they were ended, or while some waited long for others.
        seconds: How long it took.
    """

    folder: Path
    codes: list[int | None] = field(default_factory=list)
    has_stalled: bool = False
    spawns: bool = False
    needs_one_node: bool = False
    knows_other_ranks: bool = False
    has_stepped: bool = False
    halted: bool = False
    late: bool = False
    deadlock: Explanation | None = None
    has_raised: bool = False
    enough: int = 0
    rank_count: int = 0
    position: str = ""
    seconds: float = 0.0

    def complete(self, recording: Recording) -> Recording:
        """Return the recording of this start, with how it ended."""
        return replace(
            recording,
            has_stalled=self.has_stalled or self.failed,
            deadlock=self.deadlock,
            has_raised=self.has_raised,
            has_finished=not self.failed and None not in self.codes,
        )

    @property
    def failed(self) -> bool:
        """Whether a process has failed, other than after the early end of all ranks.

        A process that has made the ranks may then miss what they would have left for it.
        """
        were_ended = self.enough >= max(1, self.rank_count)
        return not were_ended and bool(self.failed_ranks)

    @property
    def failed_ranks(self) -> list[int]:
        """The ranks whose processes have failed, and were not ended by the check."""
        return [rank for rank, code in enumerate(self.codes) if code not in (0, None)]

    @property
    def last_error(self) -> str:
        """The last line of a rank that has failed, of one with an error of its own first."""
        return "".join(self.error_output.splitlines()[-1:])

    @property
    def error_output(self) -> str:
        """All that this rank has printed."""
        outputs = [self.output(rank).rstrip() for rank in self.failed_ranks]
        causes = [*filter(has_own_error, outputs), *outputs]  # others tell of a rank that was lost
        return next(iter(causes), "")

    def output(self, rank: int) -> str:
        path = self.folder / f"rank-{rank}.out"
        if path.exists():
            return path.read_text(encoding="utf-8", errors="replace")
        return ""


@dataclass(frozen=True)
class RankLaunch:
    """How the script is started.

    Args:
        python_args: What comes after `python`: the script, or `-m` and a module.
        args: The script's own arguments.
        settings: The settings of the probes.
        sandbox: The sandbox of the ranks.
        servers: The processes from which the ranks are forked.
        folder: The working folder, within the copy.
        gpus_available: The answer of `torch.cuda.is_available()`; None where it depends on what is
            imported when the script asks.
        is_alone: Whether one process is started.
        spawns: Whether this one process makes the ranks.
        nodes: The number of nodes that the ranks simulate.
        interruption: What interrupts this start.
        others: The number of processes of other starts that run at once.
        keeps_copies: Whether ranks go on that train and have not asked for their rank.
    """

    python_args: tuple[str, ...]
    args: tuple[str, ...]
    nproc: int
    settings: ProbeSettings
    sandbox: Sandbox
    servers: ForkServers
    folder: str = "."
    gpus_available: bool | None = None
    is_alone: bool = False
    spawns: bool = False
    nodes: int = 2
    interruption: Interruption | None = None
    others: int = 0
    keeps_copies: bool = False
    timeout_s: float = 600.0
    patience_s: float = 25.0

    def variables(self, rank: int) -> Variables:
        """Return the environment of one rank."""
        env = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("TORCHELASTIC", "GROUP_", "ROLE_"))
        }
        env["PYTHONPATH"] = prepend_startup_folder(env.get("PYTHONPATH", ""))
        env["PYTHONUNBUFFERED"] = "1"
        env["PYTHONDONTWRITEBYTECODE"] = "1"
        env[PROBE_SETTINGS] = self.settings.to_json()
        env |= self.sandbox.variables()
        cores_per_process = count_cores() // (self.nproc + self.others)
        env.setdefault("OMP_NUM_THREADS", str(max(1, cores_per_process)))
        if not self.is_alone:  # sets of texts have another order on each rank, the same each time
            env.setdefault("PYTHONHASHSEED", str(rank + 1))
        if not self.gpus_available:  # else Accelerate lets each rank train alone
            env.setdefault("ACCELERATE_USE_CPU", "true")
        env[SIMULATED_GPUS] = str(self.nproc)
        answer = self.gpus_available
        env[SIMULATED_GPUS_AVAILABLE] = "" if answer is None else str(int(answer))
        if self.is_alone:
            if "RANK" in env:  # of a launcher; else the script may make WORLD_SIZE processes
                env = {name: env[name] for name in env.keys() - RANK_VARIABLES_OF_TORCHRUN}
            return env
        return env | self.torchrun_variables(rank)

    @property
    def ranks_per_node(self) -> int:
        return max(1, self.nproc // self.nodes)

    def command(self) -> list[str]:
        """Return the command of each rank."""
        return [sys.executable, "-u", *self.python_args, *self.args]

    def other_start(self, outcome: LaunchOutcome) -> RankLaunch | None:
        """Return how the script must be started, if it has shown that this is another way."""
        if self.is_alone:
            return None
        if outcome.spawns:
            return replace(self, is_alone=True, spawns=True)
        trains_alone = outcome.has_stepped and not outcome.knows_other_ranks
        if trains_alone and not self.keeps_copies:
            return replace(self, is_alone=True, gpus_available=bool(self.gpus_available))
        return replace(self, nodes=1) if outcome.needs_one_node and self.nodes > 1 else None

    def torchrun_variables(self, rank: int) -> Variables:
        """Return the variables that torchrun sets for one rank."""
        ranks_per_node = self.ranks_per_node
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.nproc),
            "LOCAL_RANK": str(rank % ranks_per_node),
            "LOCAL_WORLD_SIZE": str(ranks_per_node),
            "GROUP_RANK": str(rank // ranks_per_node),
            "ROLE_RANK": str(rank),
            "GROUP_WORLD_SIZE": str(self.nproc // ranks_per_node),
            "ROLE_WORLD_SIZE": str(self.nproc),
            "ROLE_NAME": "default",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.settings.port),
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_RUN_ID": "check",
        }


def run_ranks(
    launch: RankLaunch, name: str, watch: Callable[[Path], None] = lambda _: None
) -> LaunchOutcome:
    """Run the script until it ends, stalls, or has to be started differently.

    Args:
        launch: How the script is started.
        name: The name of this start, and of the folder of its recordings.
        watch: Called now and then with that folder.
    """
    return run_together({name: launch}, watch)[name]


def run_together(
    launches: dict[str, RankLaunch], watch: Callable[[Path], None] = lambda _: None
) -> dict[str, LaunchOutcome]:
    """Run several starts of the script at once, each until it ends or must be ended.

    Args:
        launches: How each is started, by its name, which is that of the folder of its recordings.
        watch: Called now and then with these folders.
    """
    processes: Processes = []
    running: dict[str, RunningRanks] = {}
    outcomes: dict[str, LaunchOutcome] = {}
    try:
        for name, launch in launches.items():
            launch = with_folder(launch, name)
            count = 1 if launch.is_alone else launch.nproc
            own = [start_rank(launch, rank) for rank in range(count)]
            processes += own
            running[name] = RunningRanks(own, launch)
            running[name].poll()
        while running:
            for name, ranks in list(running.items()):
                if ranks.are_over:
                    outcomes[name] = ranks.conclude()
                    processes = [process for process in processes if process not in ranks.processes]
                    ranks.end()
                    del running[name]
                else:
                    watch(ranks.outcome.folder)
            if running:
                time.sleep(POLL_INTERVAL_S)
            for ranks in running.values():
                ranks.poll()
    finally:
        for process in processes:
            process.kill_with_children()
    return {name: outcomes[name] for name in launches}


def with_folder(launch: RankLaunch, name: str) -> RankLaunch:
    """Return a launch with a folder of its own for its recordings."""
    folder = Path(launch.settings.folder) / name
    folder.mkdir()
    settings = replace(
        launch.settings,
        folder=str(folder),
        torchrun=not launch.is_alone,
        port=find_free_port(),
        mechanism=launch.sandbox.mechanism,
        writable=launch.sandbox.writable,
    )
    return replace(launch, settings=settings)


def start_rank(launch: RankLaunch, rank: int) -> ForkedProcess:
    output = Path(launch.settings.folder) / f"rank-{rank}.out"
    # In a mount namespace the copy is at the path of the original too, where `..` leads to the
    # user's own folders.
    has_namespace = launch.sandbox.mechanism == "namespace"
    root = launch.settings.original if has_namespace else launch.settings.copy
    entry = launch.sandbox.entry(launch.command(), Path(root) / launch.folder)
    arguments = [*launch.python_args, *launch.args]
    request = ForkRequest(launch.variables(rank), entry, arguments)
    with output.open("wb") as file:
        return launch.servers.fork(rank, request, file.fileno())


class RunningRanks:
    """The processes of one start of the script, until they have ended or must be ended.

    Args:
        processes: The processes.
        launch: How they were started.
    """

    def __init__(self, processes: Processes, launch: RankLaunch) -> None:
        self.processes = processes
        self.launch = launch
        self.observed = ObservedProcesses(Path(launch.settings.folder))
        self.files = GrowingFiles(self.observed)
        self.began = time.monotonic()
        self.grown_at = self.judged_at = self.well_at = self.began
        self.outcome = LaunchOutcome(self.observed.folder)

    @property
    def idle_s(self) -> float:
        """The seconds without an event and without output."""
        return time.monotonic() - self.grown_at

    @property
    def rest_s(self) -> float:
        """The seconds without an event, without output and without work of any process."""
        return min(self.idle_s, self.observed.idle_s)

    @property
    def codes(self) -> list[int | None]:
        return [process.poll() for process in self.processes]

    def poll(self) -> None:
        """Learn what the processes have done since the last look."""
        now = time.monotonic()
        if added := self.files.read_added():
            self.grown_at = now
        if self.launch.interruption:
            self.launch.interruption.poll(added, self.processes, self.outcome.folder)
        self.outcome = replace(
            self.outcome,
            codes=self.codes,
            spawns=self.outcome.spawns or SpawnsRanks.marker() in added,
            needs_one_node=self.outcome.needs_one_node or NeedsOneNode.marker() in added,
            knows_other_ranks=self.outcome.knows_other_ranks
            or any(kind.marker() in added for kind in KNOWS_OTHER_RANKS),
            has_stepped=self.outcome.has_stepped or OptimizerStep.marker() in added,
            halted=self.outcome.halted or Halt.marker() in added,
            late=now - self.began > self.launch.timeout_s,
            seconds=now - self.began,
            deadlock=self.observed.poll(),
            enough=self.outcome.enough + added.count(EnoughPasses.marker()),
            rank_count=max(self.observed.world_size, len(self.observed.pids)),
        )
        if not self.outcome.failed:
            self.well_at = now
        is_at_rest = self.rest_s > self.launch.patience_s
        is_still = is_at_rest or self.idle_s > max(2 * self.launch.patience_s, MAX_DELAY_S)
        if self.outcome.late:
            is_still = self.idle_s > STILL_S
        if is_still and now - self.judged_at > JUDGEMENT_INTERVAL_S:
            self.judge_standstill(is_at_rest)

    def judge_standstill(self, is_at_rest: bool) -> None:
        """Judge ranks that have made no event for long.

        They stand still, unless some only wait for another that downloads, sleeps or computes.

        Args:
            is_at_rest: Whether no process has computed; on a busy machine one seems to that polls.
        """
        statuses = self.observed.inspect()
        can_go_on = any(status.is_waiting for status in statuses) and not are_stuck(statuses)
        has_stalled = is_at_rest and not can_go_on and is_blocked(self.outcome.folder)
        position = self.outcome.position
        # Else they are between two steps, about to end, or were inspected just as they went on.
        if has_stalled or (can_go_on and find_rank_to_blame(statuses)):
            position = describe_positions(statuses)
            if not has_stalled and not self.outcome.position and not self.outcome.late:
                limit = f"--timeout {self.launch.timeout_s:g}"
                print_message(f"ranks wait, up to {limit}; Ctrl-C ends the check: {position}")
        self.outcome = replace(self.outcome, position=position, has_stalled=has_stalled)
        self.judged_at = time.monotonic()

    @property
    def are_over(self) -> bool:
        """Whether they have ended, or must be ended."""
        outcome = self.outcome
        if None not in outcome.codes or outcome.late or self.launch.other_start(outcome):
            return True
        if outcome.has_stalled or outcome.deadlock:
            return True
        if outcome.failed:
            failed_s = time.monotonic() - self.well_at
            return self.rest_s > FAILURE_DELAY_S or failed_s > MAX_DELAY_S
        is_at_rest = self.rest_s > HALT_DELAY_S or self.idle_s > MAX_DELAY_S
        return outcome.halted and is_at_rest

    def end(self) -> None:
        """Kill the ranks, and all that they have started."""
        for process in self.processes:  # one that sees the end of another would record its own
            process.send_signal(signal.SIGSTOP)
        for process in self.processes:
            process.kill_with_children()

    def conclude(self) -> LaunchOutcome:
        """Return the outcome, with the reason why ranks have failed, or do not go on, together."""
        outcome = self.outcome
        if outcome.late and self.idle_s <= STILL_S:  # no rank waited any more
            outcome = replace(outcome, position="")
        if outcome.failed:
            outputs = map(outcome.output, outcome.failed_ranks)
            has_crashed = -signal.SIGSEGV in outcome.codes
            has_raised = has_crashed or any(map(has_own_error, outputs))
            deadlock = None
            if not has_raised:
                deadlock = self.observed.explain_failure()
            if outcome.enough and not has_raised and deadlock is None:
                # Others have lost the ranks that the check has ended.
                outcome = replace(outcome, enough=outcome.rank_count)
            outcome = replace(outcome, has_raised=has_raised, deadlock=deadlock)
        has_stalled = outcome.has_stalled or outcome.deadlock is not None
        return replace(outcome, codes=self.codes, has_stalled=has_stalled)
