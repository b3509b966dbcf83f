"""The messages between a launcher and its ranks that decide who continues after a rank is lost.

A pair of sockets connects each rank with its launcher. When a rank is lost, the launcher tells the
surviving ranks. Each of them leaves its process group, reports that it has left, and waits. When
all survivors have reported, the launcher sends them the members of the next process group and how
to connect to them.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from queue import SimpleQueue

from stepladder.core.typed_file import convert

# Set for a rank that is started to join a running training: the rank's number in the launch.
JOIN_VARIABLE = "STEPLADDER_JOINS"
MAX_CONTROL_MESSAGE_BYTES = 1 << 16
# The messages of a rank. After GROUP_JOINED it is in its first group, and can leave it when the
# launcher reports a loss. The other messages say that it is in no group, and why.
GROUP_JOINED = b"met"
GROUP_LEFT = b"left"  # its launcher reported a loss, or it has not joined a group yet
GROUP_BROKEN = b"broken"  # a collective failed
GROUP_LATE = b"late"  # the other ranks did not join the new group in time
# The messages of a launcher are RANK_LOST and the next Membership, as JSON.
RANK_LOST = b"lost"


@dataclass(frozen=True)
class Membership:
    """The ranks of a new process group.

    Args:
        number: The number of the group in its launch. The first group has number 0 and no
            Membership, so this is 1 or more.
        members: The numbers with which its ranks were started, in the order of the new ranks.
        nodes: The node of each member.
        init_method: A URL by which torch.distributed connects the members.
        loss_reasons: For each rank that was lost before, a sentence that says what happened to it.
    """

    number: int
    members: list[int]
    nodes: list[int]
    init_method: str
    loss_reasons: list[str] = field(default_factory=list)


class _ControlChannel:
    """A rank's connection to its launcher.

    A thread reads the messages: the main thread may be in a collective that waits for a lost rank,
    and somebody else must end that collective.
    """

    def __init__(self, end: socket.socket) -> None:
        # How many losses the launcher has reported.
        self.num_losses = 0
        # Called by the thread at each loss.
        self.on_loss: Callable[[], None] = lambda: None
        self._end = end
        self._answers: SimpleQueue[tuple[Membership | None, int]] = SimpleQueue()
        threading.Thread(target=self._read_messages, name="control-channel", daemon=True).start()

    def set_loss_handler(self, handler: Callable[[], None]) -> None:
        """Let the thread call a function at each loss."""
        self.on_loss = handler

    def report_joined(self) -> None:
        """Report that this rank is in its first group; from now on the launcher reports losses."""
        with suppress(OSError):  # the launcher has ended
            self._end.send(GROUP_JOINED)

    def await_membership(self, reason: bytes) -> tuple[Membership | None, int]:
        """Report that this rank is in no group, and wait for the next group.

        Args:
            reason: GROUP_LEFT, GROUP_BROKEN or GROUP_LATE.

        Returns:
            The next group, or None if there is none; and how many losses the launcher had reported
            before it. If `num_losses` is larger, that group is broken as well.
        """
        with suppress(OSError):  # the launcher has ended
            self._end.send(reason)
        return self._answers.get()

    def _read_messages(self) -> None:
        while True:
            try:
                message = self._end.recv(MAX_CONTROL_MESSAGE_BYTES)
            except OSError:
                message = b""
            if message == RANK_LOST:
                self.num_losses += 1
                self.on_loss()
                continue
            membership: Membership | None = convert(
                json.loads(message or b"null"), Membership | None
            )
            self._answers.put((membership, self.num_losses))
            if not message:  # the launcher has ended
                return


_channels: list[_ControlChannel] = []  # this rank's channel, or empty if it has none


def open_control_channel(end: socket.socket | None) -> None:
    """Open this rank's channel, if its launcher has made one."""
    _channels[:] = [_ControlChannel(end)] if end is not None else []


def get_control_channel() -> _ControlChannel | None:
    """Return this rank's channel, or None if a loss ends this rank."""
    return _channels[0] if _channels else None


def get_joining_rank() -> int | None:
    """Return this rank's number if it was started to join a running training, else None."""
    return int(os.environ[JOIN_VARIABLE]) if JOIN_VARIABLE in os.environ else None


def make_control_sockets() -> tuple[socket.socket, socket.socket]:
    """Return the two sockets of a channel: the launcher's and the rank's."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send_membership(end: socket.socket, membership: Membership | None) -> None:
    """Send a rank its next group, or that there is none."""
    message = json.dumps(None if membership is None else asdict(membership))
    with suppress(OSError):  # the rank has ended meanwhile
        end.send(message.encode())


def send_loss(end: socket.socket) -> None:
    """Tell a rank that another rank is lost."""
    with suppress(OSError):  # the rank has ended meanwhile
        end.send(RANK_LOST)
