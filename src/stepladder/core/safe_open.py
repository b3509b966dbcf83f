"""Open the files of a run directory, which others may write to.

A directory that a group shares lets each member put a link in a file's place. A process that
follows it writes into a file of its own user's, wherever that is: so no link is followed.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

ROOT_USER_ID = 0


def open_without_links(path: Path, flags: int) -> int:
    """Return a file descriptor of a regular file that is no link.

    Args:
        path: The file. Its folder may be a link of this user's own or of root's.
        flags: Those of `os.open`.

    Raises:
        OSError: The file cannot be opened, or is no regular file.
    """
    if is_foreign_link(path.parent):
        raise OSError(errno.ELOOP, "its folder is a link of another user's", str(path))
    flags |= getattr(os, "O_NOFOLLOW", 0)
    flags |= getattr(os, "O_NONBLOCK", 0)  # a FIFO would wait for the process at its other end
    try:
        file = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            reason = "it is a link, and a run writes into no other directory"
            raise OSError(errno.ELOOP, reason, str(path)) from None
        raise
    if stat.S_ISREG(os.fstat(file).st_mode):
        return file
    os.close(file)
    raise OSError(errno.EINVAL, "it is no regular file", str(path))


def create_file(path: Path) -> BinaryIO:
    """Return a new file, open for writing.

    Raises:
        OSError: The file cannot be made, or there is one of its name, or a link.
    """
    return os.fdopen(open_without_links(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb")


def is_foreign_link(path: Path) -> bool:
    """Tell whether the path is a link that neither this user nor root has made."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISLNK(status.st_mode) and status.st_uid not in (ROOT_USER_ID, os.geteuid())
