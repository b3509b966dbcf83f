"""File descriptors that a launcher keeps for its ranks: a file that holds a lock outlives its rank.

A pair of sockets that the launcher owns and its ranks inherit. The kernel keeps a file open that
was sent and not received, as long as the launcher lives. The next rank 0 receives a copy, while the
message stays in the socket: the lock is never released in between.
"""

from __future__ import annotations

import array
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple


class FdStore(NamedTuple):
    """The sockets by which descriptors are sent to the store and received from it."""

    sender: socket.socket
    receiver: socket.socket


_store: list[FdStore] = []  # this process's, if a launcher of ours has started it


def make_fd_store() -> FdStore:
    """Return a new store."""
    sender, receiver = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    receiver.setblocking(False)
    return FdStore(sender, receiver)


def set_fd_store(store: FdStore | None) -> None:
    """Set this rank's store, which its launcher has made."""
    _store[:] = [store] if store is not None else []


def has_fd_store() -> bool:
    """Tell whether a launcher keeps descriptors for this process."""
    return bool(_store)


def store_fd(file: int) -> None:
    """Let the launcher keep an open file, if there is a launcher."""
    for store in _store:
        socket.send_fds(store.sender, [b"."], [file])


def find_stored_fd(matches: Callable[[int], bool]) -> int | None:
    """Return the file that an earlier rank has stored, if it matches; remove those that do not."""
    for store in _store:
        while files := _receive(store.receiver, socket.MSG_PEEK):
            if matches(files[0]):
                return files[0]
            for file in [*files, *_receive(store.receiver)]:
                os.close(file)
    return None


def remove_all_fds(store: FdStore) -> list[int]:
    """Return the files of a store, and leave it empty."""
    all_files: list[int] = []
    while files := _receive(store.receiver):
        all_files += files
    return all_files


def _receive(receiver: socket.socket, flags: int = 0) -> list[int]:
    """Return the file in the first message, or none without a message.

    `socket.recv_fds` would ignore the flags.
    """
    fd_bytes = array.array("i").itemsize
    with suppress(BlockingIOError):
        _, ancillary, *_ = receiver.recvmsg(1, socket.CMSG_LEN(fd_bytes), flags)
        [(_, _, data)] = ancillary
        return array.array("i", data).tolist()
    return []
