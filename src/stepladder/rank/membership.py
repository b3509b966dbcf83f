"""Who trains on after a loss: what a launcher and its ranks say to each other about it.

One pair of sockets per rank. The launcher says that a rank is lost. The others leave their group,
say so, and wait. When all that live have said it, the launcher answers with who they are and where
they meet."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from queue import SimpleQueue

from stepladder.core.stored import fit

JOINS = "STEPLADDER_JOINS"  # the number of a rank that is to join others, which train already
LARGEST = 1 << 16  # bytes of a message
# What a rank says: it was asked to leave, or is in no group yet; a collective failed; others did
# not come.
LEFT, BROKEN, LATE = b"left", b"broken", b"late"
MET = b"met"  # the first group is there: from now on it can leave it
LOST = b"lost"  # what a launcher says


@dataclass(frozen=True)
class Membership:
    """The ranks of a new group, in its order, by the numbers they were started with.

    number: counts these groups, from 1.  nodes: on which one each member is.  meeting: a URL of
    torch.distributed. why: what became of the ranks that were lost before, a sentence for each."""

    number: int
    members: list[int]
    nodes: list[int]
    meeting: str
    why: list[str] = field(default_factory=list)


class Wire:
    """A rank's end. A thread reads it: a collective that waits for a lost rank must be broken from
    outside.

    losses: how many the launcher has told.  on_loss: called by the thread at each.
    """

    def __init__(self, end: socket.socket) -> None:
        self.end, self.losses = end, 0
        self.on_loss: Callable[[], None] = lambda: None
        self._answers: SimpleQueue[tuple[Membership | None, int]] = SimpleQueue()
        threading.Thread(target=self._read, name="wire", daemon=True).start()

    def _read(self) -> None:
        while True:
            try:
                said = self.end.recv(LARGEST)
            except OSError:
                said = b""
            if said == LOST:
                self.losses += 1
                self.on_loss()
            else:
                found: Membership | None = fit(json.loads(said or b"null"), Membership | None)
                self._answers.put((found, self.losses))
            if not said:  # the launcher has gone
                return

    def say_met(self) -> None:
        """This rank is in its first group: before, it hears of no loss."""
        with suppress(OSError):  # the launcher has gone
            self.end.send(MET)

    def await_membership(self, reason: bytes) -> tuple[Membership | None, int]:
        """Say that this rank is in no group, and wait for the next one; None where there is none.

        With how many losses it is to go on without: after one more, the next group is broken as
        well."""
        with suppress(OSError):  # the launcher has gone
            self.end.send(reason)
        return self._answers.get()


_wires: list[Wire] = []  # this rank's, if a launcher of ours would have it go on


def attach(end: socket.socket | None) -> None:
    """Called in a rank, with its end."""
    _wires[:] = [Wire(end)] if end is not None else []


def wire() -> Wire | None:
    """This rank's, where a launcher of ours would have it go on in place."""
    return _wires[0] if _wires else None


def joins() -> int | None:
    """This rank's number, where it is to join others."""
    return int(os.environ[JOINS]) if JOINS in os.environ else None


def new_wire() -> tuple[socket.socket, socket.socket]:
    """The launcher's end, and the rank's."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def tell(end: socket.socket, membership: Membership | None) -> None:
    """Answer a rank."""
    with suppress(OSError):  # it has ended this moment
        end.send(json.dumps(None if membership is None else asdict(membership)).encode())


def tell_loss(end: socket.socket) -> None:
    with suppress(OSError):  # it has ended this moment
        end.send(LOST)
