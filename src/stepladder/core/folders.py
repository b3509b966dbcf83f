"""Where a user's own files are, on every system as XDG has it on Linux; whose a file is; its file
system.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from stepladder.core.console import say
from stepladder.core.errors import InputError, naming


def state_folder() -> Path:
    """`${XDG_STATE_HOME:-~/.local/state}/stepladder`: lessons passed, jobs submitted, the lab."""
    return _own("user_state_path")


def config_folder() -> Path:
    """`${XDG_CONFIG_HOME:-~/.config}/stepladder`."""
    return _own("user_config_path")


def cache_folder() -> Path:
    """`${XDG_CACHE_HOME:-~/.cache}/stepladder`: what can be made again."""
    return _own("user_cache_path")


def _own(kind: str) -> Path:
    from platformdirs.unix import Unix  # late: 30 ms that most commands have no use for

    missing = f"there is no home folder: HOME is not set, and no user has number {os.geteuid()}"
    with naming(missing, "export HOME=DIR that you can write to", (RuntimeError,)):
        found: Path = getattr(Unix("stepladder"), kind)
    return found


def find_above(name: str) -> Path | None:
    """The file of that name in the current folder or the nearest above, and on stderr its name if
    it is above.

    A file of another user's is passed over, and named: in a folder such as /tmp anybody may have
    put it. Raises InputError for a file of this user's that others may write: what it says is done
    with this user's rights."""
    here = Path.cwd()
    for folder in folders_above(here):
        if (folder / name).is_file():
            if (owner := foreign_owner(folder / name)) is not None:
                say(f"{folder / name} is not used, because user {owner} owns it")
                continue
            refuse_foreign(folder / name)
            if folder != here:
                say(f"{folder / name} is used")
            return folder / name
    return None


def folders_above(here: Path) -> Iterator[Path]:
    """The folder itself and those it is in, up to the home folder or the file system's border."""
    home = Path(os.path.expanduser("~")).resolve()  # noqa: PTH111 - pathlib's raises where there is none
    with suppress(OSError):  # above it, a folder may be closed to us
        for folder in (here, *here.parents):
            if folder.stat().st_dev != here.stat().st_dev:
                return
            yield folder
            if folder == home:
                return


def foreign_owner(path: Path) -> int | None:
    """Return the user who owns a file, or the link that leads to it, if that is neither this user
    nor root.
    """
    if sys.platform == "win32":
        return None
    owners = (path.lstat().st_uid, path.stat().st_uid)
    return next((owner for owner in owners if owner not in (0, os.geteuid())), None)


def refuse_foreign(path: Path) -> None:
    """Raises InputError where others than this user and root own the file or its folder, or may
    write them.
    """
    if sys.platform == "win32":  # which has neither
        return
    for part in dict.fromkeys((path, path.parent, path.resolve(), path.resolve().parent)):
        about = part.stat()
        if about.st_uid not in (0, os.geteuid()):
            hint = f"read it; then cp {path} to a folder of your own, and work there"
            raise InputError(f"{path} is not used, because user {about.st_uid} owns {part}", hint)
        kept = (
            stat.S_ISDIR(about.st_mode) and about.st_mode & stat.S_ISVTX
        )  # as /tmp: none may replace another's
        if about.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not kept:
            raise InputError(
                f"{path} is not used, because others may write to {part}",
                f"read it; then chmod go-w {part}",
            )


def obstacle(folder: Path) -> Path | None:
    """What keeps files from being made in `folder`, which may have to be made itself."""
    there = next(one for one in (folder, *folder.parents) if os.path.lexists(one))
    return None if there.is_dir() and os.access(there, os.W_OK | os.X_OK) else there


def file_system(path: Path) -> str:
    """The kind that `path` is, or will be, on, as in ext4, nfs4, lustre; "" where that is not
    known.
    """
    import psutil  # late: few commands ask

    try:
        mounts = psutil.disk_partitions(all=True)
    except OSError:
        return ""
    resolved = path.resolve()
    above = [mount for mount in mounts if resolved.is_relative_to(mount.mountpoint)]
    # Of several on one point the last is on top.
    return max(reversed(above), key=lambda mount: len(mount.mountpoint)).fstype if above else ""
