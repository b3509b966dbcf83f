"""What a rank leaves with its launcher: an open file that holds a lock, which then outlives the rank.

A pair of sockets that the launcher owns and its ranks inherit. A file that was sent is kept open by the kernel as
long as the launcher lives; the next first rank takes it out, and so never lets go of what the last one held.
"""

from __future__ import annotations

import array
import os
import socket
from collections.abc import Callable
from contextlib import suppress

Mailbox = tuple[socket.socket, socket.socket]  # where files are put in, and taken out

_mailbox: list[Mailbox] = []  # this process's, if a launcher of ours has started it


def new_mailbox() -> Mailbox:
    put, take = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    take.setblocking(False)
    return put, take


def inherit(mailbox: Mailbox | None) -> None:
    """Called in a rank, with what its launcher gave it."""
    _mailbox[:] = [mailbox] if mailbox is not None else []


def has_keeper() -> bool:
    return bool(_mailbox)


def keep(file: int) -> None:
    """Leave an open file with the launcher, if there is one."""
    for put, _ in _mailbox:
        socket.send_fds(put, [b"."], [file])


def kept(wanted: Callable[[int], bool]) -> int | None:
    """The file that an earlier rank has left, if it is the one that is wanted; others are closed."""
    found = [file for mailbox in _mailbox for file in take_all(mailbox)]
    chosen = next((file for file in found if wanted(file)), None)
    for file in found:
        if file != chosen:
            os.close(file)
    return chosen


def take_all(mailbox: Mailbox) -> list[int]:
    """The files in a mailbox, which is empty then."""
    files = array.array("i")
    with suppress(BlockingIOError):
        while True:
            _, some, *_ = socket.recv_fds(mailbox[1], 1, 16)
            files.extend(some)
    return files.tolist()
