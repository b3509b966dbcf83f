"""Who writes a run directory: one run at a time.

The kernel's lock on the file `lock` says that its writer lives. The token in that file says who the
writer is, and is compared before every write that replaces something: a file system that does not
honour locks, and a directory that was moved away under its writer, are noticed there."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from stepladder.core import typed_file
from stepladder.core.errors import InputError, StorageFault, as_input_error, get_reason, to_one_line
from stepladder.core.typed_file import convert
from stepladder.rank.fd_store import find_stored_fd, store_fd

LOCK, HELD = "lock", "lock.held"
MEETING, AGENTS = (
    "rendezvous.lock",
    "rendezvous.agents",
)  # of a launch on several nodes: nodes/rendezvous.py
MOST_PID, MOST_ATTEMPT = 2**31 - 1, 10**9
BYTES = 320  # of the lock file, so that a shorter owner leaves nothing of a longer one
UNSUPPORTED = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
SECONDS_BETWEEN_TRIES = 0.2
SECONDS_TO_READ = 10.0  # one's own lock file: a network file system may forget it for a while
NOBODY = {"token": None}  # expected of a folder that is new


@dataclass(frozen=True)
class Owner:
    """What a lock file may say. ValueError for what no writer has said.

    saved: whether the run directory has had a snapshot.
    """

    host: str = ""
    pid: int | None = None
    job: str | None = None
    attempt: int | None = None
    heartbeat: float | None = None
    saved: bool = False
    token: str = ""

    def __post_init__(self) -> None:
        if not (0 <= (self.pid or 0) <= MOST_PID and 0 <= (self.attempt or 0) <= MOST_ATTEMPT):
            raise ValueError("no process, or no attempt, has such a number")


class Lock:
    """The lock of `folder`, which must be there; held until `release`.

    wait: seconds to wait for another run to end.  waited: whether there was one.  expected: whom
    the lock file may name; by default the one that it names now.  of_nodes: for a launch on several
    nodes, whose agents live. Raises InputError where another live run holds it, or another one came
    while this one waited; OSError where the folder cannot be written."""

    def __init__(
        self,
        folder: Path,
        wait: float,
        expected: dict[str, Any] | None = None,
        of_nodes: bool = False,
    ) -> None:
        self.folder, self.path, self.token = folder, folder / LOCK, secrets.token_hex(8)
        self.by_name = False  # held by the file HELD, where the file system has no locks
        self.waited, self.is_kept, self.of_nodes = False, False, of_nodes
        self.file = self._take(wait, owner_of(folder) if expected is None else expected)

    def _take(self, wait: float, expected: dict[str, Any]) -> int:
        """A killed run's lock is gone with its process; a live one gets `wait` seconds to end."""
        deadline = time.monotonic() + wait
        while True:
            file = self._open()
            try:
                if self._try(file):
                    if _is_file(file, self.path) and not is_another(
                        expected, owner_of(self.folder)
                    ):
                        return file
                    self._give_up_name()
                    raise self.refusal()
            except BaseException:
                os.close(file)
                raise
            os.close(file)
            self.waited, owner = True, owner_of(self.folder)
            expected = expected or owner
            if time.monotonic() > deadline or is_another(expected, owner):
                raise self.refusal()
            time.sleep(SECONDS_BETWEEN_TRIES)

    def _open(self) -> int:
        if (file := find_stored_fd(partial(_is_file, path=self.path))) is not None:
            self.is_kept = True
            return file
        try:
            return open_lock_file(self.path)
        except FileNotFoundError:  # the folder was there: another run has just moved it aside
            raise self.refusal() from None

    def _try(self, file: int) -> bool:
        try:
            if not try_lock(file):
                return False
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            self.by_name = True
            return self._try_by_name(error)
        if self.of_nodes or not _has_agents(self.folder):
            return True
        fcntl.flock(file, fcntl.LOCK_UN)  # they may be about to come for it
        return False

    def _try_by_name(self, error: OSError) -> bool:
        """Without locks, a file that only one can create, with its name in it. It stays after a
        kill.

        Only one process of a machine at a time replaces one whose writer has ended there.
        """
        held, mine = self.folder / HELD, self.folder / f"{HELD}.{self.token}"
        mine.write_text(self._described({}), encoding="utf-8")
        try:
            with suppress(FileExistsError):
                os.link(mine, held)
                return True
            with _alone_on_this_machine(self.folder) as alone:
                owner = _read(held) or owner_of(self.folder)
                if alone and has_ended(owner):
                    mine.replace(held)
                    return True
        finally:
            mine.unlink(missing_ok=True)
        if not alone or owner.get("host") == socket.gethostname():
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
        """Say who holds it: what is `about` the writer, and the token. From then on a launcher
        keeps it.
        """
        if not self.is_kept:
            store_fd(self.file)
            self.is_kept = True
        with as_input_error(
            f"{self.path} cannot be written", "--run-dir DIR in a place you can write to"
        ):
            os.ftruncate(self.file, BYTES)  # a damaged file may be longer, and would not be read
            os.pwrite(self.file, self._described(about).encode().ljust(BYTES), 0)

    def _described(self, about: dict[str, Any]) -> str:
        return json.dumps(
            {"host": socket.gethostname(), "pid": os.getpid(), **about, "token": self.token}
        )

    def guard(self) -> None:
        """Raise InputError where another run has the folder: nothing may be written there any more.

        Raises StorageFault where that cannot be seen for SECONDS_TO_READ.
        """
        owner = self._read_owner()
        if owner.get("token") != self.token:
            by = f"to {told(owner)}" if owner else "(its lock file is gone)"
            raise InputError(
                f"this run has lost run directory {self.folder} {by}; nothing was written",
                "look who writes there; to train beside it, choose another --run-dir",
            )

    def _read_owner(self) -> dict[str, Any]:
        """Return what the lock file says, {} where there is none. What does not tell is read again
        for a while.
        """
        deadline = time.monotonic() + SECONDS_TO_READ
        while True:
            try:
                return _read_strictly(self.path)
            except FileNotFoundError:
                return {}
            except (OSError, ValueError) as error:
                if time.monotonic() > deadline:
                    raise StorageFault(
                        f"{self.path} cannot be read, so this run cannot see whether it still has its directory:"
                        f" {get_reason(error)}"
                    ) from error
            time.sleep(SECONDS_BETWEEN_TRIES)

    def release(self) -> None:
        """Let the next run in, even while forked children (a DataLoader's workers) have the file
        open.
        """
        if self.by_name:
            self._give_up_name()
        else:
            fcntl.flock(self.file, fcntl.LOCK_UN)
        self.close()

    def _give_up_name(self) -> None:
        if _read(self.folder / HELD).get("token") == self.token:
            (self.folder / HELD).unlink()

    def close(self) -> None:
        """After a failure: what holds this process's file besides, its launcher, goes on holding
        the lock.
        """
        os.close(self.file)


