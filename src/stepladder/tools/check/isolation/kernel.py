"""System calls of Linux that separate a process from the files outside: namespaces, mounts,
Landlock.

Runs in `python -I -S` as well, so it imports the standard library only. Every function raises
OSError."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import stat
from dataclasses import dataclass

CLONE_NEWNS, CLONE_NEWUSER = 0x20000, 0x10000000
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18
MOUNT_FLAGS = {
    "nosuid": 2,
    "nodev": 4,
    "noexec": 8,
    "noatime": 1024,
    "nodiratime": 2048,
    "relatime": 1 << 21,
}
MOUNT_ATTR_RDONLY, AT_FDCWD, AT_RECURSIVE = 1, -100, 0x8000
PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 24, 38
# With these a process of root leaves its mount namespace, also as a user whose other processes are
# outside, or writes to the disk below all file systems.
CAPABILITIES_THAT_LEAD_OUT = {
    "setgid": 6, "setuid": 7, "sys_module": 16, "sys_rawio": 17, "sys_ptrace": 19, "sys_admin": 21, "mknod": 27,
}  # fmt: skip

# The same numbers on all architectures.
SYS_MOUNT_SETATTR, SYS_LANDLOCK_CREATE, SYS_LANDLOCK_ADD, SYS_LANDLOCK_RESTRICT = 442, 444, 445, 446
LANDLOCK_WRITE_FILE, LANDLOCK_REMOVE_FILE, LANDLOCK_MAKE_FILE = 1 << 1, 1 << 5, 1 << 8
LANDLOCK_WRITES = sum(
    1 << bit for bit in (1, *range(4, 13))
)  # write, remove, make: what ABI 1 knows
LANDLOCK_REFER, LANDLOCK_TRUNCATE = 1 << 13, 1 << 14  # ABI 2, ABI 3

libc = ctypes.CDLL(None, use_errno=True)


def check_result(result: int, what: str) -> int:
    """Return the result of a C function, or raise the error that it has set."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)
    return result


def unshare(flags: int) -> None:
    check_result(libc.unshare(flags), "unshare")


def set_namespace(fd: int, kind: int) -> None:
    check_result(libc.setns(fd, kind), "setns")


def map_own_user(uid: int, gid: int) -> None:
    """Map the caller's user and group to themselves in its new user namespace: nobody becomes root."""
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{uid} {uid} 1"),
        ("gid_map", f"{gid} {gid} 1"),
    ):
        fd = os.open(f"/proc/self/{name}", os.O_WRONLY)
        os.write(fd, text.encode())
        os.close(fd)


def mount(
    source: str | None, target: str, kind: str | None, flags: int, data: str | None = None
) -> None:
    """Call mount(2); the kind is that of a file system."""

    def encoded(text: str | None) -> bytes | None:
        return None if text is None else os.fsencode(text)

    arguments = (
        encoded(source),
        encoded(target),
        encoded(kind),
        ctypes.c_ulong(flags),
        encoded(data),
    )
    check_result(libc.mount(*arguments), f"mount on {target}")


def unmount(target: str) -> None:
    check_result(libc.umount2(os.fsencode(target), 0), f"umount of {target}")


def make_private() -> None:
    """Cut the mounts of this namespace off from those of the others."""
    mount(None, "/", None, MS_REC | MS_PRIVATE)


