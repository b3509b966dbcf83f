"""The run directory as its writer sees it: locked, checked and updated by rank 0 alone.

config.json  the run's definition (run_config.py)   result.json  what a finished run prints last
lock         the process that writes (lock.py)      metrics.jsonl, timing.jsonl, ledger/, ...
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from stepladder.core import durable
from stepladder.core.errors import InputError, StorageFault, as_input_error
from stepladder.rank.fd_store import has_fd_store
from stepladder.storage import metrics_file
from stepladder.storage.lock import (
    LINK_LOCK_FILE,
    LOCK_FILE,
    NO_OWNER,
    RunDirLock,
    is_lock_in_launcher,
    read_owner,
)
from stepladder.storage.run_dir_access import validate_run_dir_writable
from stepladder.storage.run_files import (
    CONFIG_FILE,
    LEDGER_FOLDER,
    METRICS_FILE,
    RESULT_FILE,
    RUN_FILES,
    SNAPSHOTS_FOLDER,
    list_attempts,
    list_snapshots,
    read_stored_json,
)

WRITABLE_HINT = "--run-dir DIR in a place you can write to"


class RunDir:
    """An open run directory, locked until it is closed.

    Args:
        path: The run directory, which is created if it does not exist.
        lock_wait: Seconds to wait for another run to end.
        fresh: Whether to rename an existing run to the first free `<dir>.old-N`. A directory that
            an earlier rank of the same launch has started stays.
        is_multi_node: Whether the launch has several nodes, whose agents hold locks too.
        attempt: Number of the attempt that continues here; by default a new one.

    Raises:
        InputError: If a live run has locked the directory, or it cannot be written.
    """

    def __init__(
        self,
        path: Path,
        lock_wait: float,
        fresh: bool = False,
        is_multi_node: bool = False,
        attempt: int | None = None,
    ) -> None:
        self.path = path
        fresh = fresh and not is_lock_in_launcher(path)
        if fresh:
            move_run_dir_aside(path, lock_wait, is_multi_node)
        self._lock = open_lock(path, lock_wait, NO_OWNER if fresh else None, is_multi_node)
        if fresh and not _has_only_locks(path):
            # Another run started after the old one was moved, and has ended already.
            self._lock.release()
            raise self._lock.make_in_use_error()
        try:
            validate_run_dir_writable(path)
        except InputError:
            self._lock.release()
            raise
        for name in (CONFIG_FILE, RESULT_FILE, METRICS_FILE):
            durable.remove_unfinished(path, name)
        previous = read_owner(path)
        last_attempt = max([previous.get("attempt") or 0, *list_attempts(path)])
        self.attempt = attempt or 1 + last_attempt
        self.has_snapshot: bool = previous.get("saved", False)
        self._last_heartbeat = 0.0  # time.monotonic()
        self._write_owner()

    def heartbeat(self, every: float = 0.0) -> None:
        """Write to the lock file that this run is alive.

        Args:
            every: Do nothing if the last heartbeat is less than this number of seconds ago.
        """
        if time.monotonic() - self._last_heartbeat >= every:
            self.validate_ownership()
            with suppress(StorageFault):  # the next heartbeat tries again
                self._write_owner()

    def _write_owner(self) -> None:
        self._last_heartbeat = time.monotonic()
        self.has_snapshot = self.has_snapshot or bool(list_snapshots(self.path / SNAPSHOTS_FOLDER))
        self._lock.write_owner(
            {
                "job": os.environ.get("SLURM_JOB_ID"),
                "attempt": self.attempt,
                "heartbeat": round(time.time(), 1),
                "saved": self.has_snapshot,
            }
        )

    def validate_ownership(self) -> None:
        """Raise InputError if another run has taken over the directory.

        Called before every write that replaces a file.
        """
        self._lock.validate_ownership()

    def read_json(self, name: str) -> dict[str, Any] | None:
        """Return the content of config.json or result.json, None if the file does not exist."""
        return read_stored_json(self.path, name)

    def write_json(self, name: str, value: dict[str, Any]) -> None:
        """Replace config.json or result.json atomically."""
        self.validate_ownership()
        durable.write(self.path / name, json.dumps(value, indent=1) + "\n")

    def validate_snapshots_exist(self) -> None:
        """Raise InputError if the run has saved snapshots and all of them are gone.

        Without this check, it would silently start again at step 0.

        Raises:
            InputError: If so.
        """
        if self.has_snapshot or (self.path / RESULT_FILE).exists():
            step = metrics_file.read_last_step(self.path)
            raise InputError(
                f"run directory {self.path} has no snapshot any more,"
                f" and its {METRICS_FILE} has {step} steps",
                f"put a snapshot back into {self.path / SNAPSHOTS_FOLDER},"
                " or --fresh to begin again",
            )

    def truncate_metrics(self, step: int, steps_per_epoch: int) -> None:
        """Remove the lines of metrics.jsonl after `step`, from which the run continues."""
        metrics_file.truncate_metrics(self.path, step, steps_per_epoch, self.validate_ownership)

    def truncate_recent_metrics(self, step: int, steps_per_epoch: int) -> None:
        """Remove the same lines in an in-place recovery, without reading the whole file."""
        metrics_file.truncate_recent_metrics(
            self.path, step, steps_per_epoch, self.validate_ownership
        )

    def close(self, failed: bool = False) -> None:
        """Release the lock.

        Args:
            failed: Whether the run failed. The lock then stays with the launcher, if there is one,
                because it may start the next attempt.
        """
        if failed and has_fd_store():
            self._lock.close()
        else:
            self._lock.release()


def move_run_dir_aside(
    path: Path, lock_wait: float = 30.0, is_multi_node: bool = False
) -> Path | None:
    """Rename a run directory to the first free `<dir>.old-N`.

    Args:
        path: The run directory.
        lock_wait: Seconds to wait for a run that has locked it.
        is_multi_node: Whether the launch has several nodes.

    Returns:
        The new path, None if the directory does not exist or is empty.

    Raises:
        InputError: If it contains no run, a live run has locked it, or a run has finished there
            while this one waited.
    """
    if not path.exists() or _has_only_locks(path):
        return None
    path = path.absolute()
    if Path.cwd().is_relative_to(path.resolve()):
        raise InputError(
            f"--fresh would move {path} away, and this command runs in it", "--run-dir DIR below it"
        )
    if not any(
        os.path.lexists(path / name) for name in (*RUN_FILES, LEDGER_FOLDER, SNAPSHOTS_FOLDER)
    ):
        raise InputError(
            f"--fresh would move {path} away, and it holds no run",
            "leave --fresh out, or another --run-dir",
        )
    lock = open_lock(path, lock_wait, is_multi_node=is_multi_node)
    try:
        if lock.has_waited and (path / RESULT_FILE).exists():
            raise lock.make_in_use_error()
        candidates = (path.with_name(f"{path.name}.old-{number}") for number in count(1))
        return lock.move_folder(
            next(candidate for candidate in candidates if not candidate.exists())
        )
    finally:
        lock.release()


def open_lock(
    path: Path, wait: float, expected: dict[str, Any] | None = None, is_multi_node: bool = False
) -> RunDirLock:
    """Create the run directory if it does not exist, and lock it; arguments as of `RunDirLock`."""
    with as_input_error(f"run directory {path} cannot be written", WRITABLE_HINT):
        durable.make_folder(path)
        return RunDirLock(path, wait, expected, is_multi_node)


def _has_only_locks(path: Path) -> bool:
    """Return whether a directory contains nothing but lock files of runs that tried to open it."""
    return path.is_dir() and all(
        entry.name == LOCK_FILE or entry.name.startswith(LINK_LOCK_FILE) for entry in path.iterdir()
    )
