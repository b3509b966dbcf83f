"""The run directory: one writer, one configuration, one result. Only rank 0 comes here.

config.json  what was asked (run_config.py)                 result.json  the finished run's last line
lock         who writes: host, pid, attempt, heartbeat      metrics.jsonl, timing.jsonl, ledger/, ...
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stepladder.core import durable
from stepladder.core.errors import InputError

LEDGER, SNAPSHOTS, MANIFEST = "ledger", "snapshots", "manifest.json"
CONFIG, RESULT, LOCK, METRICS, TIMING = "config.json", "result.json", "lock", "metrics.jsonl", "timing.jsonl"
SCHEMA = 1  # of config.json and result.json, and so of the directory
KEY = {CONFIG: "definition", RESULT: "steps"}  # what is read of them
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


class RunDir:
    """An open run directory, held by a lock until `close`.

    Raises InputError if another live run holds it, or if the place cannot be written.
    """

    def __init__(self, path: Path, lock_wait: float = 30.0) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise InputError(
                f"run directory {path} cannot be written: {error.strerror}",
                "--run-dir DIR in a place you can write",
            ) from error
        self._take(lock_wait)
        for name in (CONFIG, RESULT, METRICS):
            durable.clear(path, name)
        self.attempt = 1 + max(self._owner().get("attempt", 0), *self._ledger_attempts(), 0)
        self.heartbeat()

    def _take(self, lock_wait: float) -> None:
        """A killed run's lock is gone with its process; a live one gets `lock_wait` seconds to end."""
        deadline = time.monotonic() + lock_wait
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    owner = self._owner()
                    os.close(self._lock)
                    raise InputError(
                        f"run directory {self.path} is in use by process {owner.get('pid')} on"
                        f" {owner.get('host')}" + (f", job {owner['job']}" if owner.get("job") else ""),
                        "wait for it, stop it, or choose another --run-dir",
                    ) from None
                time.sleep(0.2)

    def _owner(self) -> dict[str, Any]:
        try:
            owner: dict[str, Any] = json.loads((self.path / LOCK).read_text())
        except (OSError, ValueError):
            return {}
        return owner

    def _ledger_attempts(self) -> list[int]:
        return [int(p.name[8:12]) for p in (self.path / LEDGER).glob("attempt-*.jsonl")]

    def heartbeat(self) -> None:
        """Say who writes here, and that it lives."""
        owner = {
            "host": socket.gethostname(), "pid": os.getpid(), "job": os.environ.get("SLURM_JOB_ID"),
            "attempt": self.attempt, "heartbeat": round(time.time(), 1),
        }  # fmt: skip
        text = json.dumps(owner).encode()
        os.pwrite(self._lock, text.ljust(256), 0)

    def guard(self) -> None:
        """Raises if another attempt has taken the directory over (a lock that a file system did not honour)."""
        attempt = self._owner().get("attempt")
        if attempt != self.attempt:
            raise RuntimeError(
                f"attempt {self.attempt} lost {self.path} to attempt {attempt}; nothing was written"
            )

    def stored(self, name: str) -> dict[str, Any] | None:
        """config.json or result.json, or None."""
        try:
            value: dict[str, Any] = json.loads((self.path / name).read_text())
            refuse_newer(value, self.path / name)
            value[KEY[name]]
            return value
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{self.path / name} is damaged ({error})", "--fresh") from error

    def store(self, name: str, value: dict[str, Any]) -> None:
        """Replace config.json or result.json, whole or not at all."""
        durable.write(self.path / name, json.dumps(value, indent=1) + "\n")

    def cut_metrics(self, step: int, steps_per_epoch: int) -> None:
        """Forget lines after `step` (and a torn last one): the run goes on from there.

        An evaluation in mid-epoch, made because the run was to stop there, is forgotten too.
        """
        log = self.path / METRICS
        if not log.exists():
            return
        kept = []
        for text in log.read_text(errors="replace").splitlines(keepends=True):
            try:
                line = json.loads(text)
                is_later = line["step"] > step
            except (ValueError, KeyError, TypeError):
                break
            if is_later or not text.endswith("\n"):
                break
            if "loss" in line or line["step"] % steps_per_epoch == 0:
                kept.append(text)
        durable.write(log, "".join(kept))

    def close(self) -> None:
        """Let the next run in, even while forked children (a DataLoader's workers) have the file open."""
        fcntl.flock(self._lock, fcntl.LOCK_UN)
        os.close(self._lock)


def refuse_newer(stored: dict[str, Any], path: Path) -> None:
    """Raises InputError where a later stepladder wrote the file: what it means now may not be what it meant."""
    schema = stored.get("schema", SCHEMA)
    if schema > SCHEMA:
        raise InputError(
            f"{path} was written by a newer stepladder: its schema is {schema}, this one knows {SCHEMA}",
            "pip install --upgrade stepladder, or another --run-dir",
        )


@contextmanager
def naming_full_disk(path: Path) -> Iterator[None]:
    """A disk that takes no more, as an InputError. path: where this block writes."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise InputError(
            f"{error.filename or path} cannot be written: {error.strerror}",
            "free space there, or choose another --run-dir; the last good snapshot is kept",
        ) from error


def snapshot_paths(folder: Path) -> list[Path]:
    """Complete snapshots in a folder of them, oldest first."""
    found = (path for path in folder.glob("step_*") if path.is_dir() and not path.suffix)
    return sorted(found, key=lambda path: (len(path.name), path.name))  # a step may have more than eight digits


def is_held(path: Path) -> bool:
    """Whether a live run writes this run directory; a killed one's lock is gone with its process."""
    try:
        lock = os.open(path / LOCK, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def move_aside(path: Path, lock_wait: float = 30.0) -> Path | None:
    """Rename a run directory to the first free `<dir>.old-N`. None where there is none to move.

    Raises InputError if a live run holds it.
    """
    if not path.exists():
        return None
    path = path.absolute()
    if Path.cwd().is_relative_to(path.resolve()):
        raise InputError(f"--fresh would move {path} away, which this command runs in", "--run-dir DIR below it")
    held = RunDir(path, lock_wait)
    try:
        number = next(n for n in range(1, 10**6) if not path.with_name(f"{path.name}.old-{n}").exists())
        return path.rename(path.with_name(f"{path.name}.old-{number}"))
    finally:
        held.close()


def finite(value: float) -> float | None:
    """JSON has no word for infinities and what is no number."""
    return value if math.isfinite(value) else None
