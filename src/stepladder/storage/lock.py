"""The lock of a run directory, which lets one run at a time write there.

A kernel lock (flock) on the file `lock` shows that the writer is alive. A token in that file shows
who the writer is, and is compared before every write that replaces something. The token detects
file systems that ignore locks, and a directory that was moved away while its run was writing.
"""

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
from stepladder.core.waiting import retry
from stepladder.rank.fd_store import find_stored_fd, store_fd

JsonObject = dict[str, Any]
LOCK_FILE = "lock"
LINK_LOCK_FILE = "lock.held"  # the lock where the file system has none: see _lock_by_link
RENDEZVOUS_LOCK_FILE = "rendezvous.lock"  # of a launch on several nodes
AGENTS_LOCK_FILE = "rendezvous.agents"
MAX_PID = 2**31 - 1
MAX_ATTEMPT = 10**9
LOCK_FILE_BYTES = 320  # a fixed length, so that a short content leaves nothing of a longer one
NO_LOCKS_ERRNOS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
LOCK_RETRY_INTERVAL_S = 0.2
LOCK_READ_TIMEOUT_S = 10.0  # a network file system may lose sight of a file for a while
NO_OWNER = {"token": None}  # the expected owner of a new directory


@dataclass(frozen=True)
class _LockOwner:
    """The content of a lock file; ValueError for numbers that no writer has written.

    `saved` is whether the run directory has had a snapshot.
    """

    host: str = ""
    pid: int | None = None
    job: str | None = None
    attempt: int | None = None
    heartbeat: float | None = None
    saved: bool = False
    token: str = ""

    def __post_init__(self) -> None:
        has_valid_pid = 0 <= (self.pid or 0) <= MAX_PID
        has_valid_attempt = 0 <= (self.attempt or 0) <= MAX_ATTEMPT
        if not (has_valid_pid and has_valid_attempt):
            raise ValueError("no process, or no attempt, has such a number")


