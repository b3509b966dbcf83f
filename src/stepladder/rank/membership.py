"""Who continues a training after a loss: the messages between a launcher and its ranks.

Each rank has a pair of sockets with its launcher. The launcher tells that a rank is lost. The
others leave their process group, report it, and wait. When all ranks that live have reported, the
launcher answers with the members of the next group, and how they connect.
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

# The number of a rank that joins a group which trains already.
JOIN_VARIABLE = "STEPLADDER_JOINS"
MAX_CONTROL_MESSAGE_BYTES = 1 << 16
# What a rank sends: that its first group is formed, which it can leave from now on, or why it is in
# no group.
GROUP_JOINED = b"met"
GROUP_LEFT = b"left"  # its launcher told it that a rank is lost, or it has joined no group yet
GROUP_BROKEN = b"broken"  # a collective failed
GROUP_LATE = b"late"  # the other ranks did not come
# What a launcher sends, besides the next Membership as JSON.
RANK_LOST = b"lost"


@dataclass(frozen=True)
class Membership:
    """The ranks of a new process group.

    Attributes:
        number: The number of the group among those of a launch, from 1.
        members: Its ranks in order, by the numbers with which they were started.
        nodes: The node of each member.
        init_method: A URL by which torch.distributed connects the members.
        loss_reasons: What happened to each rank that was lost before, a sentence each.
    """

    number: int
    members: list[int]
    nodes: list[int]
    init_method: str
    loss_reasons: list[str] = field(default_factory=list)


class ControlChannel:
    """A rank's end of the sockets to its launcher.

    A thread reads it, since a collective that waits for a lost rank must be ended from outside.

    Attributes:
        num_losses: How many losses the launcher has reported.
        on_loss: Called by the thread at each loss.
    """

    def __init__(self, end: socket.socket) -> None:
        self.num_losses = 0
        self.on_loss: Callable[[], None] = lambda: None
        self._end = end
        self._answers: SimpleQueue[tuple[Membership | None, int]] = SimpleQueue()
        threading.Thread(
            target=self._read_messages,
            name="control-channel",
            daemon=True,
        ).start()

    def set_loss_handler(self, handler: Callable[[], None]) -> None:
        """Let the thread call a function at each loss."""
        self.on_loss = handler

    def report_joined(self) -> None:
        """Report that this rank is in its first group: before, the launcher tells it of no loss."""
        with suppress(OSError):  # the launcher has ended
            self._end.send(GROUP_JOINED)

    def await_membership(self, reason: bytes) -> tuple[Membership | None, int]:
        """Report that this rank is in no group, and wait for the next one.

        Args:
            reason: GROUP_LEFT, GROUP_BROKEN or GROUP_LATE.

        Returns:
            The next group, or None if there is none; and the number of losses that it accounts for.
            After one more loss that group is broken as well.
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


_channels: list[ControlChannel] = []  # this rank's, if it continues when others are lost


def open_control_channel(end: socket.socket | None) -> None:
    """Open this rank's channel, if its launcher has made one."""
    _channels[:] = [ControlChannel(end)] if end is not None else []


def get_control_channel() -> ControlChannel | None:
    """Return this rank's channel, or None if it does not continue when others are lost."""
    return _channels[0] if _channels else None


def get_joining_rank() -> int | None:
    """Return this rank's number if it joins a group that trains already."""
    return int(os.environ[JOIN_VARIABLE]) if JOIN_VARIABLE in os.environ else None


def make_control_sockets() -> tuple[socket.socket, socket.socket]:
    """Return the launcher's end of a channel, and the rank's."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send_membership(end: socket.socket, membership: Membership | None) -> None:
    """Send a rank its next group, or that there is none."""
    message = json.dumps(None if membership is None else asdict(membership))
    with suppress(OSError):  # the rank has ended meanwhile
        end.send(message.encode())


def send_loss(end: socket.socket) -> None:
    """Tell a rank that another one is lost."""
    with suppress(OSError):  # the rank has ended meanwhile
        end.send(RANK_LOST)
