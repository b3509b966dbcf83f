"""The ranks of one node with the files that they write, and what these say about them."""

from __future__ import annotations

import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from stepladder.core.errors import DONE
from stepladder.launcher.diagnose.flight_recorder import (
    find_dumps,
    infer_progress,
    make_dump_variable,
    read_dump,
)
from stepladder.launcher.diagnose.rank_status import ProcessState, RankStatus
from stepladder.launcher.local.process_stats import IdleMeter, find_children, is_alive, is_stopped
from stepladder.rank import progress
from stepladder.rank.open_file import MemoryFile
from stepladder.rank.stacks import Stack, parse_traceback, read_abort_stacks, read_stacks


class _ObservedRank:
    """What is known of one rank.

    Args:
        rank: The number that the rank was started with.
        stack_file: The file into which the rank writes its stack on a signal.
        pid: Its process id; 0 before the process is started.
    """

    def __init__(self, rank: int, stack_file: MemoryFile, pid: int = 0) -> None:
        self.rank = rank
        self.stack_file = stack_file
        self.pid = pid
        # For how many polls the rank has been idle.
        self.idle_meter = IdleMeter()
        # For how many polls the rank has been stopped.
        self.polls_stopped = 0
        # The exit code of the rank; None while it runs.
        self.exit_code: int | None = None
        # The processor time that the rank had used when the ranks last made progress; None if it
        # writes its progress itself.
        self.cpu_s: float | None = None

    def poll_stopped(self) -> int:
        """Check whether the process is stopped, and return for how many polls it has been."""
        self.polls_stopped = self.polls_stopped + 1 if is_stopped(self.pid) else 0
        return self.polls_stopped

    def record_exit(self, exit_code: int) -> None:
        """Record that the rank has ended."""
        self.exit_code = exit_code

    def record_cpu_seconds(self, cpu_s: float) -> None:
        """Record what the rank had computed when the ranks last made progress."""
        self.cpu_s = cpu_s


