"""Each process's own folder in the temporary directory.

The folder is removed with the process, or after `kill -9` when the next process starts. A lock on
the folder shows that its process lives, also to a process in another container, which a process id
would not. The temporary directory is the user's, who may have a clone `stepladder.git` in it, or
`stepladder.results`. So a folder is only removed if `mkdtemp` makes such names, and a file in it,
written under the lock, marks it.
"""

from __future__ import annotations

import atexit
import fcntl
import multiprocessing
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from stepladder.core.errors import as_input_error

FOLDER_PREFIX = "stepladder."
UNLOCKED_PREFIX = "stepladder.new-"
MKDTEMP_NAME = re.compile(re.escape(FOLDER_PREFIX) + "[a-z0-9_]{8}")
MARKER = ".stepladder-scratch"
MARKER_TEXT = (
    b"A folder for temporary files of stepladder. It is removed once its process has ended.\n"
)
# The path of a Unix socket has at most 107 bytes, of which multiprocessing needs these.
MAX_FOLDER_BYTES = 107 - len("/listener-12345678")


def get_scratch_folder() -> Path:
    """Return this process's folder, which is made at the first call.

    Raises:
        InputError: No folder can be made.
    """
    with as_input_error("there is no folder for temporary files", "TMPDIR=FOLDER stepladder ..."):
        folder = _make_folder(os.getpid(), tempfile.gettempdir())
        socket_folder = folder
        if len(os.fsencode(folder)) > MAX_FOLDER_BYTES:
            socket_folder = _make_folder(os.getpid(), "/tmp")
        # Python's fork server would make a folder of its own, and leave it when it is killed.
        multiprocessing.current_process()._config["tempdir"] = str(socket_folder)  # type: ignore[attr-defined]
        return folder


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Make a folder for the block, in the scratch folder, and remove it with all that is in it."""
    with tempfile.TemporaryDirectory(dir=get_scratch_folder()) as folder:
        yield Path(folder)


@cache
def _make_folder(pid: int, parent: str) -> Path:
    """Make a scratch folder and lock it.

    Other processes may remove an unlocked folder that has the final name, so the folder gets that
    name only when it is locked. This process removes it at exit.

    Returns:
        The path of the folder. On a file system without locks it keeps its first name.
    """
    _remove_abandoned(parent)
    folder = Path(tempfile.mkdtemp(prefix=UNLOCKED_PREFIX, dir=parent))
    with suppress(OSError):  # a file system without locks: the folder keeps its first name
        fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_EX)
        (folder / MARKER).write_bytes(MARKER_TEXT)
        folder = folder.rename(
            folder.with_name(folder.name.replace(UNLOCKED_PREFIX, FOLDER_PREFIX))
        )
    atexit.register(_remove_folder, folder, pid)
    return folder


def _remove_folder(folder: Path, pid: int) -> None:
    if os.getpid() == pid:  # not in a process that the job has forked
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(parent: str) -> None:
    """Remove the folders of processes that have ended without removing them.

    A folder in which something is mounted is in use, though in an overlay, as the sandbox of
    `check` has it, its lock seems free.
    """
    mounts = ""
    with suppress(OSError):  # there is no /proc
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
    for entry in os.scandir(parent):
        if not MKDTEMP_NAME.fullmatch(entry.name) or f"/{entry.name}/" in mounts:
            continue
        with suppress(OSError):  # it was removed meanwhile, or its process lives
            folder = os.open(entry.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_same_folder = os.path.samestat(os.fstat(folder), os.lstat(entry.path))
                if is_same_folder and _is_marked(folder):
                    shutil.rmtree(entry.path)
            finally:
                os.close(folder)


def _is_marked(folder: int) -> bool:
    """Tell whether an open folder belongs to this user and was marked by `_make_folder`.

    Args:
        folder: The file descriptor of the folder.

    Returns:
        False if another user owns the folder or its marker, or if the marker has other content.

    Raises:
        OSError: The folder has no marker that can be opened.
    """
    marker = os.open(MARKER, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    try:
        status = os.fstat(marker)
        owners = {os.fstat(folder).st_uid, status.st_uid}
        if owners != {os.geteuid()} or not stat.S_ISREG(status.st_mode):
            return False
        return os.read(marker, len(MARKER_TEXT) + 1) == MARKER_TEXT
    finally:
        os.close(marker)
