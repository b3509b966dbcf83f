"""Each process's own folder in the temporary directory: it goes with it, after `kill -9` at the next one's start.

A lock on the folder says that its process lives, also to one in another container: numbers of processes would not.
"""

from __future__ import annotations

import atexit
import fcntl
import multiprocessing
import os
import shutil
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

from stepladder.core.errors import naming

PREFIX, UNLOCKED = "stepladder.", "stepladder.new-"
LONGEST = 107 - len("/listener-12345678")  # a Unix socket's path has at most 107 bytes


def scratch() -> Path:
    """This process's folder. Raises InputError where there is no place for one."""
    with naming("there is no folder for temporary files", "TMPDIR=FOLDER stepladder ..."):
        folder = _of_process(os.getpid(), tempfile.gettempdir())
        # Python's fork server would make itself a folder, and leave it when it is killed.
        sockets = folder if len(os.fsencode(folder)) <= LONGEST else _of_process(os.getpid(), "/tmp")
        multiprocessing.current_process()._config["tempdir"] = str(sockets)  # type: ignore[attr-defined]
        return folder


@cache
def _of_process(pid: int, parent: str) -> Path:
    """Nobody takes it for an abandoned one before its lock is held: only then it has its name."""
    _remove_abandoned(parent)
    folder = Path(tempfile.mkdtemp(prefix=UNLOCKED, dir=parent))
    with suppress(OSError):  # a file system without locks: it keeps its first name
        fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_EX)
        folder = folder.rename(folder.with_name(folder.name.replace(UNLOCKED, PREFIX)))
    atexit.register(_remove_own, folder, pid)
    return folder


def _remove_own(folder: Path, pid: int) -> None:
    if os.getpid() == pid:  # not in a process that the job has forked
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(parent: str) -> None:
    for entry in os.scandir(parent):
        if not entry.name.startswith(PREFIX) or entry.name.startswith(UNLOCKED):
            continue
        with suppress(OSError):  # it is gone, or its process lives
            if entry.stat(follow_symlinks=False).st_uid != os.geteuid():
                continue
            lock = os.open(entry.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(entry.path)
            finally:
                os.close(lock)