class ObservedRanks:
    """The ranks of one node, by their local rank.

    Args:
        ranks: The number of each local rank.
        dump_prefix: How the names of files begin that NCCL's flight recorder writes.
        world_size: The number of ranks on all nodes; 0 if all are on this one.
    """

    def __init__(self, ranks: Sequence[int], dump_prefix: Path, world_size: int = 0) -> None:
        self.has_all_ranks = world_size <= len(ranks)
        self._dump_prefix = dump_prefix
        self._progress_file = MemoryFile("progress")
        self._sites_file = MemoryFile("sites")
        self._observed = [_ObservedRank(rank, MemoryFile("stacks")) for rank in ranks]
        self._progress_file.path.write_bytes(bytes(progress.BYTES_PER_RANK * len(ranks)))

    def __len__(self) -> int:
        return len(self._observed)

    def __getitem__(self, local_rank: int) -> _ObservedRank:
        return self._observed[local_rank]

    def __iter__(self) -> Iterator[_ObservedRank]:
        return iter(self._observed)

    @property
    def progress_file(self) -> Path:
        """The file in which all ranks write their progress."""
        return self._progress_file.path

    @property
    def _ranks(self) -> list[int]:
        return [observed.rank for observed in self._observed]

    def make_variables(self, rank: int, local_rank: int) -> dict[str, str]:
        """Return the environment variables that tell a rank where to write its progress."""
        files = progress.RankFiles(
            rank,
            local_rank,
            str(self._progress_file.path),
            str(self._sites_file.path),
            str(self._observed[local_rank].stack_file.path),
        )
        return {**files.variable, **make_dump_variable(self._dump_prefix)}

    def set_process(self, local_rank: int, pid: int) -> None:
        """Observe this process as a local rank."""
        observed = self._observed[local_rank]
        self._observed[local_rank] = _ObservedRank(observed.rank, observed.stack_file, pid)

    def replace_rank(self, local_rank: int, rank: int, pid: int) -> None:
        """Observe the replacement of a lost rank, which has a new number."""
        progress.clear_slots(self._progress_file.path, local_rank)
        stack_file = self._observed[local_rank].stack_file
        self._observed[local_rank] = _ObservedRank(rank, stack_file, pid)

    def request_regroup(self, local_rank: int) -> None:
        """Ask a local rank to leave its group after the current step: another rank joins."""
        progress.write_slot(self._progress_file.path, local_rank, progress.REGROUP, 1)

    def list_ended(self) -> list[RankStatus]:
        """Return the last progress that each rank wrote, without a look at its process."""
        return [
            RankStatus(observed.rank, observed.pid, ProcessState.ENDED, written)
            for observed, written in zip(self._observed, self._read_progress(), strict=True)
        ]

    def inspect(
        self, alive: Collection[int], traces: Mapping[int, str] | None = None
    ) -> list[RankStatus]:
        """Return the status of each local rank, with its stack.

        Args:
            alive: The local ranks that are asked for their stacks.
            traces: The tracebacks of ranks that have raised an exception, by rank.
        """
        traces = traces or {}
        statuses = []
        for local_rank, rank_progress in enumerate(self._read_best_progress()):
            observed = self._observed[local_rank]
            if local_rank in alive:
                statuses.append(self._inspect_running(observed, rank_progress))
            else:
                trace = traces.get(observed.rank, "")
                statuses.append(self._inspect_ended(observed, rank_progress, trace))
        return statuses

    def _inspect_running(
        self, observed: _ObservedRank, rank_progress: progress.RankProgress
    ) -> RankStatus:
        pid = observed.pid
        file = observed.stack_file.path
        state = ProcessState.STOPPED if is_stopped(pid) else ProcessState.RUNNING
        threads = read_stacks(pid, file)
        workers: dict[int, Stack] = {}
        ended: list[str] = []
        for child in find_children(pid):
            child_threads = read_stacks(child, file)
            if child_threads:
                workers[child] = child_threads[0]
            elif not is_alive(child):
                ended.append(f"process {child}")
        observed.idle_meter.reset(pid)
        return RankStatus(
            observed.rank, pid, state, rank_progress, threads, workers, self._host_name, ended
        )

    def _inspect_ended(
        self, observed: _ObservedRank, rank_progress: progress.RankProgress, trace: str
    ) -> RankStatus:
        crashed_threads = read_abort_stacks(observed.stack_file.path)
        if crashed_threads:
            state = ProcessState.ABORTED
        elif observed.exit_code == DONE:
            state = ProcessState.DONE
        else:
            state = ProcessState.ENDED
        threads = crashed_threads or parse_traceback(trace)
        return RankStatus(
            observed.rank, observed.pid, state, rank_progress, threads, host=self._host_name
        )

    @property
    def _host_name(self) -> str:
        return "" if self.has_all_ranks else socket.gethostname()

    @property
    def has_dumps(self) -> bool:
        """Whether NCCL has given up, so that torch's flight recorder has written its dumps."""
        return bool(find_dumps(self._dump_prefix, self._ranks))

    def _read_progress(self) -> list[progress.RankProgress]:
        return progress.read_progress(self._progress_file.path, self._sites_file.path, self._ranks)

    def _read_best_progress(self) -> list[progress.RankProgress]:
        """Return the progress that ranks wrote, or, for scripts, that the flight recorder did."""
        written = self._read_progress()
        if any(rank_progress.num_collectives for rank_progress in written):
            return written
        dumps = {}
        for rank, path in find_dumps(self._dump_prefix, self._ranks).items():
            with suppress(OSError, ValueError):  # damaged: the rank was killed while it wrote
                dumps[rank] = read_dump(path)
        inferred = infer_progress(dumps)
        return [
            inferred.get(rank, rank_progress)
            for rank, rank_progress in zip(self._ranks, written, strict=True)
        ]
