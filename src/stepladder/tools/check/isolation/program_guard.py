"""The guard of calls by which a script could change files without an audit event of the change.

These are other programs, functions of C, databases and sockets. Used only where neither a mount
namespace nor Landlock protects the files. Imports nothing that is slow.
"""

from __future__ import annotations

import os
import shutil
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    Refuse = Callable[..., Any]

# Programs that libraries run to read facts of the machine, and that change no file.
READING_PROGRAMS = {
    "free", "id", "ldconfig", "lsb_release", "lscpu", "nproc", "nvidia-smi", "rocm-smi", "uname", "which",
    "whoami",
}  # fmt: skip
UNGUARDING_OPTIONS = set("ISE")  # by which Python ignores our `sitecustomize`
WRITING_FUNCTIONS_OF_C = {
    "chmod", "chown", "creat", "execv", "execve", "fopen", "fopen64", "fchmodat", "fchownat", "lchown", "link",
    "linkat", "mkdir", "mkdirat", "mkfifo", "mknod", "open", "open64", "openat", "openat64", "posix_spawn",
    "remove", "removexattr", "rename", "renameat", "renameat2", "rmdir", "setxattr", "symlink", "symlinkat",
    "syscall", "system", "truncate", "truncate64", "unlink", "unlinkat", "utime", "utimensat", "utimes",
}  # fmt: skip
UNWRITTEN_DATABASE_OPTIONS = ("mode=ro", "immutable=1", "mode=memory")


def check_program(refuse: Refuse, program: Any, args: Any = (), env: Any = None) -> None:
    """Refuse a program unless it changes no file, or is Python with the guard."""
    name = os.fsdecode(program)
    if os.path.basename(name) in READING_PROGRAMS:
        return
    path = os.path.realpath(shutil.which(name) or name)
    argv = []
    if isinstance(args, (list, tuple)):
        argv = [os.fsdecode(arg) for arg in args]
    variables = dict(os.environ)
    if env is not None:
        variables = decode(env)
    is_python = path == os.path.realpath(sys.executable)
    if not is_python or not has_guard(argv, variables):
        refuse(name)


def decode(env: Any) -> dict[str, str]:
    return {os.fsdecode(name): os.fsdecode(value) for name, value in dict(env).items()}


def has_guard(argv: Sequence[str], env: Mapping[str, str]) -> bool:
    """Return whether a new interpreter of Python runs our `sitecustomize`."""
    if not starts_with_guard(env.get("PYTHONPATH", "")) or "STEPLADDER_CHECK" not in env:
        return False
    for arg in argv[1:]:
        if not arg.startswith("-") or arg in ("-", "-c", "-m"):
            break
        takes_value = arg.startswith(("--", "-W", "-X"))
        if not takes_value and UNGUARDING_OPTIONS & set(arg):
            return False
    return True


def starts_with_guard(python_path: str) -> bool:
    first_folder = python_path.split(os.pathsep)[0]
    return first_folder.endswith(os.path.join("tools", "probe", "startup"))


def program_of_popen(program: Any, args: Any, _folder: Any, env: Any) -> tuple[Any, ...]:
    argv = [args] if isinstance(args, (str, bytes, os.PathLike)) else list(args)
    return argv[0] if program is None else program, argv, env


def check_database(guard_path: Refuse, path: Any) -> None:
    """Refuse a database outside, unless it is opened to be read: SQLite opens its files itself."""
    name = os.fsdecode(path)
    if name in ("", ":memory:"):
        return
    if name.startswith("file:"):
        name, _, options = name.removeprefix("file:").partition("?")
        if any(option in options for option in UNWRITTEN_DATABASE_OPTIONS):
            return
        if name.startswith("//"):
            name = "/" + name.lstrip("/")
    guard_path(name)


def check_socket(guard_path: Refuse, _socket: Any, address: Any) -> None:
    """Refuse a Unix socket outside, which is a file unless its address begins with a zero byte."""
    if isinstance(address, (str, bytes)) and os.fsencode(address)[:1] not in (b"", b"\0"):
        guard_path(address)


# The program, its arguments and its environment, by the event that starts it.
PROGRAM_EVENTS: dict[str, Callable[..., tuple[Any, ...]]] = {
    "subprocess.Popen": program_of_popen,
    "os.exec": lambda *call: call,
    "os.posix_spawn": lambda *call: call,
    "os.spawn": lambda _mode, *call: call,
    "os.system": lambda command: (command,),
    "pty.spawn": lambda args: (args if isinstance(args, str) else args[0],),
}
PATH_EVENTS: dict[str, Callable[..., None]] = {
    "sqlite3.connect": check_database,
    "socket.bind": check_socket,
}
C_FUNCTION_EVENT = "ctypes.dlsym"
GUARDED_EVENTS = {*PROGRAM_EVENTS, *PATH_EVENTS, C_FUNCTION_EVENT}


def guard_event(refuse: Refuse, guard_path: Refuse, event: str, args: Sequence[Any]) -> None:
    """Refuse what one of GUARDED_EVENTS announces if it could change a file outside."""
    if event in PROGRAM_EVENTS:
        check_program(refuse, *PROGRAM_EVENTS[event](*args))
    elif event in PATH_EVENTS:
        PATH_EVENTS[event](guard_path, *args)
    elif args[1] in WRITING_FUNCTIONS_OF_C:
        refuse(f"the function {args[1]} of C")
