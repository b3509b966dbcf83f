"""Starting the script's ranks with the probe in them, watching their recordings, ending them."""

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
from stepladder.tools.check.environment import with_startup
from stepladder.tools.check.isolation.sandbox import Sandbox
from stepladder.tools.check.recording import lines_of
from stepladder.tools.check.settings import CHECK, PRETEND, ProbeSettings

POLL = 0.1
SECONDS_TO_HALT = (
    1.0  # without a word of any rank, after one has halted: another may not have come so far yet
)
WAITING = (b'"k": "coll"', b'"k": "backward"', b'"k": "init"', b'"k": "forward"', b'"k": "destroy"')


@dataclass
class Launched:
    """One start of the script. codes: of its processes, None of those that we have ended."""

    folder: Path
    codes: list[int | None] = field(default_factory=list)
    stalled: bool = False
    spawns: bool = False
    halted: bool = False
    late: bool = False

    @property
    def failed(self) -> bool:
        return any(code not in (0, None) for code in self.codes)

    def output(self, rank: int) -> str:
        path = self.folder / f"rank-{rank}.out"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


@dataclass(frozen=True)
class RankLaunch:
    """How it is started. alone: as one process, which makes its ranks itself.  gpus: is_available's
    answer.
    """

    script: str
    args: tuple[str, ...]
    nproc: int
    settings: ProbeSettings
    sandbox: Sandbox
    pretends: bool
    gpus: bool = False
    alone: bool = False
    nodes: int = 2  # that the ranks play
    seconds: float = 600.0
    patience: float = 25.0

    def variables(self, rank: int, port: int) -> dict[str, str]:
        env = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("TORCHELASTIC", "GROUP_", "ROLE_"))
        }
        path = with_startup(env.get("PYTHONPATH", ""))
        env |= {
            "PYTHONPATH": path,
            "PYTHONUNBUFFERED": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            CHECK: self.settings.variable(),
        }
        env |= self.sandbox.variables()
        env |= {
            "OMP_NUM_THREADS": env.get("OMP_NUM_THREADS", str(max(1, count_cores() // self.nproc)))
        }
        if not self.gpus:  # else Accelerate lets each rank train alone
            env.setdefault("ACCELERATE_USE_CPU", "true")
        if self.pretends:
            env |= {PRETEND: str(self.nproc), f"{PRETEND}_ASKED": str(int(self.gpus))}
        if self.alone:
            return {name: value for name, value in env.items() if name not in TORCHRUN}
        per_node = max(1, self.nproc // self.nodes)
        return env | {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.nproc),
            "LOCAL_RANK": str(rank % per_node),
            "LOCAL_WORLD_SIZE": str(per_node),
            "GROUP_RANK": str(rank // per_node),
            "ROLE_RANK": str(rank),
            "GROUP_WORLD_SIZE": str(self.nproc // per_node),
            "ROLE_WORLD_SIZE": str(self.nproc),
            "ROLE_NAME": "default",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_RUN_ID": "check",
        }


TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def run_ranks(
    start: RankLaunch, name: str, watch: Callable[[Path], None] = lambda _: None
) -> Launched:
    """Run the script from its start to its end, or a standstill.

    Args:
        start: How the script is started.
        name: Of this start; its recordings lie in a folder of that name.
        watch: Called now and then, with the folder of the recordings.
    """
    folder = Path(start.settings.folder) / name
    folder.mkdir()
    settings = replace(start.settings, folder=str(folder), torchrun=not start.alone)
    settings = replace(settings, mechanism=start.sandbox.mechanism, writable=start.sandbox.writable)
    start = replace(start, settings=settings)
    attempt, port, processes = Launched(folder), find_free_port(), []
    try:
        for rank in range(1 if start.alone else start.nproc):
            with (folder / f"rank-{rank}.out").open("wb") as out:
                processes.append(
                    subprocess.Popen(
                        start.sandbox.command([sys.executable, "-u", start.script, *start.args]),
                        env=start.variables(rank, port),
                        stdin=subprocess.DEVNULL,
                        cwd=start.settings.copy,
                        pass_fds=start.sandbox.descriptors,
                        stdout=out,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                        preexec_fn=die_with_parent,
                    )
                )
        follow(processes, attempt, start, watch)
    finally:
        for process in processes:
            end(process)
    return attempt


def read_refused(folder: Path) -> list[str]:
    """Return the paths outside the copy whose change was refused."""
    events = [event for path in sorted(folder.glob("*.jsonl")) for event in lines_of(path)]
    return sorted({event["path"] for event in events if event["k"] == "refused"})


def follow(
    processes: list[subprocess.Popen[bytes]],
    attempt: Launched,
    start: RankLaunch,
    watch: Callable[[Path], None],
) -> None:
    began = moved = time.monotonic()
    sizes: dict[str, int] = {}
    while True:
        codes = [process.poll() for process in processes]
        now = time.monotonic()
        grown = growth(attempt.folder, sizes)
        moved = now if grown else moved
        attempt.spawns |= b'"spawns"' in grown
        attempt.halted |= b'"k": "halt"' in grown
        attempt.stalled = now - moved > start.patience and waits(attempt.folder) and None in codes
        attempt.late = now - began > start.seconds
        failed = any(code not in (0, None) for code in codes)
        if failed and None in codes and now - moved > 3:
            break
        halted = attempt.halted and now - moved > SECONDS_TO_HALT
        if attempt.spawns or halted or attempt.stalled or attempt.late or None not in codes:
            break
        watch(attempt.folder)
        time.sleep(POLL)
    attempt.codes = [process.poll() for process in processes]


def growth(folder: Path, sizes: dict[str, int]) -> bytes:
    """What has been added to the recordings and to the output since the last look."""
    found = b""
    for path in [*folder.glob("*.jsonl"), *folder.glob("*.out")]:
        before = sizes.get(path.name, 0)
        size = path.stat().st_size
        if size > before:
            with path.open("rb") as file:
                file.seek(before)
                found += file.read(size - before)
            sizes[path.name] = size
    return found


def waits(folder: Path) -> bool:
    """Whether some rank's last word is that it went into a collective or a backward pass."""
    for path in folder.glob("*.jsonl"):
        with path.open("rb") as file:
            with suppress(OSError):
                file.seek(-4000, os.SEEK_END)
            last = file.read().splitlines()[-1:]
        if last and any(mark in last[0] for mark in WAITING):
            return True
    return False


def end(process: subprocess.Popen[bytes]) -> None:
    """A process with all that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
