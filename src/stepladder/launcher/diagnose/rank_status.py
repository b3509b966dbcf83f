"""The status of one rank that makes no progress or has ended: its own progress, and its stacks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import takewhile

from stepladder.rank.progress import PHASES, READING, UNKNOWN, RankProgress
from stepladder.rank.stacks import Frame, Stack, find_user_frame
from stepladder.rank.torch_fixes_groups import NEW_GROUP

COLLECTIVE_FILES = (
    "torch/distributed/",
    "torch/nn/parallel/distributed.py",
    "stepladder/train/comm.py",
    "stepladder/train/pending.py",
    "stepladder_exchange/",
)
STORE_FILE = "stepladder/rank/torch_fixes_store.py"
STORE_FUNCTION = "open_store"  # in which torch's store waits for rank 0
BACKWARD_FILE = "torch/autograd/graph.py"
DATA_LOADER_FILES = ("torch/utils/data/",)
WORKER_FUNCTION = "_worker_loop"  # in which a worker of a data loader is all the time
QUEUE_FILES = ("/queue.py", "multiprocessing/queues.py")  # in whose `get` it waits
MAX_QUEUE_DEPTH = 6  # of the innermost calls, in which a wait for a queue shows
MAX_DATA_LOADER_DEPTH = 6  # of the innermost calls, in which a wait for a data loader shows
MAX_SOURCE_CHARACTERS = 60


class ProcessState(StrEnum):
    """The state of a rank's process."""

    RUNNING = "running"
    STOPPED = "stopped"  # by SIGSTOP
    DONE = "ended well"  # with exit code 0
    ENDED = "ended"  # in any other way
    ABORTED = "aborted"  # by compiled code, which has left a stack
    SILENT = "silent"  # it has not answered, and cannot be inspected from here