class RunDirLock:
    """The lock of an existing directory, held until `release`.

    Args:
        folder: The run directory.
        wait: Seconds to wait for another run to end.
        expected: The owner that the lock file may name; by default the one that it names now.
        is_multi_node: Whether this launch has several nodes, whose agents have locked the
            directory too.

    Raises:
        InputError: If another live run has locked the directory, or has started there while this
            one waited.
        OSError: If the directory cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        wait: float,
        expected: JsonObject | None = None,
        is_multi_node: bool = False,
    ) -> None:
        self.folder = folder
        self.path = folder / LOCK_FILE
        self.token = secrets.token_hex(8)
        self.is_multi_node = is_multi_node
        self.has_waited = False
        self.is_in_launcher = False  # whether the launcher has the open file too
        self.uses_link = False  # locked by LINK_LOCK_FILE instead of flock
        self.file = self._acquire(wait, read_owner(folder) if expected is None else expected)

    def _acquire(self, wait: float, expected: JsonObject) -> int:
        """Return the locked file.

        The kernel frees the lock of a killed run; a live run has `wait` seconds to end.
        """
        deadline = time.monotonic() + wait
        while True:
            file = self._open()
            try:
                if self._try_lock(file):
                    is_current = _is_file_at(file, self.path)
                    if is_current and not _has_owner_changed(expected, read_owner(self.folder)):
                        return file
                    self._remove_link()
                    raise self.make_in_use_error()
            except BaseException:
                os.close(file)
                raise
            os.close(file)
            self.has_waited = True
            owner = read_owner(self.folder)
            expected = expected or owner
            if time.monotonic() > deadline or _has_owner_changed(expected, owner):
                raise self.make_in_use_error()
            time.sleep(LOCK_RETRY_INTERVAL_S)

    def _open(self) -> int:
        file = find_stored_fd(partial(_is_file_at, path=self.path))
        if file is not None:
            self.is_in_launcher = True
            return file
        try:
            return open_lock_file(self.path)
        except FileNotFoundError:  # another run has just moved the directory aside
            raise self.make_in_use_error() from None

    def _try_lock(self, file: int) -> bool:
        try:
            if not try_lock(file):
                return False
        except OSError as error:
            if error.errno not in NO_LOCKS_ERRNOS:
                raise
            self.uses_link = True
            return self._lock_by_link(error)
        if self.is_multi_node or not _has_agents(self.folder):
            return True
        fcntl.flock(file, fcntl.LOCK_UN)  # agents of another launch may be about to take it
        return False

    def _lock_by_link(self, error: OSError) -> bool:
        """Create the hard link that replaces a kernel lock, and return whether it worked."""
        # Only one process can create a link of a given name. Unlike a kernel lock, it stays after a
        # kill: a process of the same machine replaces it if its writer has ended there.
        link = self.folder / LINK_LOCK_FILE
        own_file = self.folder / f"{LINK_LOCK_FILE}.{self.token}"
        own_file.write_text(self._describe({}), encoding="utf-8")
        try:
            with suppress(FileExistsError):
                os.link(own_file, link)
                return True
            with _lock_machine(self.folder) as is_locked_here:
                owner = _read(link) or read_owner(self.folder)
                if is_locked_here and has_owner_ended(owner):
                    own_file.replace(link)
                    return True
        finally:
            own_file.unlink(missing_ok=True)
        if not is_locked_here or owner.get("host") == socket.gethostname():
            return False
        raise InputError(
            f"run directory {self.folder} is in use by {_describe_owner(owner)}, if that still"
            f" lives: the file system has no locks (flock: {error.strerror})",
            f"mount it with locks (Lustre: -o flock), or rm {link} if that run has ended",
        ) from error

    def make_in_use_error(self) -> InputError:
        """Return the error to raise if another run has locked the directory."""
        return InputError(
            f"run directory {self.folder} is in use by {_describe_owner(read_owner(self.folder))}",
            "wait for it, stop it, or choose another --run-dir",
        )

    def write_owner(self, details: JsonObject) -> None:
        """Write this process, `details` and the token to the lock file.

        The first call also leaves the open file with the launcher, which keeps the lock between
        two attempts.
        """
        if not self.is_in_launcher:
            store_fd(self.file)
            self.is_in_launcher = True
        hint = "--run-dir DIR in a place you can write to"
        with as_input_error(f"{self.path} cannot be written", hint):
            # A damaged file may be longer, and would then not be read.
            os.ftruncate(self.file, LOCK_FILE_BYTES)
            os.pwrite(self.file, self._describe(details).encode().ljust(LOCK_FILE_BYTES), 0)

    def _describe(self, details: JsonObject) -> str:
        process = {"host": socket.gethostname(), "pid": os.getpid()}
        return json.dumps({**process, **details, "token": self.token})

    def validate_ownership(self) -> None:
        """Raise InputError if another run has taken over: this one must not write any more.

        Raises StorageFault if the lock file cannot be read for LOCK_READ_TIMEOUT_S.

        Raises:
            InputError: If so.
        """
        owner = self._read_owner()
        if owner.get("token") != self.token:
            new_owner = f"to {_describe_owner(owner)}" if owner else "(its lock file is gone)"
            raise InputError(
                f"this run has lost run directory {self.folder} {new_owner}; nothing was written",
                "look who writes there; to train beside it, choose another --run-dir",
            )

    def _read_owner(self) -> JsonObject:
        """Return the content of the lock file, {} if there is none; retry if it is unreadable."""
        read = partial(_read_strictly, self.path)
        errors = (OSError, ValueError)
        try:
            return retry(read, errors, LOCK_READ_TIMEOUT_S, LOCK_RETRY_INTERVAL_S)
        except errors as error:
            raise StorageFault(
                f"{self.path} cannot be read, so this run cannot see whether it still has"
                f" its directory: {get_reason(error)}"
            ) from error

    def move_folder(self, target: Path) -> Path:
        """Rename the locked directory, and return its new path."""
        self.folder = self.folder.rename(target)
        return self.folder

    def release(self) -> None:
        """Free the lock, even if forked children such as DataLoader workers have the file open."""
        if self.uses_link:
            self._remove_link()
        else:
            fcntl.flock(self.file, fcntl.LOCK_UN)
        self.close()

    def _remove_link(self) -> None:
        link = self.folder / LINK_LOCK_FILE
        if _read(link).get("token") == self.token:
            link.unlink()

    def close(self) -> None:
        """Close the file without freeing the lock, which the launcher then still has."""
        os.close(self.file)


def open_lock_file(path: Path) -> int:
    """Open or create a lock file; raise InputError for a link, which could name any file."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise InputError(
            f"{path} is a link, and not a file", f"rm {path}, or another --run-dir"
        ) from error


