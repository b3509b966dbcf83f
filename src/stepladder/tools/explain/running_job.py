"""Why the ranks of a running job make no progress, whichever launcher has started them.

py-spy reads the stacks of each rank from outside; where it may not, torch's debug server tells
them, if the script has started one. A rank stands still if it waits for others at the same place at
each look, and its main thread was not woken between them.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from stepladder.core.errors import InputError, to_one_line
from stepladder.core.world import LAUNCHERS, TORCHRUN, RankVariables
from stepladder.launcher.diagnose.explanation import Explanation
from stepladder.launcher.diagnose.hang import explain_hang
from stepladder.launcher.diagnose.rank_status import ProcessState, RankStatus
from stepladder.rank.stacks import Stack, parse_py_spy
from stepladder.tools.explain import debug_server

NUM_LOOKS = 3
# A loop of quick collectives is at one line at each look, and sleeps and wakes in each of them.
MAX_WAKES_PER_S = 5.0
MAX_DUMP_S = 30
# In the command of a process that torch.multiprocessing.spawn has made, which has no variables.
SPAWNED = "from multiprocessing.spawn import spawn_main"
JOB_VARIABLE = "SLURM_JOB_ID"

Environment = Mapping[str, str]


@dataclass(frozen=True)
class _RunningRank:
    """A rank that runs on this machine.

    Args:
        rank: Its number.
        process: Its process.
        env: The environment with which it was started.
        launcher: The variables that number it; None if ranks are numbered by their start.
    """

    rank: int
    process: psutil.Process
    env: Environment
    launcher: RankVariables | None

    def read_number(self, variable: str) -> int | None:
        """Return the number in a variable of its environment, if there is one."""
        text = self.env.get(variable, "")
        return int(text) if text.isdigit() else None


@dataclass(frozen=True)
class JobState:
    """What the ranks of a job do.

    Args:
        statuses: Each rank, at the last look.
        explanation: Why ranks wait; None if no rank stands still.
    """

    statuses: list[RankStatus]
    explanation: Explanation | None


def find_job(pid: int) -> list[psutil.Process]:
    """Return a process and all that it has started.

    Raises:
        InputError: There is no such process.
    """
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except (psutil.NoSuchProcess, ValueError, OverflowError):
        raise InputError(f"--pid {pid}: no such process", "pgrep -af torchrun") from None


def find_slurm_job(job: str) -> list[psutil.Process]:
    """Return the processes of a Slurm job on this machine.

    Raises:
        InputError: It has none here.
    """
    processes = [
        process
        for process in psutil.process_iter()
        if _read_environment(process).get(JOB_VARIABLE) == job
    ]
    if not processes:
        raise InputError(
            f"--job {job}: no process of this job on this machine",
            f"srun --jobid {job} --overlap stepladder explain --job {job}",
        )
    return processes


def _read_environment(process: psutil.Process) -> Environment:
    """Return the environment with which a process was started; empty if it cannot be read."""
    with suppress(psutil.Error, OSError):
        return dict(process.environ())
    return {}


def find_ranks(processes: Iterable[psutil.Process]) -> list[_RunningRank]:
    """Return the ranks among the processes, sorted.

    A rank is the first Python process of its number: data loaders' workers have the same variables.

    Raises:
        InputError: There is none.
    """
    pythons = [process for process in processes if _is_python(process)]
    environments = {process.pid: _read_environment(process) for process in pythons}
    for launcher in LAUNCHERS:
        ranks: dict[int, _RunningRank] = {}
        for process in sorted(pythons, key=psutil.Process.create_time):
            env = environments[process.pid]
            number = env.get(launcher.rank, "")
            if launcher.marker in env and number.isdigit():
                ranks.setdefault(int(number), _RunningRank(int(number), process, env, launcher))
        if ranks:
            return [ranks[rank] for rank in sorted(ranks)]
    spawned = [process for process in pythons if SPAWNED in " ".join(process.cmdline())]
    if not spawned:
        raise InputError(
            "no rank among these processes: none has RANK, SLURM_PROCID or the like in its "
            "environment",
            "the process id of torchrun, srun, mpirun or a rank: pgrep -af torchrun",
        )
    spawned.sort(key=psutil.Process.create_time)
    return [
        _RunningRank(rank, process, environments[process.pid], None)
        for rank, process in enumerate(spawned)
    ]


def _is_python(process: psutil.Process) -> bool:
    with suppress(psutil.Error, OSError):
        return process.status() != "zombie" and "python" in process.name()
    return False


def observe_job(ranks: list[_RunningRank], seconds: float) -> JobState:
    """Look at all ranks several times, spread over some seconds.

    Raises:
        InputError: py-spy is missing, or may not read the ranks.
    """
    wakes = [_count_wakes(rank) for rank in ranks]
    began = time.monotonic()
    looks = []
    for number in range(NUM_LOOKS):
        if number:
            time.sleep(seconds / (NUM_LOOKS - 1))
        looks.append([_inspect(rank) for rank in ranks])
    statuses = looks[-1]
    max_wakes = MAX_WAKES_PER_S * (time.monotonic() - began)
    stands_still = [
        _is_at_one_place(list(same)) and _count_wakes(rank) - before <= max_wakes
        for rank, before, same in zip(ranks, wakes, zip(*looks, strict=True), strict=True)
    ]
    if not any(stands_still):
        return JobState(statuses, None)
    statuses = sorted([*statuses, *_find_ended(ranks)], key=lambda status: status.rank)
    first = ranks[0]
    total = first.launcher and first.read_number(first.launcher.world_size)
    return JobState(statuses, explain_hang(statuses, total in (None, len(statuses))))


def _inspect(rank: _RunningRank) -> RankStatus:
    process = rank.process
    state = ProcessState.RUNNING
    try:
        if process.status() == "stopped":
            state = ProcessState.STOPPED
        threads = _read_stacks(process.pid)
        workers = {
            child.pid: stacks[0]
            for child in process.children()
            if _is_python(child) and (stacks := _read_stacks(child.pid))
        }
    except psutil.NoSuchProcess:
        return RankStatus(rank.rank, process.pid, ProcessState.ENDED)
    except InputError:
        address = debug_server.find_address(rank.env, rank.rank)
        threads = debug_server.read_stacks(address)
        if not threads:
            raise
        progress = debug_server.read_progress(address)
        return RankStatus(rank.rank, process.pid, state, progress, threads)
    return RankStatus(rank.rank, process.pid, state, threads=threads, workers=workers)


def _read_stacks(pid: int) -> list[Stack]:
    """Return the stacks of a process; none if it has ended meanwhile.

    Raises:
        InputError: py-spy is missing, or may not read it.
    """
    here = Path(sys.executable).with_name("py-spy")  # of an environment that is not activated
    program = str(here) if here.exists() else "py-spy"
    command = [program, "dump", "--json", "--nonblocking", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=MAX_DUMP_S)
    except FileNotFoundError:
        raise InputError("py-spy is not installed", "pip install py-spy") from None
    except subprocess.TimeoutExpired:
        return []
    if done.returncode == 0:
        return parse_py_spy(done.stdout, pid)
    if not psutil.pid_exists(pid):
        return []
    reason = to_one_line(done.stderr.strip().partition("\n")[0])
    raise InputError(
        f"py-spy may not read process {pid}: {reason}",
        'the same as root: sudo env "PATH=$PATH" stepladder explain --pid ...',
    )


def _count_wakes(rank: _RunningRank) -> int:
    """Return how often the main thread of a rank has slept and was woken."""
    with suppress(psutil.Error):
        return int(rank.process.num_ctx_switches().voluntary)
    return 0


def _is_at_one_place(same: list[RankStatus]) -> bool:
    """Return whether a rank was at one place at all looks, and waits for others or is stopped."""
    first = same[0]
    if not first.is_waiting and first.state is not ProcessState.STOPPED:
        return False
    return all(status.state == first.state and status.threads == first.threads for status in same)


def _find_ended(ranks: list[_RunningRank]) -> Iterator[RankStatus]:
    """Yield the ranks of this node that have ended while torchrun lets the others run.

    It does so only after exit code 0.
    """
    first = ranks[0]
    if first.launcher is not TORCHRUN:
        return
    local_rank = first.read_number(TORCHRUN.local_rank)
    count = first.read_number(TORCHRUN.ranks_per_node)
    if local_rank is None or count is None:
        return
    begin = first.rank - local_rank
    for rank in sorted(set(range(begin, begin + count)) - {each.rank for each in ranks}):
        yield RankStatus(rank, 0, ProcessState.DONE)
