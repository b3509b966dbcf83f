"""What all parts of one attempt of a run share: the run, its ranks, and how they open its files."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from stepladder.core.console import write_text
from stepladder.storage.run_dir import RunDir
from stepladder.storage.run_files import SNAPSHOTS_FOLDER
from stepladder.storage.snapshot_store import Snapshots
from stepladder.storage.start_records import record_begin, record_end
from stepladder.train.comm import Comm
from stepladder.train.metrics.loggers import Logger, open_loggers
from stepladder.train.run_spec import RunSpec


@dataclass(frozen=True)
class RunAttempt:
    """One attempt of a run on one rank.

    Args:
        spec: The run.
        comm: The ranks that train it.
        loggers: The user's own loggers, called on the first rank.
        exit_stack: Closes what the attempt has opened.
    """

    spec: RunSpec
    comm: Comm
    loggers: Sequence[Logger]
    exit_stack: ExitStack

    def report(self, text: str) -> None:
        """Print text for the person who started the run, on the first rank."""
        if text and self.spec.settings.progress and self.comm.world.is_first:
            write_text(text, sys.stderr)

    def open_run_dir(self, is_fresh: bool = False, number: int | None = None) -> RunDir:
        """Open the run directory, on the first rank.

        Args:
            is_fresh: Whether an earlier run in the directory is moved aside.
            number: The number of an attempt that continues here; None for a new attempt.

        Returns:
            The directory, which is closed as failed if an error ends the run.
        """
        settings = self.spec.settings
        run_dir = RunDir(
            settings.run_dir,
            settings.lock_wait,
            is_fresh,
            is_multi_node=settings.most_ranks > 0,
            attempt=number,
        )

        def close(_type: object, error: BaseException | None, _trace: object) -> None:
            run_dir.close(failed=error is not None)

        self.exit_stack.push(close)
        return run_dir

    def record_start(self, run_dir: RunDir) -> None:
        """Record on the first rank that the attempt begins, and when it ends."""
        number = run_dir.attempt
        record_begin(run_dir.path, number)

        def record(_type: object, error: BaseException | None, _trace: object) -> None:
            record_end(run_dir.path, number, failed=error is not None)

        self.exit_stack.push(record)

    def open_snapshots(self, run_dir: RunDir) -> Snapshots:
        """Open the snapshots of the run directory, on the first rank."""
        settings = self.spec.settings
        folder = settings.run_dir / SNAPSHOTS_FOLDER
        return Snapshots(folder, settings.keep, run_dir.validate_ownership)

    def open_loggers(self, run_dir: RunDir | None) -> Sequence[Logger]:
        """Open the loggers of the run, on the first rank."""
        return open_loggers(run_dir, self.loggers, self.spec.settings.log_to, self.spec.definition)
