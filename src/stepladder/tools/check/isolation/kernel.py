"""System calls of Linux that protect files from a process: namespaces, mounts, Landlock.

Runs in `python -I -S` as well, so it imports the standard library only. A function whose system
call fails raises OSError.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import stat
from contextlib import suppress
from dataclasses import dataclass

CLONE_NEWNS = 0x20000
CLONE_NEWUSER = 0x10000000
MS_RDONLY = 1
MS_REMOUNT = 32
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MOUNT_FLAGS = {
    "nosuid": 2,
    "nodev": 4,
    "noexec": 8,
    "noatime": 1024,
    "nodiratime": 2048,
    "relatime": 1 << 21,
}
MOUNT_ATTR_RDONLY = 1
AT_FDCWD = -100
AT_RECURSIVE = 0x8000
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PR_CAPBSET_DROP = 24
PR_SET_NO_NEW_PRIVS = 38
CAPABILITY_VERSION_3 = 0x20080522
# With these capabilities a process of root can leave its mount namespace, also by becoming a user
# who has processes outside, or can write to the disk below all file systems.
ESCAPING_CAPABILITIES = {
    "setgid": 6, "setuid": 7, "sys_module": 16, "sys_rawio": 17, "sys_ptrace": 19, "sys_admin": 21, "mknod": 27,
}  # fmt: skip

# The same numbers on all architectures.
SYS_MOUNT_SETATTR = 442
SYS_LANDLOCK_CREATE = 444
SYS_LANDLOCK_ADD = 445
SYS_LANDLOCK_RESTRICT = 446
LANDLOCK_WRITE_FILE = 1 << 1
LANDLOCK_REMOVE_FILE = 1 << 5
LANDLOCK_MAKE_FILE = 1 << 8
# The rights to write, remove and make files that ABI 1 knows.
LANDLOCK_WRITES = sum(1 << bit for bit in (1, *range(4, 13)))
LANDLOCK_REFER = 1 << 13  # since ABI 2
LANDLOCK_TRUNCATE = 1 << 14  # since ABI 3
LANDLOCK_RULE_PATH_BENEATH = 1
LANDLOCK_CREATE_RULESET_VERSION = 1

libc = ctypes.CDLL(None, use_errno=True)


def check_result(result: int, call: str) -> int:
    """Return the result of a C function, or raise the error that it has set."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), call)
    return result


def unshare(flags: int) -> None:
    check_result(libc.unshare(flags), "unshare")


def set_namespace(fd: int, kind: int) -> None:
    check_result(libc.setns(fd, kind), "setns")


def map_own_user(uid: int, gid: int) -> None:
    """Map this user and group to themselves in a new user namespace, so that they are not root."""
    tables = {"setgroups": "deny", "uid_map": f"{uid} {uid} 1", "gid_map": f"{gid} {gid} 1"}
    for name, text in tables.items():
        fd = os.open(f"/proc/self/{name}", os.O_WRONLY)
        os.write(fd, text.encode())
        os.close(fd)


def mount(
    source: str | None, target: str, kind: str | None, flags: int, data: str | None = None
) -> None:
    """Call mount(2); `kind` is the type of the file system."""
    result = libc.mount(
        encode(source), encode(target), encode(kind), ctypes.c_ulong(flags), encode(data)
    )
    check_result(result, f"mount on {target}")


def encode(text: str | None) -> bytes | None:
    return None if text is None else os.fsencode(text)


def unmount(target: str) -> None:
    check_result(libc.umount2(os.fsencode(target), 0), f"umount of {target}")


def make_private() -> None:
    """Separate the mounts of this namespace from those of all other namespaces."""
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
    result = libc.syscall(
        ctypes.c_long(SYS_MOUNT_SETATTR),
        ctypes.c_int(AT_FDCWD),
        os.fsencode(path),
        ctypes.c_uint(AT_RECURSIVE if recursive else 0),
        ctypes.byref(attributes),
        ctypes.c_size_t(ctypes.sizeof(attributes)),
    )
    check_result(result, f"mount_setattr of {path}")


@dataclass(frozen=True)
class Mount:
    """One line of mountinfo: the folder, and the options."""

    path: str
    options: tuple[str, ...]


def read_mounts() -> list[Mount]:
    with open("/proc/self/mountinfo", "rb") as file:
        lines = [os.fsdecode(line).split(" ") for line in file.read().splitlines()]
    return [Mount(unescape(fields[4]), tuple(fields[5].split(","))) for fields in lines]


