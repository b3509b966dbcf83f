"""Each process's own folder in the temporary directory: it goes with it, after `kill -9` at the
next one's start.

A lock on the folder says that its process lives, also to one in another container: numbers of
processes would not. The temporary directory is the user's, who may have a clone `stepladder.git` in
it, or `stepladder.results`. So a folder is only removed if `mkdtemp` gives such names and a file in
it, written under the lock, marks it."""

from __future__ import annotations

import atexit
import fcntl
import multiprocessing
import os
import re
import shutil
import stat
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

from stepladder.core.errors import naming

PREFIX, UNLOCKED = "stepladder.", "stepladder.new-"
OF_MKDTEMP = re.compile(re.escape(PREFIX) + "[a-z0-9_]{8}")
MARKER = ".stepladder-scratch"
MARK = b"A folder for temporary files of stepladder. It is removed once its process has ended.\n"
LONGEST = 107 - len("/listener-12345678")  # a Unix socket's path has at most 107 bytes


def scratch() -> Path:
    """This process's folder. Raises InputError where there is no place for one."""
    with naming("there is no folder for temporary files", "TMPDIR=FOLDER stepladder ..."):
        folder = _of_process(os.getpid(), tempfile.gettempdir())
        # Python's fork server would make itself a folder, and leave it when it is killed.
        sockets = (
            folder if len(os.fsencode(folder)) <= LONGEST else _of_process(os.getpid(), "/tmp")
        )
        multiprocessing.current_process()._config["tempdir"] = str(sockets)  # type: ignore[attr-defined]
        return folder


@cache
def _of_process(pid: int, parent: str) -> Path:
    """Nobody takes it for an abandoned one before its lock is held: only then it has its name."""
    _remove_abandoned(parent)
    folder = Path(tempfile.mkdtemp(prefix=UNLOCKED, dir=parent))
    with suppress(OSError):  # a file system without locks: it keeps its first name
        fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_EX)
        (folder / MARKER).write_bytes(MARK)
        folder = folder.rename(folder.with_name(folder.name.replace(UNLOCKED, PREFIX)))
    atexit.register(_remove_own, folder, pid)
    return folder


def _remove_own(folder: Path, pid: int) -> None:
    if os.getpid() == pid:  # not in a process that the job has forked
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(parent: str) -> None:
    for entry in os.scandir(parent):
        if not OF_MKDTEMP.fullmatch(entry.name):
            continue
        with suppress(OSError):  # it is gone, or its process lives
            folder = os.open(entry.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                still_there = os.path.samestat(os.fstat(folder), os.lstat(entry.path))
                if still_there and _is_ours(folder):
                    shutil.rmtree(entry.path)
            finally:
                os.close(folder)


def _is_ours(folder: int) -> bool:
    """Return whether the open folder is this user's, and marked as a folder of this module. Raises
    OSError.
    """
    marker = os.open(MARKER, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    try:
        owners = {os.fstat(folder).st_uid, os.fstat(marker).st_uid}
        is_file = stat.S_ISREG(os.fstat(marker).st_mode)
        return owners == {os.geteuid()} and is_file and os.read(marker, len(MARK) + 1) == MARK
    finally:
        os.close(marker)