def try_lock(file: int, how: int = fcntl.LOCK_EX) -> bool:
    """Lock an open file without waiting, and return whether it worked."""
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_lock_in_launcher(folder: Path) -> bool:
    """Return whether an earlier rank of this launch has left the lock with the launcher."""
    file = find_stored_fd(partial(_is_file_at, path=folder / LOCK_FILE))
    if file is None:
        return False
    os.close(file)
    return True


def _is_file_at(file: int, path: Path) -> bool:
    """Return whether an open file is the one that has this path now."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def read_owner(folder: Path) -> JsonObject:
    """Return the content of the lock file: the fields of _LockOwner, {} if it cannot be read."""
    return _read(folder / LOCK_FILE)


def _read(path: Path) -> JsonObject:
    try:
        return _read_strictly(path)
    except (OSError, ValueError):
        return {}


def _read_strictly(path: Path) -> JsonObject:
    """Return the content of a lock file, {} without one; OSError, or ValueError for damage."""
    try:
        owner: JsonObject = typed_file.parse_json(typed_file.read_file(path), dict)
    except FileNotFoundError:
        return {}
    typed_file.convert(owner, _LockOwner)
    return owner


@contextmanager
def _lock_machine(folder: Path) -> Iterator[bool]:
    """Yield whether no other process of this machine is in such a block for `folder`.

    The lock is a socket name: the kernel gives it to one socket at a time, and frees it when that
    socket's process ends.
    """
    status = folder.stat()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as unix_socket:
        try:
            unix_socket.bind(f"\0stepladder-{status.st_dev}-{status.st_ino}")
        except OSError:
            yield False
        else:
            yield True


def _describe_owner(owner: JsonObject) -> str:
    """Return the owner of a lock as part of a sentence."""
    if not owner:
        return "another run"
    job = f", job {owner['job']}" if owner.get("job") else ""
    return to_one_line(f"process {owner.get('pid')} on {owner.get('host')}{job}")


def _has_owner_changed(before: JsonObject, now: JsonObject) -> bool:
    """Return whether a lock file that named an owner now names a different one."""
    keys = ("host", "pid", "attempt", "token")
    return bool(before) and any(before.get(key) != now.get(key) for key in keys)


def has_owner_ended(owner: JsonObject) -> bool:
    """Return whether the owner is a process of this machine that does not exist any more."""
    pid = owner.get("pid")
    is_process_here = owner.get("host") == socket.gethostname() and isinstance(pid, int)
    return is_process_here and not psutil.pid_exists(pid)


def is_locked(folder: Path) -> bool:
    """Return whether a live run writes this run directory."""
    try:
        file = os.open(folder / LOCK_FILE, os.O_RDONLY)
    except OSError:
        return False
    try:
        return not try_lock(file, fcntl.LOCK_SH)
    except OSError:
        link = folder / LINK_LOCK_FILE
        return link.exists() and not has_owner_ended(_read(link) or read_owner(folder))
    finally:
        os.close(file)


def _has_agents(folder: Path) -> bool:
    """Return whether agents of a launch on several nodes hold locks in the directory.

    Agents start and end only while they hold the first of the two locks, so the answer cannot
    change while this function holds it.
    """
    with ExitStack() as stack:
        for name in (RENDEZVOUS_LOCK_FILE, AGENTS_LOCK_FILE):
            try:
                file = os.open(folder / name, os.O_RDWR)
            except FileNotFoundError:
                return False
            stack.callback(os.close, file)
            if not try_lock(file):
                return True
    return False
