"""The user's own folders (XDG on every system), who owns a file, and on which file system it is."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from stepladder.core.console import print_message
from stepladder.core.errors import InputError, as_input_error
from stepladder.core.safe_open import ROOT_USER_ID

_ROOT_GROUP_ID = 0  # of what root has unpacked, with the archive's own modes


def get_state_folder() -> Path:
    """Return `${XDG_STATE_HOME:-~/.local/state}/stepladder`: lessons passed, jobs, the lab."""
    return _get_user_folder("user_state_path")


def get_config_folder() -> Path:
    """Return `${XDG_CONFIG_HOME:-~/.config}/stepladder`."""
    return _get_user_folder("user_config_path")


def get_cache_folder() -> Path:
    """Return `${XDG_CACHE_HOME:-~/.cache}/stepladder`: what can be made again."""
    return _get_user_folder("user_cache_path")


def _get_user_folder(kind: str) -> Path:
    from platformdirs.unix import Unix  # late: 30 ms that most commands have no use for

    missing = f"there is no home folder: HOME is not set, and no user has number {os.geteuid()}"
    with as_input_error(missing, "export HOME=DIR that you can write to", (RuntimeError,)):
        path: Path = getattr(Unix("stepladder"), kind)
    return path


def find_file_above(name: str) -> Path | None:
    """Return the file of that name in the current folder, or in the nearest one above.

    A file that another user owns is passed over, with a message: in a folder such as /tmp anybody
    may have put it. A file from above is named on stderr.

    Raises:
        InputError: The file is this user's, but others may write to it: what it says would be done
            with this user's rights.
    """
    current = Path.cwd()
    for folder in list_folders_above(current):
        path = folder / name
        if not path.is_file():
            continue
        owner = _find_foreign_owner(path)
        if owner is not None:
            print_message(f"{path} is not used, because user {owner} owns it")
            continue
        validate_ownership(path)
        if folder != current:
            print_message(f"{path} is used")
        return path
    return None


def list_folders_above(start: Path) -> Iterator[Path]:
    """Yield a folder and those above it, up to the home folder or the border of the file system."""
    home = Path(os.path.expanduser("~")).resolve()  # noqa: PTH111 - pathlib's raises where there is none
    with suppress(OSError):  # a folder above may be closed to this user
        for folder in (start, *start.parents):
            if folder.stat().st_dev != start.stat().st_dev:
                return
            yield folder
            if folder == home:
                return


def _find_foreign_owner(path: Path) -> int | None:
    """Return the user who owns a file, or the link to it, if it is neither this user nor root."""
    if sys.platform == "win32":
        return None
    for owner in (path.lstat().st_uid, path.stat().st_uid):
        if owner not in (ROOT_USER_ID, os.geteuid()):
            return owner
    return None


def validate_ownership(path: Path) -> None:
    """Raise InputError if other users than root own a file or its folder, or may write to it."""
    if sys.platform == "win32":  # which has neither
        return
    resolved = path.resolve()
    for part in dict.fromkeys((path, path.parent, resolved, resolved.parent)):
        status = part.stat()
        if status.st_uid not in (ROOT_USER_ID, os.geteuid()):
            raise InputError(
                f"{path} is not used, because user {status.st_uid} owns {part}",
                f"read it; then cp {path} to a folder of your own, and work there",
            )
        others = stat.S_IWOTH
        if status.st_gid != _ROOT_GROUP_ID:
            others |= stat.S_IWGRP
        # In a sticky folder, such as /tmp, nobody can replace another user's file.
        is_sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
        if status.st_mode & others and not is_sticky:
            raise InputError(
                f"{path} is not used, because others may write to {part}",
                f"read it; then chmod go-w {part}",
            )


def find_obstacle(folder: Path) -> Path | None:
    """Return what prevents making files in a folder, or None. The folder itself need not exist."""
    existing = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    is_writable = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
    return None if is_writable else existing


def get_file_system(path: Path) -> str:
    """Return the file system of a path, as in ext4, nfs4, lustre; "" if unknown.

    The path need not exist.
    """
    import psutil  # late: few commands ask

    try:
        mounts = psutil.disk_partitions(all=True)
    except OSError:
        return ""
    resolved = path.resolve()
    candidates = [mount for mount in mounts if resolved.is_relative_to(mount.mountpoint)]
    if not candidates:
        return ""
    # Of several mounts on one point the last is on top, and `max` returns the first of equals.
    deepest = max(reversed(candidates), key=lambda mount: len(mount.mountpoint))
    return str(deepest.fstype)
