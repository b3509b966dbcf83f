"""Who writes a run directory: one run at a time.

The kernel's lock on the file `lock` says that its writer lives. The token in that file says who the writer is, and
is compared before every write that replaces something: a file system that does not honour locks, and a directory
that was moved away under its writer, are noticed there.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from stepladder.core.errors import InputError
from stepladder.rank.keepsake import keep, kept

LOCK, HELD = "lock", "lock.held"
BYTES = 320  # of the lock file, so that a shorter owner leaves nothing of a longer one
UNSUPPORTED = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
SECONDS_BETWEEN_TRIES = 0.2


class Lock:
    """The lock of `folder`, which must be there; held until `release`.

    wait: seconds to wait for another run to end.  waited: whether there was one. Raises InputError where another
    live run holds it, or another one came while this one waited; OSError where the folder cannot be written.
    """

    def __init__(self, folder: Path, wait: float) -> None:
        self.folder, self.path, self.token = folder, folder / LOCK, secrets.token_hex(8)
        self.by_name = False  # held by the file HELD, where the file system has no locks
        self.waited = False
        self.file = self._take(wait)
        keep(self.file)

    def _is_ours(self, file: int) -> bool:
        """Whether an open lock file is the one that the folder has now."""
        try:
            return os.path.samestat(os.fstat(file), self.path.stat())
        except FileNotFoundError:
            return False

    def _take(self, wait: float) -> int:
        """A killed run's lock is gone with its process; a live one gets `wait` seconds to end."""
        deadline, first = time.monotonic() + wait, owner_of(self.folder)
        while True:
            had_ended = has_ended(owner_of(self.folder))
            file = kept(self._is_ours) or os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                if self._try(file):
                    break
            except BaseException:
                os.close(file)
                raise
            os.close(file)
            owner = owner_of(self.folder)
            first = first or owner
            if not (self.by_name and had_ended):  # else its file was all there was, and is out of the way now
                self.waited = True
                if time.monotonic() > deadline or is_another(first, owner):
                    raise self.refusal()
            time.sleep(SECONDS_BETWEEN_TRIES)
        if not self._is_ours(file) or is_another(first, owner_of(self.folder)):
            os.close(file)
            raise self.refusal()
        return file

    def _try(self, file: int) -> bool:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            self.by_name = True
            return self._try_by_name(error)

    def _try_by_name(self, error: OSError) -> bool:
        """Without locks, a file that only one can create. It stays after a kill, so a stale one is told apart."""
        held = self.folder / HELD
        with suppress(FileExistsError):
            held.touch(exist_ok=False)
            return True
        owner = owner_of(self.folder)
        if has_ended(owner):
            with suppress(FileNotFoundError):  # by another one that waits: it tries anew, as this one does
                held.rename(held.with_name(f"{HELD}.{self.token}"))
                held.with_name(f"{HELD}.{self.token}").unlink()
            return False
        if owner.get("host") == socket.gethostname():
            return False
        raise InputError(
            f"run directory {self.folder} is in use by {told(owner)}, if that still lives: the file system has no"
            f" locks (flock: {error.strerror})",
            f"mount it with locks (Lustre: -o flock), or rm {held} if that run has ended",
        ) from error

    def refusal(self) -> InputError:
        """What to raise where another run has the folder."""
        return InputError(
            f"run directory {self.folder} is in use by {told(owner_of(self.folder))}",
            "wait for it, stop it, or choose another --run-dir",
        )

    def write(self, about: dict[str, Any]) -> None:
        """Say who holds it: what is `about` the writer, and the token."""
        text = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), **about, "token": self.token})
        os.pwrite(self.file, text.encode().ljust(BYTES), 0)

    def guard(self) -> None:
        """Raises InputError where another run has the folder: nothing may be written there any more."""
        owner = owner_of(self.folder)
        if owner.get("token") != self.token:
            by = f"to {told(owner)}" if owner else "(its lock file is gone)"
            raise InputError(
                f"this run has lost run directory {self.folder} {by}; nothing was written",
                "look who writes there; to train beside it, choose another --run-dir",
            )

    def release(self) -> None:
        """Let the next run in, even while forked children (a DataLoader's workers) have the file open."""
        if self.by_name:
            (self.folder / HELD).unlink(missing_ok=True)
        else:
            fcntl.flock(self.file, fcntl.LOCK_UN)
        self.close()

    def close(self) -> None:
        """After a failure: what holds this process's file besides, its launcher, goes on holding the lock."""
        os.close(self.file)


def owner_of(folder: Path) -> dict[str, Any]:
    """What the lock file says: host, pid, job, attempt, heartbeat, token. {} where it says nothing."""
    try:
        owner = json.loads((folder / LOCK).read_bytes())
    except (OSError, ValueError):
        return {}
    return owner if isinstance(owner, dict) else {}


def told(owner: dict[str, Any]) -> str:
    if not owner:
        return "another run"
    job = f", job {owner['job']}" if owner.get("job") else ""
    return f"process {owner.get('pid')} on {owner.get('host')}{job}"


def is_another(first: dict[str, Any], now: dict[str, Any]) -> bool:
    """Whether a lock file that named a writer now names another one."""
    return bool(first) and any(first.get(key) != now.get(key) for key in ("host", "pid", "attempt", "token"))


def has_ended(owner: dict[str, Any]) -> bool:
    """Whether the writer is known to have ended: a process of this machine that is not there."""
    pid = owner.get("pid")
    return owner.get("host") == socket.gethostname() and isinstance(pid, int) and not psutil.pid_exists(pid)


def is_held(folder: Path) -> bool:
    """Whether a live run writes this run directory; a killed one's lock is gone with its process."""
    try:
        file = os.open(folder / LOCK, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return (folder / HELD).exists() and not has_ended(owner_of(folder))
    finally:
        os.close(file)
    return False
