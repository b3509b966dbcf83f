"""What ranks of a script have started ends with their launcher, also where the launcher is killed.

A rank dies with its launcher, by the kernel's hand. What the rank has started does not. So a small
process hears of each rank. When the launcher goes without a word, this process ends all that are in
the ranks' sessions. It does not find what has left its session, as a daemon or a container does.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

DONE = b"done"
ROUNDS = 3  # of looking for processes: one may start another meanwhile
SECONDS_TO_END = 5.0


class SessionGuard:
    """The launcher's side. It starts the process, which is forked from the ranks' own server."""

    def __init__(self, context: BaseContext) -> None:
        theirs, self.pipe = context.Pipe(duplex=False)
        self.process: Any = context.Process(target=guard_sessions, args=(theirs,))  # type: ignore[attr-defined]
        self.process.start()
        theirs.close()

    def add(self, pid: int) -> None:
        """Tell it of a rank, which leads a session."""
        with suppress(OSError):  # somebody has ended it
            self.pipe.send_bytes(str(pid).encode())

    def close(self) -> None:
        """End it, and nothing else: the launcher has ended what is to be ended."""
        with suppress(OSError):
            self.pipe.send_bytes(DONE)
        self.pipe.close()
        self.process.join(SECONDS_TO_END)


def guard_sessions(pipe: Connection) -> None:
    """Wait for the launcher's word, or its end. Never returns."""
    os.setsid()  # a signal to the launcher's group is not for this process
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sessions: dict[int, str] = {}
    with suppress(EOFError, OSError):
        while (message := pipe.recv_bytes()) != DONE:
            sessions[int(message)] = began(int(message))
        os._exit(0)
    for _ in range(ROUNDS):
        for pid in members_of(
            {leader for leader, start in sessions.items() if began(leader) in ("", start)}
        ):
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
    os._exit(0)


def members_of(sessions: set[int]) -> list[int]:
    """Return the processes of these sessions, which are called by the number of the process that
    leads them.
    """
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            if os.getsid(int(place.name)) in sessions:
                found.append(int(place.name))
    return found


def began(pid: int) -> str:
    """Return when a process began, in the kernel's ticks, or "" where it has ended: numbers are
    given again.
    """
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    return ""
