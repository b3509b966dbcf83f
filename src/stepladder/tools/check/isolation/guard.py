"""The guard in each rank, which refuses writes outside the copy. It starts before torch.

The audit events of Python report every change of a file that Python's own functions make. Within a
mount namespace and under Landlock the kernel itself refuses the change; the guard refuses it
earlier, with a message that says what to type. It also refuses what Landlock cannot, such as chmod.
Without namespace and Landlock, which is so only with `--unsafe`, nothing else protects the files.

Imported at the start of each interpreter of the script: no pathlib, no typing.
"""

from __future__ import annotations

import errno
import os
import stat
import sys

from stepladder.tools.check.events import Refusal
from stepladder.tools.check.probe.probe_log import current_log

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

WRITING_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
KERNEL_FOLDERS = ("/proc/", "/sys/")  # where the kernel itself decides
WORKING_FOLDER = -1  # what audit events report when a call names no folder by a descriptor


def attach() -> None:
    current_log()  # it opens its file before files outside are refused
    sys.addaudithook(audit)


def mechanism() -> str:
    return current_log().settings.mechanism


def audit(event: str, args: tuple[Any, ...]) -> None:
    """Raise OSError where a file outside the copy would change. Called at each audit event."""
    handler = EVENT_HANDLERS.get(event)
    if handler is not None:
        handler(*args)


def guard_open(path: Any, mode: Any, flags: Any) -> None:
    writes_by_mode = isinstance(mode, str) and not set(mode).isdisjoint("wax+")
    writes_by_flags = bool((flags or 0) & WRITING_FLAGS)
    if (writes_by_mode or writes_by_flags) and not isinstance(path, int):
        guard_path(path)


def guard_path(
    path: Any, folder: int = WORKING_FOLDER, follow: bool = True, must_exist: bool = False
) -> None:
    """Raise OSError where a path is not below a folder that may be written.

    Args:
        path: A text, bytes, a path object, or a descriptor.
        folder: The descriptor of the folder in which a relative path begins.
        follow: Whether a link at the end of the path is followed.
        must_exist: Whether the call needs an existing file. If there is none, the call itself
            reports the error.
    """
    real = real_path(path, folder, follow)
    if real is None or real.startswith(KERNEL_FOLDERS):
        return
    if must_exist and not os.path.lexists(real):
        return
    if not is_special(real) and not is_writable(real):
        refuse(real)


def guard_new_path(path: Any, folder: int) -> None:
    """Raise OSError where a call would create a file outside.

    If a file of this name exists, the call itself reports the error.
    """
    real = real_path(path, folder, follow=False)
    if real is not None and not os.path.lexists(real):
        guard_path(real, follow=False)


def real_path(path: Any, folder: int, follow: bool) -> str | None:
    """Return the real path; None for a pipe, a socket or an argument that is no path."""
    try:
        if isinstance(path, int):
            name = os.readlink(f"/proc/self/fd/{path}")
            return name if name.startswith("/") else None
        name = os.fsdecode(path)
        if folder is not None and folder >= 0:
            name = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), name)
        name = name.rstrip("/") or "/"
        if follow:
            return os.path.realpath(name)
        parent, last = os.path.split(name)
        return os.path.join(os.path.realpath(parent or "."), last)
    except (OSError, TypeError, ValueError):  # the call itself reports the error
        return None


def is_special(path: str) -> bool:
    """Return whether a path is a terminal, another character device, a pipe or a socket.

    Writing there changes no file.
    """
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return stat.S_ISCHR(mode) or stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def is_writable(path: str) -> bool:
    settings = current_log().settings
    if any(path == folder or path.startswith(folder + "/") for folder in settings.writable):
        return True
    return settings.mechanism == "namespace" and is_in_overlay(path)


def is_in_overlay(path: str) -> bool:
    """Return whether an overlay of the namespace lets this path be written."""
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    if os.statvfs(path).f_flag & os.ST_RDONLY:
        return False
    status = os.stat(path)
    is_own_folder = os.geteuid() in (0, status.st_uid)
    is_shared_folder = bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
    # An overlay cannot copy up another user's folder, even if everybody may write to that folder.
    return is_own_folder or not is_shared_folder


def refuse(path: str) -> NoReturn:
    folder = os.path.dirname(path)
    current_log().write_with_line(Refusal(path=path))
    text = f"{path} lies outside the copy, and stepladder check changes nothing there"
    raise OSError(errno.EROFS, f"{text}  (HINT: stepladder check --writes {folder} ...)")


def guard_rename(source: Any, target: Any, source_folder: int, target_folder: int) -> None:
    guard_path(source, source_folder, follow=False, must_exist=True)
    source_exists = os.path.lexists(real_path(source, source_folder, follow=False) or "")
    if source_exists or mechanism() == "namespace":
        guard_path(target, target_folder, follow=False)


def guard_link(source: Any, target: Any, source_folder: int, target_folder: int) -> None:
    """Raise OSError for a hard link to a file outside: writing to the link changes the file."""
    guard_path(source, source_folder, must_exist=True)
    guard_new_path(target, target_folder)


def guard_removal(path: Any, folder: int) -> None:
    guard_path(path, folder, follow=False, must_exist=True)


def guard_change(path: Any, *_: Any) -> None:
    guard_path(path, must_exist=True)


def guard_change_in_folder(path: Any, *values: Any) -> None:
    folder = values[-1]
    guard_path(path, folder, must_exist=True)


EVENT_HANDLERS: dict[str, Callable[..., None]] = {
    "open": guard_open,
    "os.remove": guard_removal,
    "os.rmdir": guard_removal,
    "os.rename": guard_rename,
    "os.link": guard_link,
    "os.mkdir": lambda path, mode, folder: guard_new_path(path, folder),
    "os.symlink": lambda source, target, folder: guard_new_path(target, folder),
    "os.truncate": guard_change,
    "os.chmod": guard_change_in_folder,
    "os.chown": guard_change_in_folder,
    "os.utime": guard_change_in_folder,
    "os.setxattr": guard_change,
    "os.removexattr": guard_change,
}
