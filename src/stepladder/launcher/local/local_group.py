"""The ranks of one node, under a launcher that does not import torch.

Ranks are forked from a fork server that has imported torch and executed nothing of it, since a fork
after a parallel operation would hang. So N ranks cost one import, and a restart costs none.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stepladder.core.address import find_free_port, make_loopback_env
from stepladder.core.console import print_message
from stepladder.core.machine_limits import validate_fork_server, validate_open_files
from stepladder.core.scratch import get_scratch_folder
from stepladder.launcher.local.attempt import AttemptSpec, GroupAttempt, GroupContext, StopRequest
from stepladder.launcher.local.fork_server_watch import ForkServerWatch, kill_fork_server
from stepladder.launcher.local.group_spec import GroupSpec
from stepladder.launcher.local.monitor import Limits
from stepladder.launcher.local.outcome import Outcome
from stepladder.launcher.local.rank_starter import RankStarter
from stepladder.launcher.local.restart_policy import RestartPolicy
from stepladder.rank.fd_store import make_fd_store, remove_all_fds

FORK_SERVER_MODULE = "stepladder.launcher.local.fork_server"


class LocalGroup:
    """The ranks of one node, over all their attempts.

    Args:
        work: What each rank does. It returns the rank's exit code.
        threads: The intra-op threads of each rank.
        limits: How long ranks may make no progress.
        spec: What the ranks are.
    """

    def __init__(
        self,
        work: Callable[[], Any],
        threads: int,
        limits: Limits | None = None,
        spec: GroupSpec | None = None,
    ) -> None:
        validate_fork_server()
        self.spec = spec or GroupSpec()
        self.restart_policy = RestartPolicy(
            has_steps=not self.spec.is_script, report=self.spec.report_failure
        )
        self._scratch = Path(tempfile.mkdtemp(dir=get_scratch_folder()))
        # The fork server takes its environment from here. A rank cannot set this variable before
        # torch is imported.
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
        process_context = multiprocessing.get_context(self.spec.start_method)
        process_context.set_forkserver_preload([FORK_SERVER_MODULE, *self.spec.preload_modules])
        # Keeps the lock of the run directory while no rank has it.
        self._fd_store = make_fd_store()
        self._fork_server_watch = ForkServerWatch()
        self._is_starting = False
        self._context = GroupContext(
            spec=self.spec,
            limits=limits or Limits(),
            starter=RankStarter(process_context, work, self.spec, self._fd_store),
            policy=self.restart_policy,
            stop_request=StopRequest(),
            release_locks=self.release_locks,
            dump_prefix=self._scratch / "progress",
        )
        # The current attempt; one without ranks before the first start.
        self.attempt = GroupAttempt(AttemptSpec(), self._context)

    @property
    def stop_signal(self) -> int:
        """The signal that asked the group to stop; 0 if there was none."""
        return self._context.stop_request.signal_number

    def run(self, nproc: int, attempt: int = 0, min_nproc: int | None = None) -> Outcome:
        """Run ranks 0 to nproc - 1 of a single node until they end.

        Args:
            nproc: The number of ranks.
            attempt: The number of the attempt, from 0.
            min_nproc: The smallest number of ranks that may continue without one that fails
                repeatedly; None if such a rank is always replaced.

        Returns:
            How the ranks have ended.
        """
        self.start_single_node(nproc, attempt, min_nproc)
        while not self.poll():
            pass
        return self.attempt.end()

    def start_single_node(self, nproc: int, attempt: int = 0, min_nproc: int | None = None) -> None:
        """Start ranks 0 to nproc - 1 of a single node, as described at `run`."""
        variables = {
            "WORLD_SIZE": str(nproc),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(find_free_port()),
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            **make_loopback_env(),
        }
        self._is_starting = True
        self.start(AttemptSpec(str(attempt), range(nproc), variables, min_ranks=min_nproc))
        self._is_starting = False

    def start(self, spec: AttemptSpec) -> None:
        """Start the ranks of one attempt on this node."""
        validate_open_files(len(spec.ranks))
        self.attempt = GroupAttempt(spec, self._context)
        self.attempt.start()

    def poll(self) -> bool:
        """Wait a moment for events of the ranks, and handle them.

        Returns:
            Whether the attempt is over: all ranks have ended, or their time is up.
        """
        if self.stop_signal:
            self.attempt.request_stop()
        is_over = self.attempt.poll()
        text = self._fork_server_watch.poll()
        if text:
            print_message(text)
        return is_over

    def handle_stop_signal(self, signal_number: int, *_: Any) -> None:
        """Note that the ranks are to stop together at the end of a step.

        This is a signal handler, so it only sets flags. A second Ctrl-C ends the ranks of a script,
        which may ignore the first.

        Raises:
            KeyboardInterrupt: A single node still waits for its first rank: the import of torch may
                take long.
        """
        is_second_interrupt = self._context.stop_request.record(signal_number)
        if signal_number == signal.SIGINT and self._is_starting and not self.attempt.running:
            kill_fork_server()
            raise KeyboardInterrupt
        if is_second_interrupt and self.spec.is_script:
            self.attempt.end_within(0)

    def forward_signal(self, signal_number: int, *_: Any) -> None:
        """Send a signal to the ranks. This is a signal handler."""
        self.attempt.forward_signal(signal_number)

    def release_locks(self) -> None:
        """Release the locks that ranks of this group held."""
        for file in remove_all_fds(self._fd_store):
            # Explicitly, because a forked worker that hangs may have the file open as well.
            fcntl.flock(file, fcntl.LOCK_UN)
            os.close(file)

    def close(self) -> None:
        """End the ranks, and remove all that the group has made except for the ranks' output."""
        if self.attempt.running:
            self.attempt.kill()
        self.release_locks()
        for end in self._fd_store:
            end.close()
        self.spec.output.close()
        self._context.starter.close()
        shutil.rmtree(self._scratch, ignore_errors=True)
