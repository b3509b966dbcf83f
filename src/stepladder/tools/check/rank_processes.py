"""The processes of the script's ranks: they are started with the probe, followed, and ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from stepladder.core.address import find_free_port
from stepladder.core.process_count import count_cores
from stepladder.rank.lifecycle import die_with_parent
from stepladder.tools.check.events import (
    Backward,
    Forward,
    GroupDestroy,
    GroupInit,
    Halt,
    Refusal,
    ScriptCollective,
    SpawnsRanks,
)
from stepladder.tools.check.isolation.sandbox import Sandbox
from stepladder.tools.check.probe_settings import (
    PROBE_SETTINGS,
    SIMULATED_GPUS,
    SIMULATED_GPUS_AVAILABLE,
    ProbeSettings,
)
from stepladder.tools.check.recording import read_events
from stepladder.tools.probe.attach import prepend_startup_folder

POLL_INTERVAL_S = 0.1
# Without an event of any rank after one has halted: another may not have come so far yet.
HALT_DELAY_S = 1.0
FAILURE_DELAY_S = 3.0  # the same after one has failed
LAST_LINE_BYTES = 4000
BLOCKING_EVENTS = (ScriptCollective, Backward, GroupInit, Forward, GroupDestroy)
RANK_VARIABLES_OF_TORCHRUN = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)

Processes = list[subprocess.Popen[bytes]]


@dataclass(frozen=True)
class LaunchOutcome:
    """The outcome of one start of the script.

    Attributes:
        folder: The folder of the recordings and outputs.
        codes: The exit codes of the processes; None of those that the check has ended.
        has_stalled: Whether nothing happened for so long that the check ended the ranks.
        spawns: Whether the script makes its ranks itself.
        halted: Whether a rank has halted after its snapshot.
        late: Whether the timeout was over.
    """

    folder: Path
    codes: list[int | None] = field(default_factory=list)
    has_stalled: bool = False
    spawns: bool = False
    halted: bool = False
    late: bool = False

    @property
    def failed(self) -> bool:
        return any(code not in (0, None) for code in self.codes)

    def output(self, rank: int) -> str:
        path = self.folder / f"rank-{rank}.out"
        if path.exists():
            return path.read_text(encoding="utf-8", errors="replace")
        return ""


@dataclass(frozen=True)
class RankLaunch:
    """How the script is started.

    Attributes:
        words: What comes after `python`: the script, or `-m` and a module.
        args: The script's own arguments.
        folder: The working folder, within the copy.
        local_rank_option: The option by which the script wants its local rank, as
            torch.distributed.launch passes it; empty where it wants none.
        simulates_fabric: Whether the variables of `fabric run` are set.
        simulates_gpus: Whether CUDA is simulated.
        gpus_available: The answer of `torch.cuda.is_available()`.
        is_alone: Whether one process is started, which may make its ranks itself.
        nodes: The number of nodes that the ranks simulate.
    """

    words: tuple[str, ...]
    args: tuple[str, ...]
    nproc: int
    settings: ProbeSettings
    sandbox: Sandbox
    simulates_gpus: bool
    folder: str = "."
    local_rank_option: str = ""
    simulates_fabric: bool = False
    gpus_available: bool = False
    is_alone: bool = False
    nodes: int = 2
    timeout_s: float = 600.0
    patience_s: float = 25.0

    def variables(self, rank: int, port: int) -> dict[str, str]:
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
        env.setdefault("OMP_NUM_THREADS", str(max(1, count_cores() // self.nproc)))
        if not self.gpus_available:  # else Accelerate lets each rank train alone
            env.setdefault("ACCELERATE_USE_CPU", "true")
        if self.simulates_gpus:
            env[SIMULATED_GPUS] = str(self.nproc)
            env[SIMULATED_GPUS_AVAILABLE] = str(int(self.gpus_available))
        if self.is_alone:
            for name in RANK_VARIABLES_OF_TORCHRUN:
                env.pop(name, None)
            return env
        if self.simulates_fabric:
            env |= self.fabric_variables()
        return env | self.torchrun_variables(rank, port)

    @property
    def ranks_per_node(self) -> int:
        return max(1, self.nproc // self.nodes)

    def fabric_variables(self) -> dict[str, str]:
        """Return the variables that `fabric run` sets."""
        return {
            "LT_CLI_USED": "1",
            "LT_ACCELERATOR": "cpu",
            "LT_STRATEGY": "ddp",
            "LT_DEVICES": str(self.ranks_per_node),
            "LT_NUM_NODES": str(self.nproc // self.ranks_per_node),
        }

    def command(self, rank: int) -> list[str]:
        """Return the command of one rank."""
        options: list[str] = []
        if self.local_rank_option and not self.is_alone:
            options.append(f"{self.local_rank_option}={rank % self.ranks_per_node}")
        return [sys.executable, "-u", *self.words, *options, *self.args]

    def torchrun_variables(
        self,
        rank: int,
        port: int,
    ) -> dict[str, str]:
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
            "MASTER_PORT": str(port),
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
    folder = Path(launch.settings.folder) / name
    folder.mkdir()
    settings = replace(
        launch.settings,
        folder=str(folder),
        torchrun=not launch.is_alone,
        mechanism=launch.sandbox.mechanism,
        writable=launch.sandbox.writable,
    )
    launch = replace(launch, settings=settings)
    port = find_free_port()
    processes: Processes = []
    try:
        for rank in range(1 if launch.is_alone else launch.nproc):
            processes.append(start_rank(launch, rank, port))
        return follow(processes, launch, watch)
    finally:
        for process in processes:
            kill_with_children(process)


def start_rank(
    launch: RankLaunch,
    rank: int,
    port: int,
) -> subprocess.Popen[bytes]:
    output = Path(launch.settings.folder) / f"rank-{rank}.out"
    folder = Path(launch.settings.copy) / launch.folder
    with output.open("wb") as file:
        return subprocess.Popen(
            launch.sandbox.command(launch.command(rank), folder),
            env=launch.variables(rank, port),
            stdin=subprocess.DEVNULL,
            cwd=launch.settings.copy,
            pass_fds=launch.sandbox.descriptors,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )


def read_refused_paths(folder: Path) -> list[str]:
    """Return the paths outside the copy whose change was refused."""
    events = [event for path in folder.glob("*.jsonl") for event in read_events(path)]
    return sorted({event.path for event in events if isinstance(event, Refusal)})


def follow(
    processes: Processes, launch: RankLaunch, watch: Callable[[Path], None]
) -> LaunchOutcome:
    """Wait until the ranks have ended, or must be ended, and return the outcome."""
    files = GrowingFiles(Path(launch.settings.folder))
    began = time.monotonic()
    last_growth = began
    spawns = False
    halted = False
    while True:
        codes = [process.poll() for process in processes]
        now = time.monotonic()
        if added := files.read_added():
            last_growth = now
            spawns |= SpawnsRanks.marker() in added
            halted |= Halt.marker() in added
        idle_s = now - last_growth
        has_ended = None not in codes
        has_failed = any(code not in (0, None) for code in codes)
        is_idle = idle_s > launch.patience_s
        outcome = LaunchOutcome(
            files.folder,
            codes,
            has_stalled=is_idle and not has_ended and is_blocked(files.folder),
            spawns=spawns,
            halted=halted,
            late=now - began > launch.timeout_s,
        )
        if has_ended or spawns or outcome.has_stalled or outcome.late:
            break
        if (halted and idle_s > HALT_DELAY_S) or (has_failed and idle_s > FAILURE_DELAY_S):
            break
        watch(files.folder)
        time.sleep(POLL_INTERVAL_S)
    return replace(outcome, codes=[process.poll() for process in processes])


class GrowingFiles:
    """The recordings and outputs in a folder, of which only what is new is read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sizes: dict[str, int] = {}

    def read_added(self) -> bytes:
        """Return what has been added to the files since the last call."""
        added = b""
        for path in [*self.folder.glob("*.jsonl"), *self.folder.glob("*.out")]:
            known = self.sizes.get(path.name, 0)
            size = path.stat().st_size
            if size > known:
                with path.open("rb") as file:
                    file.seek(known)
                    added += file.read(size - known)
                self.sizes[path.name] = size
        return added


def is_blocked(folder: Path) -> bool:
    """Return whether the last event of any rank is one in which it may block."""
    for path in folder.glob("*.jsonl"):
        with path.open("rb") as file:
            with suppress(OSError):  # a shorter file is read from its beginning
                file.seek(-LAST_LINE_BYTES, os.SEEK_END)
            lines = file.read().splitlines()
        if lines and any(event.marker() in lines[-1] for event in BLOCKING_EVENTS):
            return True
    return False


def kill_with_children(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
