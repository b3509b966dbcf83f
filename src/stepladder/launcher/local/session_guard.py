"""Ends the processes that ranks of a script have started, also if the launcher is killed.

The kernel kills a rank with its launcher, but not what the rank has started. So a small process,
the guard, is told of each rank. If the launcher ends without notice, the guard kills all processes
in the ranks' sessions. It does not find a process that has left its session, such as a daemon or a
container.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Collection
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

GUARD_DONE = b"done"
KILL_ROUNDS = 3  # a process may start another one while processes are listed
GUARD_EXIT_TIMEOUT_S = 5.0


class SessionGuard:
    """The launcher's side of the guard. It starts the guard, which is forked as the ranks are."""

    def __init__(self, context: BaseContext) -> None:
        guard_end, self._pipe = context.Pipe(duplex=False)
        self._process = context.Process(  # type: ignore[attr-defined]
            target=_guard_sessions, args=(guard_end, os.getpid())
        )
        self._process.start()
        guard_end.close()

    def add(self, pid: int) -> None:
        """Guard the session that the process `pid` leads."""
        with suppress(OSError):  # the guard was killed
            self._pipe.send_bytes(str(pid).encode())

    def close(self) -> None:
        """End the guard, and no other process."""
        with suppress(OSError):
            self._pipe.send_bytes(GUARD_DONE)
        self._pipe.close()
        self._process.join(GUARD_EXIT_TIMEOUT_S)


def _guard_sessions(pipe: Connection, launcher: int) -> None:
    """Wait until the launcher closes the guard or ends. Never returns."""
    os.setsid()  # a signal to the launcher's process group is not meant for this process
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    start_times: dict[int, str] = {}  # of the session leaders
    # Where ranks are forked from the launcher, they hold the other end of the pipe too.
    waited: list[Any] = [pipe]
    timeout: float | None = (
        0.0  # a launcher that ended before this process began has told of its ranks
    )
    with suppress(EOFError, OSError):
        with suppress(ProcessLookupError):
            waited.append(os.pidfd_open(launcher))
            timeout = None
        while pipe in wait(waited, timeout):
            if (message := pipe.recv_bytes()) == GUARD_DONE:
                os._exit(0)
            pid = int(message)
            start_times[pid] = _read_start_time(pid)
    for _ in range(KILL_ROUNDS):
        _kill_sessions(start_times)
    os._exit(0)


def _kill_sessions(start_times: dict[int, str]) -> None:
    # A leader that started at another time is a new process with the same id.
    sessions = {
        leader
        for leader, start_time in start_times.items()
        if _read_start_time(leader) in ("", start_time)
    }
    for pid in _find_session_members(sessions):
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _find_session_members(sessions: Collection[int]) -> list[int]:
    """Return the processes of some sessions. A session has the process id of its leader."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        with suppress(OSError):  # the process has ended
            if os.getsid(pid) in sessions:
                pids.append(pid)
    return pids


def _read_start_time(pid: int) -> str:
    """Return when a process started, in ticks of the kernel, or "" if it has ended."""
    with suppress(OSError, IndexError):
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
        fields_after_name = stat.rpartition(")")[2].split()
        return fields_after_name[19]
    return ""
