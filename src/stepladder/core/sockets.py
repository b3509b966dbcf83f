"""The folder in which multiprocessing names its Unix sockets.

It is the temporary directory, or another folder if that one takes no socket. A socket needs its
name only until it is open, see `open_socket_file`. So a temporary directory that is full, read-only
or removed later does not affect a process that has started.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_sharer
from pathlib import Path
from typing import Any

from stepladder.core.console import print_message
from stepladder.core.errors import InputError

# Used if the temporary directory takes no socket.
SOCKET_FOLDERS = "/tmp", "/var/tmp", "/dev/shm"


@contextmanager
def use_socket_folder(quiet: bool = False) -> Iterator[None]:
    """Let multiprocessing name the sockets that it opens in the block in a folder that takes them.

    Args:
        quiet: Print nothing if that is not the temporary directory.

    Raises:
        InputError: No folder takes a socket.
    """
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    usual_folder = config.get("tempdir")
    if _takes_sockets(usual_folder or tempfile.gettempdir()):
        yield
        return
    folder = _make_folder()
    config["tempdir"] = folder
    if not quiet:
        print_message(
            f"the temporary directory {tempfile.gettempdir()} cannot be used any more: going on"
            " without it"
        )
    try:
        yield
    finally:
        config["tempdir"] = usual_folder
        shutil.rmtree(folder, ignore_errors=True)


def open_socket_file(name: str) -> tuple[int, str]:
    """Open the file of a socket, so that the socket can be reached when the file has no name.

    Returns:
        The file descriptor, and a name that every process of the same user can use as long as this
        process keeps the descriptor.
    """
    descriptor = os.open(name, os.O_PATH)
    return descriptor, f"/proc/{os.getpid()}/fd/{descriptor}"


def send_tensors_by_open_socket(quiet: bool = False) -> None:
    """Let other processes fetch this process's tensors through an open socket without a name.

    multiprocessing's own socket has its name in the temporary directory, and each tensor of a data
    loader's worker is fetched through it.

    Args:
        quiet: See `use_socket_folder`.
    """
    sharer: Any = resource_sharer._resource_sharer  # type: ignore[attr-defined]
    with use_socket_folder(quiet), sharer._lock:
        if sharer._listener is None:
            sharer._start()
        _, address = open_socket_file(sharer._address)
        sharer._address = address  # what multiprocessing tells the other processes
        # Without this call multiprocessing would look for the file at the process's end.
        remove_file = sharer._listener._listener._unlink
        remove_file()


def _make_folder() -> str:
    for parent in SOCKET_FOLDERS:
        with suppress(OSError):
            folder = tempfile.mkdtemp(prefix="stepladder-sockets-", dir=parent)
            if _takes_sockets(folder):
                return folder
            Path(folder).rmdir()
    raise InputError(
        f"neither {tempfile.gettempdir()} nor {', '.join(SOCKET_FOLDERS)} takes a socket",
        "TMPDIR=FOLDER stepladder ...",
    )


def _takes_sockets(folder: str) -> bool:
    """Tell whether a socket can have its name in a folder, by trying."""
    path = Path(folder) / f"try-{os.urandom(4).hex()}"
    try:
        with socket.socket(socket.AF_UNIX) as trial:
            trial.bind(str(path))
        path.unlink()
    except OSError:
        return False
    return True
