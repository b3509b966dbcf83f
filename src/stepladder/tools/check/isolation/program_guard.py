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


def check_program(
    refuse: Refuse,
    program: Any,
    args: Any = (),
    env: Any = None,
) -> None:
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


def check_popen(
    refuse: Refuse,
    guard_path: Refuse,
    program: Any,
    args: Any,
    folder: Any,
    env: Any,
) -> None:
    argv = [args] if isinstance(args, (str, bytes, os.PathLike)) else list(args)
    check_program(
        refuse,
        argv[0] if program is None else program,
        argv,
        env,
    )


def check_exec(
    refuse: Refuse,
    guard_path: Refuse,
    program: Any,
    args: Any = (),
    env: Any = None,
) -> None:
    check_program(refuse, program, args, env)


def check_shell_command(
    refuse: Refuse,
    guard_path: Refuse,
    command: Any,
) -> None:
    check_program(refuse, command)


def check_spawn(
    refuse: Refuse,
    guard_path: Refuse,
    mode: Any,
    program: Any,
    args: Any = (),
    env: Any = None,
) -> None:
    check_program(refuse, program, args, env)


def check_terminal(
    refuse: Refuse,
    guard_path: Refuse,
    args: Any,
) -> None:
    check_program(refuse, args if isinstance(args, str) else args[0])


def check_c_function(
    refuse: Refuse,
    guard_path: Refuse,
    library: Any,
    name: Any,
) -> None:
    if name in WRITING_FUNCTIONS_OF_C:
        refuse(f"the function {name} of C")


def check_database(
    refuse: Refuse,
    guard_path: Refuse,
    path: Any,
) -> None:
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


def check_socket(
    refuse: Refuse,
    guard_path: Refuse,
    sock: Any,
    address: Any,
) -> None:
    """Refuse a Unix socket outside, which is a file unless its address begins with a zero byte."""
    if isinstance(address, (str, bytes)) and os.fsencode(address)[:1] not in (
        b"",
        b"\0",
    ):
        guard_path(address)


EVENT_HANDLERS: dict[str, Callable[..., None]] = {
    "subprocess.Popen": check_popen,
    "os.exec": check_exec,
    "os.posix_spawn": check_exec,
    "os.spawn": check_spawn,
    "os.system": check_shell_command,
    "pty.spawn": check_terminal,
    "ctypes.dlsym": check_c_function,
    "sqlite3.connect": check_database,
    "socket.bind": check_socket,
}
