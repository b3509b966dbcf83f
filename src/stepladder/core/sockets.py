"""Where multiprocessing names its Unix sockets: in the temporary directory, or elsewhere where that
takes none.

A socket needs its name only until it is open, see `open_by_file`. So a temporary directory that is
full, read-only or gone later does not reach a process that has begun."""

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

from stepladder.core.console import say
from stepladder.core.errors import InputError

PARENTS = "/tmp", "/var/tmp", "/dev/shm"  # in place of a temporary directory that takes no socket


@contextmanager
def folder_for_sockets(quiet: bool = False) -> Iterator[None]:
    """Have multiprocessing name the sockets that it opens in the block in a folder that takes them.

    quiet: say nothing where that is not the temporary directory. Raises InputError where there is
    no such folder."""
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    usual = config.get("tempdir")
    if _takes_sockets(usual or tempfile.gettempdir()):
        yield
        return
    config["tempdir"] = folder = _new_folder()
    if not quiet:
        say(
            f"the temporary directory {tempfile.gettempdir()} cannot be used any more: going on without it"
        )
    try:
        yield
    finally:
        config["tempdir"] = usual
        shutil.rmtree(folder, ignore_errors=True)


def open_by_file(name: str) -> tuple[int, str]:
    """Open a socket's file; return its descriptor, and a name by which it is reached without its
    own.

    That name serves every process of the same user while this process keeps the descriptor.
    """
    number = os.open(name, os.O_PATH)
    return number, f"/proc/{os.getpid()}/fd/{number}"


def send_by_open_socket(quiet: bool = False) -> None:
    """Have other processes fetch the tensors that this one sends them by an open socket that has no
    name any more.

    multiprocessing's own has its name in the temporary directory, and each tensor of a data
    loader's worker is fetched by it. quiet: as of `folder_for_sockets`."""
    sharer: Any = resource_sharer._resource_sharer  # type: ignore[attr-defined]
    with folder_for_sockets(quiet), sharer._lock:
        if sharer._listener is None:
            sharer._start()
        _, sharer._address = open_by_file(sharer._address)
        remove = (
            sharer._listener._listener._unlink
        )  # multiprocessing would look for the file at the process's end
        remove()


def _new_folder() -> str:
    for parent in PARENTS:
        with suppress(OSError):
            folder = tempfile.mkdtemp(prefix="stepladder-sockets-", dir=parent)
            if _takes_sockets(folder):
                return folder
            Path(folder).rmdir()
    raise InputError(
        f"neither {tempfile.gettempdir()} nor {', '.join(PARENTS)} takes a socket",
        "TMPDIR=FOLDER stepladder ...",
    )


def _takes_sockets(folder: str) -> bool:
    name = Path(folder) / f"try-{os.urandom(4).hex()}"
    try:
        with socket.socket(socket.AF_UNIX) as trial:
            trial.bind(str(name))
        name.unlink()
    except OSError:
        return False
    return True
