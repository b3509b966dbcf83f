"""Starts the processes of ranks, which are forked from the fork server."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

from stepladder.core.errors import InputError
from stepladder.core.machine_limits import LIMITS_HINT
from stepladder.core.paths import FORK_SERVER_VALUE, SAFE_PATH_VARIABLE
from stepladder.launcher.local.fork_server_socket import reach_fork_server
from stepladder.launcher.local.fork_server_watch import continue_fork_server
from stepladder.launcher.local.group_spec import GroupSpec
from stepladder.launcher.local.monitor import MONITOR_INTERVAL_S
from stepladder.launcher.local.process_stats import count_oom_kills
from stepladder.launcher.local.rank_process import RankProcess
from stepladder.launcher.local.session_guard import SessionGuard
from stepladder.rank.fd_store import FdStore
from stepladder.rank.lifecycle import SharedResources, run_rank

MAX_START_ATTEMPTS = 5


class RankStarter:
    """Starts the ranks of one group.

    Args:
        context: The context of multiprocessing that starts the processes.
        work: What each rank does. It returns the rank's exit code.
        spec: What the ranks are.
        fd_store: Keeps open files of the ranks beyond their end.
    """

    def __init__(
        self, context: BaseContext, work: Callable[[], Any], spec: GroupSpec, fd_store: FdStore
    ) -> None:
        self._context = context
        self._work = work
        self._spec = spec
        self._fd_store = fd_store
        self._session_guard: SessionGuard | None = None

    def start(
        self,
        rank: int,
        local_rank: int,
        log_name: str,
        env: dict[str, str],
        errors: Path,
        channel: socket.socket,
    ) -> RankProcess:
        """Start the process of one rank.

        Args:
            rank: The number of the rank.
            local_rank: The position of the rank among those of its node.
            log_name: The name of the rank's log file, without a suffix.
            env: The environment variables of the rank.
            errors: The file in which the rank records an error.
            channel: The rank's end of its channel to the launcher.

        Returns:
            The rank, with its running process.
        """
        rank_channel = channel if self._spec.recovers_in_place else None
        shared = SharedResources(self._fd_store, rank_channel)
        with self._spec.output.open_pipes(log_name, rank, local_rank) as pipes:
            process = self._context.Process(  # type: ignore[attr-defined]
                target=run_rank, args=(self._work, env, errors, pipes, shared, self._spec.is_script)
            )
            oom_kills = count_oom_kills()
            if self._spec.start_method == "fork":
                process.start()
            else:
                continue_fork_server()
                _start_process(process)
        return RankProcess(rank, local_rank, process, errors, oom_kills)

    def guard_session(self, member: RankProcess) -> None:
        """Have the processes of the rank's session end with the launcher."""
        if self._session_guard is None:
            self._session_guard = SessionGuard(self._context)
        self._session_guard.add(member.pid)

    def close(self) -> None:
        """End the process that guards the sessions, if there is one."""
        if self._session_guard is not None:
            self._session_guard.close()


def _start_process(process: Any) -> None:
    """Start a process of multiprocessing, also if its fork server was killed a moment ago.

    Raises:
        InputError: The fork server ends each time.
    """
    for _ in range(MAX_START_ATTEMPTS):
        with suppress(EOFError, ConnectionError), reach_fork_server(), _hide_current_folder():
            process.start()
            return
        time.sleep(MONITOR_INTERVAL_S)  # until the old server has ended
    raise InputError("the process that ranks are forked from ends again and again", LIMITS_HINT)


@contextmanager
def _hide_current_folder() -> Iterator[None]:
    """Keep the current folder out of sys.path of interpreters that are started in the block.

    The fork server is started with `python -c`, which searches the current folder first: a
    random.py or cuda.py of the user would be imported in place of Python's or NVIDIA's. Ranks get
    the launcher's sys.path.
    """
    if SAFE_PATH_VARIABLE in os.environ:
        yield
        return
    os.environ[SAFE_PATH_VARIABLE] = FORK_SERVER_VALUE
    try:
        yield
    finally:
        del os.environ[SAFE_PATH_VARIABLE]
