"""In each rank, before the script and before torch: a line for each write outside the copy that is
refused.

The audit events of Python tell of every change of a file that Python's own functions make. Within a
mount namespace and under Landlock the kernel refuses, and this gives the refusal a line that says
what to type; and it refuses what Landlock does not know, such as chmod. Where there is neither, it
is all that protects the files.

Imported at the start of each interpreter of the script: no pathlib, no typing.
"""

from __future__ import annotations

import errno
import os
import sys

from stepladder.tools.check.isolation import libraries, programs
from stepladder.tools.check.probe.recorder import here

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

WRITING_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
OF_THE_KERNEL = ("/proc/", "/sys/")  # the kernel itself answers for these


class GuardState:
    """What the hook knows. writable: folders that may be written."""

    mechanism = ""
    writable: tuple[str, ...] = ()


def attach() -> None:
    settings = here().settings
    GuardState.mechanism, GuardState.writable = settings.mechanism, settings.writable
    sys.addaudithook(audit)
    libraries.guard(refuse_outside)
    if GuardState.mechanism == "audit":
        guard_calls_without_event()


def audit(event: str, args: tuple[Any, ...]) -> None:
    """Called by Python at each event. Raises OSError where a file outside the copy would change."""
    judge = EVENTS.get(event)
    if judge is not None:
        judge(*args)
    elif GuardState.mechanism == "audit" and event in programs.EVENTS:
        programs.EVENTS[event](refuse_program, refuse_outside, *args)


def opened(path: Any, mode: Any, flags: Any) -> None:
    writes = (flags or 0) & WRITING_FLAGS or (isinstance(mode, str) and set(mode) & set("wax+"))
    if writes and not isinstance(path, int):
        refuse_outside(path)


def refuse_outside(
    path: Any, folder: int = -1, follow: bool = True, must_exist: bool = False
) -> None:
    """Raise OSError where this path lies outside of what may be written.

    Args:
        path: text, bytes, a path object, or a descriptor.
        folder: a descriptor that a relative path begins at; -1 for the working folder.
        follow: whether a link at the end of the path is followed.
        must_exist: whether the call fails anyway without the file.
    """
    real = real_path(path, folder, follow)
    if real is None or real.startswith(OF_THE_KERNEL) or (must_exist and not os.path.lexists(real)):
        return
    if is_special(real) or is_writable(real):
        return
    refuse(real)


def refuse_new(path: Any, folder: int = -1) -> None:
    """The same for a call that fails anyway where there is a file of this name."""
    real = real_path(path, folder, follow=False)
    if real is not None and not os.path.lexists(real):
        refuse_outside(real, follow=False)


def real_path(path: Any, folder: int, follow: bool) -> str | None:
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
        above, last = os.path.split(name)
        return os.path.join(os.path.realpath(above or "."), last)
    except (OSError, TypeError, ValueError):  # the call itself says what is wrong
        return None


def is_special(path: str) -> bool:
    """Return whether this is a terminal or the like, a pipe or a socket: what is written there
    changes no file.
    """
    try:
        kind = os.stat(path).st_mode & 0o170000
    except OSError:
        return False
    return kind in (0o020000, 0o010000, 0o140000)


def is_writable(path: str) -> bool:
    if any(path == folder or path.startswith(folder + "/") for folder in GuardState.writable):
        return True
    if GuardState.mechanism != "namespace":
        return False
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    if os.statvfs(path).f_flag & os.ST_RDONLY:
        return False
    about = os.stat(path)
    # An overlay cannot copy up what belongs to another user, even where a group or everybody may
    # write there.
    return os.geteuid() in (0, about.st_uid) or not about.st_mode & 0o022


def refuse(path: str) -> NoReturn:
    folder = os.path.dirname(path)
    here().at("refused", path=path)
    text = f"{path} lies outside the copy, and stepladder check changes nothing there"
    raise OSError(errno.EROFS, f"{text}  (HINT: stepladder check --writes {folder} ...)")


def refuse_program(name: str) -> NoReturn:
    here().at("refused_program", name=name)
    text = f"{name} could change files outside the copy, and no kernel keeps it from that here"
    raise OSError(errno.EROFS, f"{text}  (HINT: a kernel with Landlock or user namespaces)")


def renamed(source: Any, target: Any, source_folder: int = -1, target_folder: int = -1) -> None:
    refuse_outside(source, source_folder, follow=False, must_exist=True)
    if GuardState.mechanism == "namespace" or os.path.lexists(
        real_path(source, source_folder, False) or ""
    ):
        refuse_outside(target, target_folder, follow=False)


def linked(source: Any, target: Any, source_folder: int = -1, target_folder: int = -1) -> None:
    """A second name of a file outside would let it be written through the copy."""
    refuse_outside(source, source_folder, must_exist=True)
    refuse_new(target, target_folder)


def removed(path: Any, folder: int = -1) -> None:
    refuse_outside(path, folder, follow=False, must_exist=True)


def changed(path: Any, *_: Any) -> None:
    refuse_outside(path, must_exist=True)


def folder_last(path: Any, *values: Any) -> None:
    refuse_outside(path, values[-1], must_exist=True)


EVENTS: dict[str, Callable[..., None]] = {
    "open": opened,
    "os.remove": removed,
    "os.rmdir": removed,
    "os.rename": renamed,
    "os.link": linked,
    "os.mkdir": lambda path, mode, folder=-1: refuse_new(path, folder),
    "os.symlink": lambda source, target, folder=-1: refuse_new(target, folder),
    "os.truncate": changed,
    "os.chmod": folder_last,
    "os.chown": folder_last,
    "os.utime": folder_last,
    "os.setxattr": changed,
    "os.removexattr": changed,
}


def guard_calls_without_event() -> None:
    """mkfifo and mknod have no audit event, and that of os.open does not name the folder's
    descriptor.
    """
    open_file, make_pipe, make_node = os.open, os.mkfifo, os.mknod

    def open_at(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if dir_fd is not None and flags & WRITING_FLAGS:
            refuse_outside(path, dir_fd)
            path, dir_fd = real_path(path, dir_fd, follow=False), None
        return open_file(path, flags, mode, dir_fd=dir_fd)

    def pipe_at(path: Any, mode: int = 0o666, *, dir_fd: int | None = None) -> None:
        refuse_new(path, -1 if dir_fd is None else dir_fd)
        make_pipe(path, mode, dir_fd=dir_fd)

    def node_at(
        path: Any, mode: int = 0o600, device: int = 0, *, dir_fd: int | None = None
    ) -> None:
        refuse_new(path, -1 if dir_fd is None else dir_fd)
        make_node(path, mode, device, dir_fd=dir_fd)

    os.open, os.mkfifo, os.mknod = open_at, pipe_at, node_at
