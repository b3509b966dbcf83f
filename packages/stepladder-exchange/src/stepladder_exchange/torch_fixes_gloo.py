"""Changes to torch for gloo's threads and connections.

A gloo thread that drops a Python tensor needs the GIL. A thread that joins it with the GIL held
waits for ever, and an interpreter that ends before the gloo thread aborts the process. Seen with
torch 2.13. These can go when torch releases the GIL before it joins gloo's threads, and drops their
tensors before a collective counts as done.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from types import FunctionType

FD_FOLDER = Path("/proc/self/fd")
GLOO_TIMEOUT_S = 5.0
GLOO_POLL_S = 0.001
GLOO_QUIET_POLLS = 3  # in a row, after which gloo's threads count as idle


def keep_backward_context_from_gloo() -> None:
    """Keep torch from handing gloo's threads a Python object at each backward pass without a GPU.

    The threads need the GIL to drop the object. A DDP model that is freed meanwhile joins the
    threads with the GIL held, so that a script that had done its work hung at its end. The object
    is meant for the threads of GPUs.
    """
    torch = sys.modules.get("torch")
    stash = getattr(getattr(torch, "_C", None), "_stash_obj_in_tls", None)
    if torch is None or stash is None or isinstance(stash, FunctionType):
        return  # torch is not loaded, has no such function, or is patched already
    # torch.cuda.is_available() would read CUDA_VISIBLE_DEVICES, which a script may still set.
    is_cuda_in_use = torch.cuda.is_initialized

    def stash_with_gpu_only(key: str, value: object) -> object:
        if key == "context" and not is_cuda_in_use():
            return None
        return stash(key, value)

    torch._C._stash_obj_in_tls = stash_with_gpu_only


def wait_for_gloo() -> None:
    """Wait until gloo's threads have dropped the tensors of the last collectives, 5 s at most.

    The threads need the GIL for it, and outlive their process group if torch._dynamo was imported.
    A thread that gets no core before the interpreter ends can no longer take the GIL, and aborts a
    process that had done its work.
    """
    deadline = time.monotonic() + GLOO_TIMEOUT_S
    quiet_polls = 0
    while quiet_polls < GLOO_QUIET_POLLS and time.monotonic() < deadline:
        time.sleep(GLOO_POLL_S)  # releases the GIL
        quiet_polls = 0 if _is_gloo_running() else quiet_polls + 1


def _is_gloo_running() -> bool:
    """Tell whether Linux is running a gloo thread of this process; False if there is no /proc."""
    paths: list[Path] = []
    with suppress(OSError):  # a process that has no memory left
        paths += Path("/proc/self/task").glob("*/stat")
    for path in paths:
        with suppress(OSError):  # the thread has ended meanwhile
            stat = path.read_text(encoding="utf-8", errors="replace")
            name, _, fields = stat.partition("(")[2].rpartition(")")
            if "gloo" in name and fields.split()[0] == "R":
                return True
    return False


def list_tcp_connections() -> set[str]:
    """Return the TCP connections of this process, as Linux names them; none if there is no /proc.

    gloo does not tell which connections it has opened: they are new after `init_process_group`.
    """
    return {name for name, _ in _open_connections()}


def shut_down_connections(names: Collection[str]) -> None:
    """Shut TCP connections down, for this process and for the processes at their other ends.

    gloo closes the connections of a process group only with the last reference to a collective. A
    rank that leaves a broken group shuts them down itself. Otherwise another rank, which waits for
    this one and not for the lost one, would wait until its timeout. Seen with torch 2.11 to 2.15.
    Can go, with `list_tcp_connections`, when torch can abort a gloo process group.
    """
    for name, connection in _open_connections():
        if name in names:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def _open_connections() -> Iterator[tuple[str, socket.socket]]:
    """Yield a copy of each TCP connection; another thread may close the original meanwhile."""
    with suppress(FileNotFoundError):
        for number in [int(path.name) for path in FD_FOLDER.iterdir()]:
            with suppress(OSError):
                copy = os.dup(number)
                try:
                    yield from _connection_of(copy)
                finally:
                    os.close(copy)


def _connection_of(number: int) -> Iterator[tuple[str, socket.socket]]:
    connection = socket.socket(fileno=number)  # raises OSError if it is no socket
    try:
        is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6)
        if is_tcp and connection.getpeername():
            yield str((FD_FOLDER / str(number)).readlink()), connection
    finally:
        connection.detach()