def open_lock_file(path: Path) -> int:
    """Made if need be. Raises OSError, and InputError for a link: what it names would be made."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise InputError(
            f"{path} is a link, and not a file", f"rm {path}, or another --run-dir"
        ) from error


def try_lock(file: int, how: int = fcntl.LOCK_EX) -> bool:
    """Lock an open file, if nobody else holds it. Raises OSError where the file system has no
    locks.
    """
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False


def is_kept(folder: Path) -> bool:
    """Whether an earlier rank of this launch has written there, and left the lock with its
    launcher.
    """
    file = find_stored_fd(partial(_is_file, path=folder / LOCK))
    if file is not None:
        os.close(file)
    return file is not None


def _is_file(file: int, path: Path) -> bool:
    """Whether an open lock file is the one that the folder has now."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def owner_of(folder: Path) -> dict[str, Any]:
    """What the lock file says: host, pid, job, attempt, heartbeat, saved, token. {} where it says
    nothing.
    """
    return _read(folder / LOCK)


def _read(path: Path) -> dict[str, Any]:
    try:
        return _read_strictly(path)
    except (OSError, ValueError):
        return {}


def _read_strictly(path: Path) -> dict[str, Any]:
    """Return what a lock file says. Raises OSError, and ValueError for what no writer has written."""
    owner: dict[str, Any] = typed_file.parse_json(typed_file.read_file(path), dict)
    convert(owner, Owner)
    return owner


@contextmanager
def _alone_on_this_machine(folder: Path) -> Iterator[bool]:
    """Whether no other process of this machine is in such a block for `folder`.

    By a name that the kernel gives to one socket at a time, and takes back when its process ends.
    """
    about = folder.stat()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as name:
        try:
            name.bind(f"\0stepladder-{about.st_dev}-{about.st_ino}")
        except OSError:
            yield False
        else:
            yield True


def told(owner: dict[str, Any]) -> str:
    if not owner:
        return "another run"
    job = f", job {owner['job']}" if owner.get("job") else ""
    return to_one_line(f"process {owner.get('pid')} on {owner.get('host')}{job}")


def is_another(first: dict[str, Any], now: dict[str, Any]) -> bool:
    """Whether a lock file that named a writer now names another one."""
    return bool(first) and any(
        first.get(key) != now.get(key) for key in ("host", "pid", "attempt", "token")
    )


def has_ended(owner: dict[str, Any]) -> bool:
    """Whether the writer is known to have ended: a process of this machine that is not there."""
    pid = owner.get("pid")
    return (
        owner.get("host") == socket.gethostname()
        and isinstance(pid, int)
        and not psutil.pid_exists(pid)
    )


def is_held(folder: Path) -> bool:
    """Whether a live run writes this run directory; a killed one's lock is gone with its process."""
    try:
        file = os.open(folder / LOCK, os.O_RDONLY)
    except OSError:
        return False
    try:
        return not try_lock(file, fcntl.LOCK_SH)
    except OSError:
        return (folder / HELD).exists() and not has_ended(_read(folder / HELD) or owner_of(folder))
    finally:
        os.close(file)


def _has_agents(folder: Path) -> bool:
    """Whether those of a launch on several nodes live here. None comes or goes while the other file
    is locked.
    """
    with ExitStack() as opened:
        for name in (MEETING, AGENTS):
            try:
                file = os.open(folder / name, os.O_RDWR)
            except FileNotFoundError:
                return False
            opened.callback(os.close, file)
            if not try_lock(file):
                return True
    return False