def unescape(path: str) -> str:
    """Decode spaces, tabs, newlines and backslashes as mountinfo writes them."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), path)


def set_readonly_everywhere(by_remount: bool = False) -> None:
    """Make every mount of this namespace read-only.

    Args:
        by_remount: Whether to remount each mount, as on Linux before 5.12, which has no
            mount_setattr.
    """
    if not by_remount:
        with suppress(OSError):
            set_mount_attributes("/", MOUNT_ATTR_RDONLY, 0, recursive=True)
            return
    for mounted in read_mounts():
        remount(mounted, MS_RDONLY)


def set_writable(path: str, recursive: bool = False) -> None:
    """Make the mount at a path writable."""
    try:
        set_mount_attributes(path, 0, MOUNT_ATTR_RDONLY, recursive)
    except OSError:  # before 5.12; or a mount below was read-only from the start, and stays so
        mounts_at_path = [mounted for mounted in read_mounts() if mounted.path == path]
        remount(mounts_at_path[-1], 0)


def remount(mounted: Mount, flags: int) -> None:
    flags |= sum(MOUNT_FLAGS.get(option, 0) for option in mounted.options)
    mount(None, mounted.path, None, MS_REMOUNT | MS_BIND | flags)


def drop_capabilities() -> None:
    """Keep this process, and programs that it executes, in its mount namespace, also as root."""
    for number in ESCAPING_CAPABILITIES.values():
        # This fails for a user without privileges, who has none of these capabilities anyway.
        libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0)
    kept = ~sum(1 << number for number in ESCAPING_CAPABILITIES.values())
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; then of numbers from 32 on
    check_result(libc.capget(header, sets), "capget")
    for index in range(3):
        sets[index] &= kept
    check_result(libc.capset(header, sets), "capset")


def adopt_orphans() -> None:
    """Become the parent of what descendants of this process leave behind when they end."""
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent(parent: int) -> None:
    """Ask Linux to kill this process when its parent ends.

    Call it after entering a user namespace, which undoes an earlier request.

    Args:
        parent: The parent's process id. If this process has another parent, `parent` has ended.
    """
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def landlock_abi() -> int:
    """Return the version of Landlock that this kernel has; 0 where it has none."""
    result = libc.syscall(
        ctypes.c_long(SYS_LANDLOCK_CREATE),
        None,
        ctypes.c_size_t(0),
        ctypes.c_uint(LANDLOCK_CREATE_RULESET_VERSION),
    )
    return max(0, int(result))


class PathBeneath(ctypes.Structure):
    """struct landlock_path_beneath_attr."""

    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def restrict_writes(folders: list[str]) -> None:
    """Let this process and its children change files only below these folders, and on devices.

    /dev/shm must be writable as well: the workers of a data loader share their memory there.
    """
    abi = landlock_abi()
    handled = LANDLOCK_WRITES
    if abi >= 2:
        handled |= LANDLOCK_REFER
    if abi >= 3:
        handled |= LANDLOCK_TRUNCATE
    write_only = handled & (LANDLOCK_WRITE_FILE | LANDLOCK_TRUNCATE)
    ruleset = create_landlock_ruleset(handled)
    for folder in folders:
        add_landlock_rule(ruleset, folder, handled)
    for path in devices():
        add_landlock_rule(ruleset, path, write_only)
    add_landlock_rule(ruleset, "/dev/shm", write_only | LANDLOCK_MAKE_FILE | LANDLOCK_REMOVE_FILE)
    check_result(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "PR_SET_NO_NEW_PRIVS")
    result = libc.syscall(
        ctypes.c_long(SYS_LANDLOCK_RESTRICT), ctypes.c_int(ruleset), ctypes.c_uint(0)
    )
    check_result(result, "landlock_restrict_self")
    os.close(ruleset)


def create_landlock_ruleset(handled: int) -> int:
    """Return the descriptor of a ruleset that forbids these accesses where no rule allows them."""
    attributes = ctypes.c_uint64(handled)
    result = libc.syscall(
        ctypes.c_long(SYS_LANDLOCK_CREATE),
        ctypes.byref(attributes),
        ctypes.c_size_t(ctypes.sizeof(attributes)),
        ctypes.c_uint(0),
    )
    return check_result(result, "landlock_create_ruleset")


def add_landlock_rule(ruleset: int, path: str, access: int) -> None:
    fd = os.open(path, os.O_PATH)
    rule = PathBeneath(access, fd)
    result = libc.syscall(
        ctypes.c_long(SYS_LANDLOCK_ADD),
        ctypes.c_int(ruleset),
        ctypes.c_int(LANDLOCK_RULE_PATH_BENEATH),
        ctypes.byref(rule),
        ctypes.c_uint(0),
    )
    check_result(result, f"landlock_add_rule for {path}")
    os.close(fd)


def devices() -> list[str]:
    """Return the character devices (/dev/null, terminals, GPUs), and the folder of terminals."""
    names = ["/dev/pts", *(f"/dev/{name}" for name in os.listdir("/dev"))]
    return [name for name in names if name == "/dev/pts" or is_character_device(name)]


def is_character_device(path: str) -> bool:
    try:
        return stat.S_ISCHR(os.stat(path).st_mode)
    except OSError:
        return False
