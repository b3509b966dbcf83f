"""A rank's failure, which the rank itself writes to a file that all ranks share.

Its launcher reads the kind, and shows what the record says.
"""

from __future__ import annotations

import json
import re
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from stepladder.core.errors import (
    Corrupt,
    InputError,
    PeerLost,
    RanksDiffer,
    StateLost,
    StorageFault,
    get_text,
)
from stepladder.core.machine_limits import NO_MEMORY_TEXT, is_limit_error
from stepladder.core.tracebacks import fold_traceback, skip_launcher_frames
from stepladder.rank.failed_worker import name_failed_worker
from stepladder.rank.progress import append_line


class ErrorKind(StrEnum):
    """The kind of an error, determined where it is raised: there it still has its class."""

    BAD_INPUT = "bad input"
    PEER_LOST = "peer lost"  # a consequence of another rank's end
    STATE_LOST = "state lost"  # the same, and no other rank has the state to continue
    PEER_SILENT = "peer silent"  # other ranks did not come to a collective in time
    CORRUPT = "corrupt"  # this rank's results are wrong
    RANKS_DIFFER = "ranks differ"  # nobody can tell which rank is wrong
    STORAGE = "storage"  # a file could not be used, for a transient reason
    DIFFERENT_CALLS = "different calls"  # ranks have called different collectives
    DIFFERENT_SIZES = "different sizes"  # the same collective, with tensors of different sizes
    OUT_OF_MEMORY = "out of memory"
    LIMIT = "limit"  # of the machine: open files, processes, threads
    IMPORT = "import"
    WORKER_KILLED = "worker killed"  # a data loader's
    SHARED_MEMORY = "shared memory"  # /dev/shm is full
    PORT_IN_USE = "port in use"
    NOT_CONNECTED = "not met"  # the ranks did not connect to each other
    SYS_EXIT = "own end"  # sys.exit() with a code that is no success
    OTHER = "other"


# Texts of torch, gloo, NCCL, the kernel and our exchange, for errors without a class of their own.
# What torch makes of an error in the callback of a future, as of DistributedDataParallel, and of an
# error in a data loader's worker.
IN_CALLBACK = re.compile(
    r"Got the following error when running the callback: \w+: (.*?)\n\nAt:\n.*", re.S
)
IN_WORKER = re.compile(
    r"Caught \w+ (in DataLoader worker process \d+)\.\nOriginal Traceback.*?\n(?=\S)([\w.]+: )?",
    re.S,
)
TIMED_OUT = re.compile(r"timed out", re.I)
PEER_CLOSED = re.compile(
    r"closed by peer|reset by peer|broken pipe|remote process exited|failed to recv"
    r"|rank \d+ has gone",
    re.I,
)
KIND_TEXTS = {
    ErrorKind.DIFFERENT_CALLS: re.compile(r"calls a different collective here than rank"),
    ErrorKind.DIFFERENT_SIZES: re.compile(r"passes another size here than rank"),
    ErrorKind.SHARED_MEMORY: re.compile(
        r"allocate shared memory|unable to resize file </torch|out of shared memory"
    ),
    ErrorKind.WORKER_KILLED: re.compile(r"DataLoader worker .*killed by signal"),
    ErrorKind.OUT_OF_MEMORY: NO_MEMORY_TEXT,
    ErrorKind.PORT_IN_USE: re.compile(r"EADDRINUSE|address already in use", re.I),
    ErrorKind.NOT_CONNECTED: re.compile(
        r"environment variable (MASTER_|RANK|WORLD)|client socket has timed out"
        r"|connect\w* to \S+ .*(timed out|failed)"
        r"|connection refused|clients joined|name or service not known|rendezvous",
        re.I | re.S,
    ),
}
# Errors that all ranks raise, each with its own view of them.
KINDS_OF_MISMATCH = (ErrorKind.DIFFERENT_CALLS, ErrorKind.DIFFERENT_SIZES)
KINDS_WITHOUT_TRACEBACK = (
    ErrorKind.CORRUPT,
    ErrorKind.RANKS_DIFFER,
    ErrorKind.STORAGE,
    ErrorKind.WORKER_KILLED,
    ErrorKind.SHARED_MEMORY,
)
# Classes whose kind does not depend on the error's text, the more special ones first.
KIND_CLASSES: dict[type[BaseException], ErrorKind] = {
    InputError: ErrorKind.BAD_INPUT,
    StateLost: ErrorKind.STATE_LOST,
    Corrupt: ErrorKind.CORRUPT,
    RanksDiffer: ErrorKind.RANKS_DIFFER,
    StorageFault: ErrorKind.STORAGE,
    SystemExit: ErrorKind.SYS_EXIT,
    MemoryError: ErrorKind.OUT_OF_MEMORY,
}


