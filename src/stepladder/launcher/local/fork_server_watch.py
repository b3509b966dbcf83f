"""Detects that the fork server is stopped: then no rank can be started or is seen to end."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from multiprocessing import forkserver

from stepladder.launcher.local.monitor import POLLS_UNTIL_REPORTED
from stepladder.launcher.local.process_stats import is_stopped


class ForkServerWatch:
    """Watches the fork server, as often as the ranks are polled."""

    def __init__(self) -> None:
        self._polls_stopped = 0

    def poll(self) -> str | None:
        """Continue the fork server if it has been stopped for a second.

        Nobody has a reason to stop it alone: Ctrl-Z stops it with its launcher and its ranks.

        Returns:
            A message for the user if it was stopped.
        """
        pid = _find_fork_server()
        if pid is None or not is_stopped(pid):
            self._polls_stopped = 0
            return None
        self._polls_stopped += 1
        if self._polls_stopped < POLLS_UNTIL_REPORTED:
            return None
        self._polls_stopped = 0
        continue_fork_server()
        return (
            f"the process that ranks are forked from (pid {pid}) was stopped (SIGSTOP),"
            " and is continued (SIGCONT)"
        )


def _find_fork_server() -> int | None:
    """Return the process id of multiprocessing's fork server, if one was started."""
    pid: int | None = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    return pid


def continue_fork_server() -> None:
    """Continue the fork server in case it is stopped: it has to answer to start a rank."""
    _signal_fork_server(signal.SIGCONT)


def kill_fork_server() -> None:
    """End the fork server: it would fork the rank that a launcher asked for when it was ended."""
    _signal_fork_server(signal.SIGKILL)


def _signal_fork_server(number: signal.Signals) -> None:
    pid = _find_fork_server()
    if pid is not None:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
