"""The ranks of one node, under a launcher that does not import torch.

Ranks are forked from a fork server that has imported torch and executed nothing of it, since a fork
after a parallel operation would hang. So N ranks cost one import, and a restart costs none.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from stepladder.core.address import find_free_port, make_loopback_env
from stepladder.core.console import print_message
from stepladder.core.machine_limits import validate_fork_server, validate_open_files
from stepladder.core.scratch import get_scratch_folder
from stepladder.launcher.diagnose.rank_status import RankStatus
from stepladder.launcher.local.attempt import AttemptSpec, GroupAttempt, GroupContext, StopRequest
from stepladder.launcher.local.consensus import Consensus
from stepladder.launcher.local.fork_server_watch import ForkServerWatch
from stepladder.launcher.local.group_spec import GroupSpec
from stepladder.launcher.local.monitor import Limits, Monitor
from stepladder.launcher.local.outcome import Outcome
from stepladder.launcher.local.process_stats import count_oom_kills
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
        process_context = multiprocessing.get_context("forkserver")
        process_context.set_forkserver_preload([FORK_SERVER_MODULE, *self.spec.preload_modules])
        # Keeps the lock of the run directory while no rank has it.
        self._fd_store = make_fd_store()
        self._starter = RankStarter(
            process_context,
            work,
            self.spec,
            self._fd_store,
        )
        self._fork_server_watch = ForkServerWatch()
        self._stop_request = StopRequest()
        self._context = GroupContext(
            spec=self.spec,
            limits=limits or Limits(),
            starter=self._starter,
            policy=self.restart_policy,
            stop_request=self._stop_request,
            release_locks=self.release_locks,
            dump_prefix=self._scratch / "progress",
            oom_kills=count_oom_kills(),
        )
        self._attempt = GroupAttempt(AttemptSpec(), self._context)  # without ranks, until the start

    @property
    def monitor(self) -> Monitor:
        """What observes the ranks of the current attempt."""
        return self._attempt.monitor

    @property
    def stop_signal(self) -> int:
        """The signal that asked the group to stop; 0 if there was none."""
        return self._stop_request.signal_number

    def run(
        self,
        nproc: int,
        attempt: int = 0,
        min_nproc: int | None = None,
    ) -> Outcome:
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
        return self.end()

    def start_single_node(
        self,
        nproc: int,
        attempt: int = 0,
        min_nproc: int | None = None,
    ) -> None:
        """Start ranks 0 to nproc - 1 of a single node, as described at `run`."""
        variables = {
            "WORLD_SIZE": str(nproc),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(find_free_port()),
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            **make_loopback_env(),
        }
        self._start(
            AttemptSpec(
                str(attempt),
                range(nproc),
                variables,
                min_ranks=min_nproc,
            )
        )

    def start(
        self,
        ranks: Sequence[int],
        attempt: str,
        variables: dict[str, str],
        joins: bool = False,
        consensus: Consensus | None = None,
    ) -> None:
        """Start this node's ranks of a launch on several nodes.

        Args:
            ranks: The numbers of the ranks.
            attempt: The number of the attempt, which is part of the names of log files.
            variables: The environment variables that are the same for all ranks.
            joins: Whether the ranks join ranks of other nodes, which train already.
            consensus: The agreement with the other nodes; None if a loss ends the attempt.
        """
        self._start(
            AttemptSpec(
                attempt,
                ranks,
                variables,
                joins,
                consensus or Consensus(),
            )
        )

    def _start(self, spec: AttemptSpec) -> None:
        validate_open_files(len(spec.ranks))
        self._attempt = GroupAttempt(spec, self._context)
        self._attempt.start()

    def poll(self) -> bool:
        """Wait a moment for events of the ranks, and handle them.

        Returns:
            Whether the attempt is over: all ranks have ended, or their time is up.
        """
        if self.stop_signal:
            self.request_stop()
        is_over = self._attempt.poll()
        text = self._fork_server_watch.poll()
        if text:
            print_message(text)
        return is_over

    def end_within(self, seconds: float) -> None:
        """End the ranks that still run after so many seconds."""
        self._attempt.end_within(seconds)

    def end(self) -> Outcome:
        """End the ranks that still run, and return how the attempt ended."""
        return self._attempt.end()

    def inspect_ranks(self) -> list[RankStatus]:
        """Return the status of each rank, with the stack that it has or ended with."""
        return self._attempt.inspect_ranks()

    def handle_stop_signal(self, signal_number: int, *_: Any) -> None:
        """Note that the ranks are to stop together at the end of a step.

        This is a signal handler, so it only sets flags. A second Ctrl-C ends the ranks of a script,
        which may ignore the first.
        """
        is_second_interrupt = self._stop_request.record(signal_number)
        if is_second_interrupt and self.spec.is_script:
            self._attempt.end_within(0)

    def request_stop(self) -> None:
        """Ask the ranks to stop together at the end of a step, within their time for it."""
        self._attempt.request_stop()

    def forward_signal(self, signal_number: int, *_: Any) -> None:
        """Send a signal to the ranks. This is a signal handler."""
        self._attempt.forward_signal(signal_number)

    def release_locks(self) -> None:
        """Release the locks that ranks of this group held."""
        for file in remove_all_fds(self._fd_store):
            # Explicitly, because a forked worker that hangs may have the file open as well.
            fcntl.flock(file, fcntl.LOCK_UN)
            os.close(file)

    def close(self) -> None:
        """End the ranks, and remove all that the group has made except for the ranks' output."""
        if self._attempt.running:
            self._attempt.kill()
        self.release_locks()
        for end in self._fd_store:
            end.close()
        self.spec.output.close()
        self._starter.close()
        shutil.rmtree(self._scratch, ignore_errors=True)
