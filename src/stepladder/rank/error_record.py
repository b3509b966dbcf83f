"""A rank's failure, as the rank itself leaves it in a file of all ranks: its launcher reads the
kind, and shows what the record says."""

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
    text_of,
)
from stepladder.core.surroundings import NO_MEMORY, is_limit
from stepladder.core.traces import own_frames
from stepladder.rank.progress import append


class ErrorKind(StrEnum):
    """What an error is. Told where it is raised: there it is still an object, with a type."""

    BAD_INPUT = "bad input"
    PEER_LOST = "peer lost"  # another rank's end brought it about
    STATE_LOST = "state lost"  # as well, and no other rank has what is needed to go on
    PEER_SILENT = "peer silent"  # others did not come to a collective in time
    CORRUPT = "corrupt"  # this rank's results are wrong
    RANKS_DIFFER = "ranks differ"  # nobody can tell which is wrong
    STORAGE = "storage"  # a file could not be used, for a reason that may pass
    OUT_OF_MEMORY = "out of memory"
    LIMIT = "limit"  # of the machine: open files, processes, threads
    IMPORT = "import"
    PORT_IN_USE = "port in use"
    NOT_MET = "not met"  # the ranks did not find each other
    OWN_END = "own end"  # sys.exit() with a code that is no success
    OTHER = "other"


# torch's, gloo's, NCCL's and the kernel's words, for what has no type of its own.
TIMED_OUT = re.compile(r"timed out", re.I)
PEER_GONE = re.compile(
    r"closed by peer|reset by peer|broken pipe|remote process exited|failed to recv", re.I
)
TEXTS = {
    ErrorKind.OUT_OF_MEMORY: NO_MEMORY,
    ErrorKind.PORT_IN_USE: re.compile(r"EADDRINUSE|address already in use", re.I),
    ErrorKind.NOT_MET: re.compile(
        r"environment variable (MASTER_|RANK|WORLD)|client socket has timed out"
        r"|connect\w* to \S+ .*(timed out|failed)"
        r"|connection refused|clients joined|name or service not known|rendezvous",
        re.I | re.S,
    ),
}


def kind_of(error: BaseException) -> ErrorKind:
    text = text_of(error)
    if isinstance(error, InputError):
        return ErrorKind.BAD_INPUT
    if isinstance(error, StateLost):
        return ErrorKind.STATE_LOST
    if isinstance(error, PeerLost):
        return ErrorKind.PEER_SILENT if TIMED_OUT.search(text) else ErrorKind.PEER_LOST
    if isinstance(error, RanksDiffer):
        return ErrorKind.CORRUPT if isinstance(error, Corrupt) else ErrorKind.RANKS_DIFFER
    if isinstance(error, StorageFault):
        return ErrorKind.STORAGE
    if isinstance(error, SystemExit):
        return ErrorKind.OWN_END
    if isinstance(error, MemoryError) or (
        isinstance(error, ImportError) and NO_MEMORY.search(text)
    ):
        return ErrorKind.OUT_OF_MEMORY
    if isinstance(error, ImportError):
        return ErrorKind.IMPORT
    if is_limit(error):
        return ErrorKind.LIMIT
    of_torch = isinstance(error, RuntimeError)  # where a script makes its collectives itself
    if of_torch and PEER_GONE.search(text):
        return ErrorKind.PEER_LOST
    if told := next((kind for kind, words in TEXTS.items() if words.search(text)), None):
        return told
    return ErrorKind.PEER_SILENT if of_torch and TIMED_OUT.search(text) else ErrorKind.OTHER


@dataclass(frozen=True)
class RankError:
    """name, text: the exception's.  trace: its traceback, without our own frames.  time: in
    seconds, by a clock of this machine that nobody sets.

    step: the one under way, from 1, or None before the run was opened.  hint: of bad input.
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
    def is_about_code(self) -> bool:
        """Whether its traceback tells something. Of different results, or a file, its text says it
        all.
        """
        return self.kind not in (ErrorKind.CORRUPT, ErrorKind.RANKS_DIFFER, ErrorKind.STORAGE)

    @property
    def is_of_all(self) -> bool:
        """Whether the others have it too, or are its cause: they cannot do without this rank."""
        return self.is_consequence or self.kind in (ErrorKind.BAD_INPUT, ErrorKind.RANKS_DIFFER)

    @property
    def is_consequence(self) -> bool:
        """Whether the cause lies with another rank."""
        return self.kind in (ErrorKind.PEER_LOST, ErrorKind.STATE_LOST, ErrorKind.PEER_SILENT)

    @staticmethod
    def of(rank: int, error: BaseException) -> RankError:
        trace = "".join(
            traceback.format_exception(error.with_traceback(own_frames(error.__traceback__)))
        )
        text, hint = (
            (error.found, error.hint) if isinstance(error, InputError) else (text_of(error), "")
        )
        step = getattr(error, "step", None)
        if not isinstance(step, int):  # an attribute of the job's own exception
            step = None
        return RankError(
            rank, type(error).__name__, text, trace, step, time.monotonic(), hint, kind_of(error)
        )

    @staticmethod
    def read(path: Path, rank: int) -> RankError | None:
        """Return the error that this rank has left, or None. One that was killed meanwhile leaves
        half a line.
        """
        for line in path.read_bytes().splitlines():
            with suppress(ValueError):
                record = json.loads(line)
                if record["rank"] == rank:
                    return RankError(**{**record, "kind": ErrorKind(record["kind"])})
        return None

    def write(self, path: Path) -> None:
        """Leave it for the launcher."""
        append(path, json.dumps(asdict(self)))


def note_step(error: BaseException | None, step: int) -> None:
    """Have the error say in which step it was raised: the launcher tells a bug from a fault by it."""
    if error is not None and not hasattr(error, "step"):
        with suppress(Exception):  # an exception of the job's own may not let itself be changed
            error.step = step  # type: ignore[attr-defined]
