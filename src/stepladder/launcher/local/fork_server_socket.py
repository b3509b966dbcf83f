"""The socket of the fork server, reached even if its file was deleted.

A training lasts for weeks; the temporary directory that holds the file may not.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from typing import Any

from stepladder.core.signals import block_signals
from stepladder.core.sockets import open_socket_file, use_socket_folder
from stepladder.rank.lifecycle import RANK_SIGNALS

# The result of `open_by_file` for the server's socket, by the socket's path.
_opened: dict[str, tuple[int, str]] = {}


@contextmanager
def reach_fork_server() -> Iterator[None]:
    """Start the fork server if there is none, and reach it by its open socket in the block."""
    server: Any = forkserver._forkserver
    with use_socket_folder():
        resource_tracker.ensure_running()  # apart, since it unblocks SIGINT
        with block_signals(RANK_SIGNALS):  # the server inherits it, from its first instruction
            forkserver.ensure_running()
        address = server._forkserver_address
        if address not in _opened:
            _close_all()
            _opened[address] = open_socket_file(address)
    _, open_address = _opened[address]
    server._forkserver_address = open_address
    try:
        yield
    finally:
        # Another address belongs to a new server, which has replaced one that ended in the block.
        if server._forkserver_address == open_address:
            server._forkserver_address = address


def _close_all() -> None:
    for descriptor, _ in _opened.values():
        os.close(descriptor)
    _opened.clear()