def _classify_error(error: BaseException) -> ErrorKind:
    """Return the kind of an error, by its class, else by its text."""
    for error_class, kind in KIND_CLASSES.items():
        if isinstance(error, error_class):
            return kind
    text = get_text(error)
    if isinstance(error, PeerLost):
        return ErrorKind.PEER_SILENT if TIMED_OUT.search(text) else ErrorKind.PEER_LOST
    if isinstance(error, ImportError):
        return ErrorKind.OUT_OF_MEMORY if NO_MEMORY_TEXT.search(text) else ErrorKind.IMPORT
    if is_limit_error(error):
        return ErrorKind.LIMIT
    return _classify_text(error, text)


def _classify_text(error: BaseException, text: str) -> ErrorKind:
    """Return the kind of an error whose class says nothing, by its text."""
    # torch raises RuntimeError in collectives that a script calls itself.
    may_be_collective = isinstance(error, RuntimeError)
    if may_be_collective and PEER_CLOSED.search(text):
        return ErrorKind.PEER_LOST
    for kind, pattern in KIND_TEXTS.items():
        if pattern.search(text):
            return kind
    if may_be_collective and TIMED_OUT.search(text):
        return ErrorKind.PEER_SILENT
    return ErrorKind.OTHER


@dataclass(frozen=True)
class RankError:
    """The error that ended a rank.

    Args:
        rank: The rank.
        name: The name of the exception's class.
        text: The exception's message.
        trace: Its traceback, without the launcher's frames; of different calls, the user's frames
            alone, without the text.
        step: The step that it was raised in, from 1, or None before the run was opened.
        time: When it was raised, in seconds of this machine's monotonic clock.
        hint: What to type instead, of bad input.
        kind: The kind of the error.
    """

    rank: int
    name: str
    text: str
    trace: str
    step: int | None
    time: float
    hint: str = ""
    kind: ErrorKind = ErrorKind.OTHER

    @property
    def has_useful_traceback(self) -> bool:
        """Whether the traceback adds something to the text: the code may be the cause."""
        return self.kind not in KINDS_WITHOUT_TRACEBACK

    @property
    def full_trace(self) -> str:
        """The traceback with the error's text, where nothing else shows that."""
        if self.kind in KINDS_OF_MISMATCH:
            return f"{self.trace}{self.name}: {self.text}\n"
        return self.trace

    @property
    def affects_all_ranks(self) -> bool:
        """Whether the other ranks have the error too, or are its cause: they need this rank."""
        return self.is_consequence or self.kind in (ErrorKind.BAD_INPUT, ErrorKind.RANKS_DIFFER)

    @property
    def is_consequence(self) -> bool:
        """Whether another rank is the cause."""
        return self.kind in (ErrorKind.PEER_LOST, ErrorKind.STATE_LOST, ErrorKind.PEER_SILENT)

    @staticmethod
    def from_error(rank: int, error: BaseException) -> RankError:
        """Return the record of an exception."""
        step = getattr(error, "step", None)
        error = name_failed_worker(error)
        user_error = error.with_traceback(skip_launcher_frames(error.__traceback__))
        text = IN_CALLBACK.sub(r"\1", IN_WORKER.sub(r"\1: ", get_text(error)))
        kind = _classify_error(error)
        trace = "".join(traceback.format_exception(user_error))
        if kind in KINDS_OF_MISMATCH:  # the text names the lines; these are their callers
            fold_traceback(user_error, with_note=False)
            trace = "".join(traceback.format_tb(user_error.__traceback__))
        hint = ""
        if isinstance(error, InputError):
            text = error.problem
            hint = error.hint
        return RankError(
            rank=rank,
            name=type(error).__name__,
            text=text,
            trace=trace,
            # A class of the job may have an attribute `step` of another type.
            step=step if isinstance(step, int) else None,
            time=time.monotonic(),
            hint=hint,
            kind=kind,
        )

    @staticmethod
    def read(path: Path, rank: int) -> RankError | None:
        """Return the error that a rank has written, or None."""
        for line in path.read_bytes().splitlines():
            with suppress(ValueError):  # half a line of a rank that was killed while it wrote
                record = json.loads(line)
                if record["rank"] == rank:
                    return RankError(**{**record, "kind": ErrorKind(record["kind"])})
        return None

    def write(self, path: Path) -> None:
        """Append the record to the file that the launcher reads."""
        append_line(path, json.dumps(asdict(self)))


def record_step(error: BaseException | None, step: int) -> None:
    """Add the step to an error that was raised in it, unless it has one already.

    The launcher restarts ranks after an error in a step, and takes one before it for a bug.
    """
    if error is not None and not hasattr(error, "step"):
        with suppress(Exception):  # an exception of the job's own may forbid changes
            error.step = step  # type: ignore[attr-defined]
