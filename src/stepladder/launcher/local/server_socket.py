"""The socket of the process that ranks are forked from, reached though its name may be gone.

A training lasts for weeks, and its temporary directory may not.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from typing import Any

from stepladder.core.sockets import folder_for_sockets, open_by_file

_opened: dict[
    str, tuple[int, str]
] = {}  # the server's socket, by its name: as `open_by_file` returns it


@contextmanager
def reaching_server() -> Iterator[None]:
    """Start the server, if there is none; a process that is started in the block reaches it by its
    open socket.
    """
    server: Any = forkserver._forkserver
    with folder_for_sockets():
        forkserver.ensure_running()
        name = server._forkserver_address
        if name not in _opened:
            _close()
            _opened[name] = open_by_file(name)
    _, reached = _opened[name]
    server._forkserver_address = reached
    try:
        yield
    finally:
        if (
            server._forkserver_address == reached
        ):  # else the server has ended meanwhile, and there is another one
            server._forkserver_address = name


def _close() -> None:
    for number, _ in _opened.values():
        os.close(number)
    _opened.clear()
