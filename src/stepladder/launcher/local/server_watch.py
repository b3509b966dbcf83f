"""Whether the process that ranks are forked from is stopped: then none can be started, and none is
seen to end.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from multiprocessing import forkserver

from stepladder.launcher.local.monitor import LOOKS_UNTIL_NAMED
from stepladder.launcher.local.rest import is_stopped


class ServerWatch:
    """Looks at the process as often as at the ranks."""

    def __init__(self) -> None:
        self.looks_stopped = 0

    def look(self) -> str | None:
        """Let the process go on where it has been stopped for a second, and return a line that says
        so.

        Nobody has a reason to stop it alone: Ctrl-Z stops it with its launcher and its ranks.
        """
        pid = server_pid()
        self.looks_stopped = self.looks_stopped + 1 if pid is not None and is_stopped(pid) else 0
        if self.looks_stopped < LOOKS_UNTIL_NAMED:
            return None
        self.looks_stopped = 0
        continue_server()
        return f"the process that ranks are forked from (pid {pid}) was stopped (SIGSTOP); it goes on (SIGCONT)"


def server_pid() -> int | None:
    """Return the process of multiprocessing's fork server, where one was started."""
    pid: int | None = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    return pid


def continue_server() -> None:
    """Let the process go on: to start a rank, it has to answer."""
    pid = server_pid()
    if pid is not None:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGCONT)
