"""What a rank leaves with its launcher: an open file that holds a lock, which then outlives the
rank.

A pair of sockets that the launcher owns and its ranks inherit. A file that was sent is kept open by
the kernel as long as the launcher lives. The next first rank gets it too, while it stays there:
nobody ever lets go of it."""

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
    """The file that an earlier rank has left, if it is the one that is wanted; others are let go."""
    for _, take in _mailbox:
        while found := _next(take, socket.MSG_PEEK):
            if wanted(found[0]):
                return found[0]
            for file in [*found, *_next(take)]:
                os.close(file)
    return None


def take_all(mailbox: Mailbox) -> list[int]:
    """The files in a mailbox, which is empty then."""
    files = []
    while found := _next(mailbox[1]):
        files += found
    return files


def _next(take: socket.socket, flags: int = 0) -> list[int]:
    """The file in the first letter, none where there is no letter. `socket.recv_fds` forgets its
    flags.
    """
    with suppress(BlockingIOError):
        _, [(_, _, data)], *_ = take.recvmsg(1, socket.CMSG_LEN(array.array("i").itemsize), flags)
        return array.array("i", data).tolist()
    return []