class MountAttributes(ctypes.Structure):
    _fields_ = (
        ("set", ctypes.c_uint64),
        ("clear", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("user_namespace", ctypes.c_uint64),
    )


def set_mount_attributes(path: str, set_bits: int, clear_bits: int, recursive: bool) -> None:
    attributes = MountAttributes(set_bits, clear_bits, 0, 0)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    flags = ctypes.c_uint(AT_RECURSIVE if recursive else 0)
    arguments = (ctypes.c_int(AT_FDCWD), os.fsencode(path), flags, ctypes.byref(attributes), size)
    check_result(
        libc.syscall(ctypes.c_long(SYS_MOUNT_SETATTR), *arguments), f"mount_setattr of {path}"
    )


@dataclass(frozen=True)
class Mount:
    """One line of mountinfo. path: where it is mounted.  kind: of its file system."""

    path: str
    kind: str
    options: tuple[str, ...]


def read_mounts() -> list[Mount]:
    with open("/proc/self/mountinfo", "rb") as file:
        lines = [os.fsdecode(line).split(" ") for line in file.read().splitlines()]
    return [
        Mount(unescape(line[4]), line[line.index("-") + 1], tuple(line[5].split(",")))
        for line in lines
    ]


def unescape(path: str) -> str:
    """Undo mountinfo's way to write spaces, tabs, newlines and backslashes."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), path)


def set_readonly_everywhere(by_remount: bool = False) -> None:
    """Make every mount of this namespace read-only.

    Args:
        by_remount: one mount after the other, as Linux before 5.12 needs it, which has no
        mount_setattr."""
    if not by_remount:
        try:
            set_mount_attributes("/", MOUNT_ATTR_RDONLY, 0, recursive=True)
        except OSError:
            pass
        else:
            return
    for one in read_mounts():
        remount(one, MS_RDONLY)


def set_writable(path: str, recursive: bool = False) -> None:
    """Let the mount at `path` be written again."""
    try:
        set_mount_attributes(path, 0, MOUNT_ATTR_RDONLY, recursive)
    except OSError:  # before 5.12; or a mount below was read-only from the start, and stays so
        remount(next(one for one in reversed(read_mounts()) if one.path == path), 0)


def remount(one: Mount, flags: int) -> None:
    flags |= sum(MOUNT_FLAGS.get(option, 0) for option in one.options)
    mount(None, one.path, None, MS_REMOUNT | MS_BIND | flags)


def drop_capabilities() -> None:
    """Keep the program that is executed next from leaving its mount namespace, also as root."""
    for number in CAPABILITIES_THAT_LEAD_OUT.values():
        libc.prctl(
            PR_CAPBSET_DROP, number, 0, 0, 0
        )  # fails for a user without privilege, who has none of them


def die_with_parent(parent: int) -> None:
    """Ask to be killed when the parent ends. Entering a user namespace has undone an earlier wish."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def landlock_abi() -> int:
    """Return the version of Landlock that this kernel speaks; 0 where there is none."""
    result = libc.syscall(
        ctypes.c_long(SYS_LANDLOCK_CREATE), None, ctypes.c_size_t(0), ctypes.c_uint(1)
    )
    return max(0, int(result))


class PathBeneath(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def restrict_writes(folders: list[str]) -> None:
    """Let this process and its children change files below these folders only, and write to
    devices.

    /dev/shm must be writable as well: what the workers of a data loader share lies there.
    """
    abi = landlock_abi()
    handled = LANDLOCK_WRITES
    handled |= LANDLOCK_REFER if abi >= 2 else 0
    handled |= LANDLOCK_TRUNCATE if abi >= 3 else 0
    size = ctypes.c_size_t(8)
    create = (
        ctypes.c_long(SYS_LANDLOCK_CREATE),
        ctypes.byref(ctypes.c_uint64(handled)),
        size,
        ctypes.c_uint(0),
    )
    rules = check_result(libc.syscall(*create), "landlock_create_ruleset")
    to_devices = handled & (LANDLOCK_WRITE_FILE | LANDLOCK_TRUNCATE)
    allowed = [(folder, handled) for folder in folders]
    allowed += [(path, to_devices) for path in devices()]
    allowed += [("/dev/shm", to_devices | LANDLOCK_MAKE_FILE | LANDLOCK_REMOVE_FILE)]
    for path, access in allowed:
        fd = os.open(path, os.O_PATH)
        rule = PathBeneath(access, fd)
        add = (
            ctypes.c_long(SYS_LANDLOCK_ADD),
            ctypes.c_int(rules),
            ctypes.c_int(1),
            ctypes.byref(rule),
        )
        check_result(libc.syscall(*add, ctypes.c_uint(0)), f"landlock_add_rule for {path}")
        os.close(fd)
    check_result(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "PR_SET_NO_NEW_PRIVS")
    restrict = (ctypes.c_long(SYS_LANDLOCK_RESTRICT), ctypes.c_int(rules), ctypes.c_uint(0))
    check_result(libc.syscall(*restrict), "landlock_restrict_self")
    os.close(rules)


def devices() -> list[str]:
    """Return the devices that every user may have, and the folder of terminals."""
    names = ["/dev/pts", *(f"/dev/{name}" for name in os.listdir("/dev"))]
    return [name for name in names if name == "/dev/pts" or is_character_device(name)]


def is_character_device(path: str) -> bool:
    try:
        return stat.S_ISCHR(os.stat(path).st_mode)
    except OSError:
        return False