@dataclass(frozen=True)
class RankStatus:
    """The status of one rank.

    Args:
        rank: The number of the rank.
        pid: Its process id; 0 if it is not known.
        state: The state of its process.
        progress: The progress that it has written.
        threads: The stacks of its threads, the main thread first.
        workers: The stacks of its child processes that have answered, by process id.
        host: The name of its host; "" if all ranks are on one host.
        ended: Its threads and child processes that are known to have ended.
    """

    rank: int
    pid: int
    state: ProcessState = ProcessState.RUNNING
    progress: RankProgress = field(default_factory=RankProgress)
    threads: Sequence[Stack] = ()
    workers: dict[int, Stack] = field(default_factory=dict)
    host: str = ""
    ended: Sequence[str] = ()

    def __str__(self) -> str:
        details = []
        if self.pid:
            details.append(f"pid {self.pid}")
        if self.host:
            details.append(f"on {self.host}")
        if not details:
            return f"rank {self.rank}"
        return f"rank {self.rank} ({' '.join(details)})"

    @property
    def stack(self) -> Stack:
        """The stack of the main thread; empty if it is not known."""
        return self.threads[0] if self.threads else ()

    @property
    def frame(self) -> Frame | None:
        """The innermost call of the user's own code, if there is one."""
        return find_user_frame(self.stack)

    @property
    def collective(self) -> Frame | None:
        """The outermost call into torch.distributed that the rank is in; None if it is in none."""
        if not self.stack:
            return None
        innermost = self.stack[0]
        is_script = self.progress.phase == UNKNOWN
        if is_script and innermost.file.endswith(BACKWARD_FILE):
            # DistributedDataParallel waits for the other ranks in the backward pass.
            return replace(innermost, function="backward")
        calls = [frame for frame in self.stack if _is_in_collective(frame)]
        if innermost not in calls:
            return None
        for call in self.stack:
            if call.function.startswith(NEW_GROUP):
                return call
        for call in reversed(calls):
            if not call.function.startswith(("wrapper", "_")):
                return call
        return calls[-1]

    @property
    def is_waiting(self) -> bool:
        """Whether the rank is in a collective, which the trainer or the user's code has called."""
        return self.progress.awaited > 0 or self.collective is not None

    @property
    def is_forming_group(self) -> bool:
        """Whether the rank is in a call of new_group whose members its stack tells."""
        return self.collective is not None and self.collective.function.startswith(NEW_GROUP)

    @property
    def is_connecting(self) -> bool:
        """Whether the rank waits in init_process_group, which it does only once."""
        return any(frame.function == "init_process_group" for frame in self.stack)

    @property
    def is_loading_data(self) -> bool:
        """Whether the rank waits for torch's data loader."""
        calls = self.stack[:MAX_DATA_LOADER_DEPTH]
        return any(_is_in_files(frame, DATA_LOADER_FILES) for frame in calls)

    def describe_position(self) -> str:
        """Return what the rank is doing, as the end of a sentence that begins with "it is"."""
        if self.state in (ProcessState.ENDED, ProcessState.DONE):
            return "no longer running"
        if self.state is ProcessState.SILENT:
            return (
                "silent: it has not connected yet, has ended, or is in compiled code that holds"
                " Python's lock"
            )
        if self.collective and not self.progress.awaited:
            position = f"in {self.collective.function}"
            return f"{position}, called by {self.frame}" if self.frame else position
        worker = self.find_slow_worker()
        if worker is not None:
            pid, frame = worker
            shown_pid = f" (pid {pid})" if self.pid else ""
            position = describe_frame(frame)
            return f"waiting for its data loader, whose worker{shown_pid} is in {position}"
        phase = PHASES[self.progress.phase]
        if self.frame is None:
            return f"in its {phase} phase" if phase else self._describe_last_collective()
        position = f"in {describe_frame(self.frame)}"
        return f"{position}, {phase}" if self.progress.phase == READING else position

    def _describe_last_collective(self) -> str:
        count = self.progress.num_collectives
        site = self.progress.find_call(count)
        if site is None:
            return "at an unknown position"
        return f"past {site.name} {count}, called by {site}"

    def find_slow_worker(self) -> tuple[int, Frame] | None:
        """Return the worker that the rank's data loader waits for, and the call that it is in.

        It is the first worker that is in the user's code.
        """
        if not self.is_loading_data:
            return None
        for pid, stack in sorted(self.workers.items()):
            frame = find_user_frame(list_worker_calls(stack))
            if frame is not None and frame.is_users:
                return pid, frame
        return None


def list_worker_calls(stack: Stack) -> Stack:
    """Return the calls that a data loader's worker has made itself.

    The stack of a forked worker continues with the calls of the rank that made it, where each idle
    worker seems to be.
    """
    return list(takewhile(lambda call: call.function != WORKER_FUNCTION, stack))


def is_idle_worker(stack: Stack) -> bool:
    """Return whether a data loader's worker waits for the indices of its next batch."""
    calls = list_worker_calls(stack)
    return len(calls) < len(stack) and is_in_queue(calls)


def is_in_queue(stack: Stack, function: str = "get") -> bool:
    """Return whether a thread waits for an item of a queue or, with "put", for room in one."""
    for call in stack[:MAX_QUEUE_DEPTH]:
        if call.function == function and call.file.endswith(QUEUE_FILES):
            return True
    # queue.SimpleQueue is compiled, and has no call of its own; it is never full.
    return bool(stack) and function == "get" and ".get()" in stack[0].source


def _is_in_files(frame: Frame, files: Sequence[str]) -> bool:
    return any(file in frame.file for file in files)


def _is_in_collective(frame: Frame) -> bool:
    """Return whether a call is of a collective, or of the rendezvous before the first one."""
    if frame.function == STORE_FUNCTION and frame.file.endswith(STORE_FILE):
        return True
    return _is_in_files(frame, COLLECTIVE_FILES)


def describe_frame(frame: Frame) -> str:
    """Return the function, file and line of a call, with its source if it can be read."""
    if not frame.source:
        return str(frame)
    return f"{frame} `{frame.source[:MAX_SOURCE_CHARACTERS]}`"
