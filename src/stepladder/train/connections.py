"""Connections of a process group, which outlive it: gloo closes them with the last reference to a
collective.

A rank that leaves a broken group ends them itself. Else another one that waits for this one, and
not for the one that has gone, would wait until its timeout."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from stepladder.core.errors import PeerLost

FOLDER = Path("/proc/self/fd")


def connections() -> set[str]:
    """This process's connections by TCP, as Linux calls them; nothing where there is no /proc."""
    return {name for name, _ in _open_now()}


def end_connections(names: set[str]) -> None:
    """For this process and those at the other ends, whoever still has them open."""
    for name, connection in _open_now():
        if name in names:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def _open_now() -> Iterator[tuple[str, socket.socket]]:
    """Each is a copy, closed after it was looked at: another thread may close the descriptor
    meanwhile.
    """
    with suppress(FileNotFoundError):
        for number in [int(file.name) for file in FOLDER.iterdir()]:
            with suppress(OSError):
                copy = os.dup(number)
                try:
                    yield from _connection(copy)
                finally:
                    os.close(copy)


def _connection(number: int) -> Iterator[tuple[str, socket.socket]]:
    one = socket.socket(fileno=number)  # OSError where it is none
    try:
        if one.family in (socket.AF_INET, socket.AF_INET6) and one.getpeername():
            yield str((FOLDER / str(number)).readlink()), one
    finally:
        one.detach()


class NamingLostPeers(AbstractContextManager[None]):
    """gloo and NCCL say only `Connection closed`: mark it as a consequence, so the cause is shown
    first.
    """

    def __enter__(self) -> None:
        """Several times in each step."""

    def __exit__(self, _type: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, RuntimeError):
            raise PeerLost(
                f"a collective failed, most likely because another rank ended: {error}"
            ) from error


naming_lost_peers = NamingLostPeers()
