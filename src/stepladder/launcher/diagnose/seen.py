"""What is known of one rank that stands still, or has ended: its own words, its processes' stacks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from stepladder.rank.progress import PHASES, READING, UNKNOWN, Standing
from stepladder.rank.stacks import Frame, Stack, users_frame

COLLECTIVE_FILES = (
    "torch/distributed/",
    "torch/nn/parallel/distributed.py",
    "stepladder/train/comm.py",
    "stepladder/train/shared_memory.py",
    "stepladder/rank/futex.py",
)
STORE_FUNCTION = "open_store"  # in which torch's store waits for rank 0
BACKWARD_FILE = "torch/autograd/graph.py"
LOADER_FILES = ("torch/utils/data/",)


class State(StrEnum):
    """Of a rank's process. done: with exit code 0.  aborted: by compiled code, where its stack was
    left.

    silent: it has not answered, and cannot be looked at from here.
    """

    RUNNING = "running"
    STOPPED = "stopped"
    DONE = "ended well"
    ENDED = "ended"
    ABORTED = "aborted"
    SILENT = "silent"


@dataclass(frozen=True)
class Rank:
    """threads: stacks, main thread first.  workers: its child processes that answered, by pid.

    host: "" where all ranks are on this one.
    """

    rank: int
    pid: int
    state: State = State.RUNNING
    standing: Standing = field(default_factory=Standing)
    threads: Sequence[Stack] = ()
    workers: dict[int, Stack] = field(default_factory=dict)
    host: str = ""

    def __str__(self) -> str:
        place = f"{'pid ' * bool(self.pid)}{self.pid or ''}{' on ' * bool(self.host)}{self.host}"
        return f"rank {self.rank}{f' ({place})' * bool(place)}"

    @property
    def stack(self) -> Stack:
        return self.threads[0] if self.threads else ()

    @property
    def frame(self) -> Frame | None:
        return users_frame(self.stack)

    @property
    def collective(self) -> Frame | None:
        """The call in torch.distributed that this rank is in, outermost of it; None where it is in
        none.
        """
        inside = [frame for frame in self.stack if is_in_collective(frame)]
        innermost = self.stack[0] if self.stack else None
        if innermost and innermost.file.endswith(BACKWARD_FILE) and self.standing.phase == UNKNOWN:
            return replace(
                innermost, function="backward"
            )  # of a script: DDP waits there for the others
        if not inside or innermost is None or innermost not in inside:
            return None
        return next(
            (f for f in reversed(inside) if not f.function.startswith(("wrapper", "_"))), inside[-1]
        )

    @property
    def waits(self) -> bool:
        """Whether it is in a collective, as far as can be seen: one that it made by way of the job,
        or itself.
        """
        return self.standing.waits > 0 or self.collective is not None

    @property
    def meets(self) -> bool:
        """Whether it is about to find the others: nobody does that over and over."""
        return any(f.function == "init_process_group" for f in self.stack)

    def where(self) -> str:
        """What it is doing, to follow 'it is'."""
        if self.state in (State.ENDED, State.DONE):
            return "gone"
        if self.state == State.SILENT:
            return "silent: it has not come yet, has ended, or is in compiled code that holds Python's lock"
        if self.collective and not self.standing.waits:
            caller = f", called by {self.frame}" if self.frame else ""
            return f"in {self.collective.function}{caller}"
        if slow := self.slow_worker():
            return f"waiting for its data loader, whose worker (pid {slow[0]}) is in {in_code(slow[1])}"
        phase = PHASES[self.standing.phase]
        if self.frame is None:
            return f"in its {phase} phase" if phase else "somewhere that it does not say"
        reading = f", {phase}" if self.standing.phase == READING else ""
        return f"in {in_code(self.frame)}{reading}"

    @property
    def loads(self) -> bool:
        """Whether it waits for torch's data loader."""
        return any(part in f.file for f in self.stack[:6] for part in LOADER_FILES)

    def slow_worker(self) -> tuple[int, Frame] | None:
        """The data loader's worker that this rank waits for: the first that is in the user's code."""
        if not self.loads:
            return None
        frames = ((pid, users_frame(stack)) for pid, stack in sorted(self.workers.items()))
        return next(
            ((pid, f) for pid, f in frames if f and not f.is_own and not f.is_library), None
        )


def is_in_collective(frame: Frame) -> bool:
    """Tell whether a frame belongs to a collective, or to the rendezvous before the first one."""
    if any(part in frame.file for part in COLLECTIVE_FILES):
        return True
    return frame.function == STORE_FUNCTION and frame.file.endswith(
        "stepladder/rank/torch_fixes.py"
    )


def in_code(frame: Frame) -> str:
    return f"{frame} `{frame.source[:60]}`" if frame.source else str(frame)
