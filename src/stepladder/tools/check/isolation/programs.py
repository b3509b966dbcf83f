"""Events by which a script leaves what audit events can tell: other programs, functions of C,
databases, sockets.

Used only where neither a mount namespace nor Landlock is there. Imports nothing that is slow.
"""

from __future__ import annotations

import os
import shutil
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

# Programs that libraries ask of the machine, and that change no file.
READERS = {
    "free", "id", "ldconfig", "lsb_release", "lscpu", "nproc", "nvidia-smi", "rocm-smi", "uname", "which",
    "whoami",
}  # fmt: skip
WITHOUT_GUARD = set("ISE")  # options by which Python ignores what has attached the guard
FUNCTIONS_OF_C = {
    "chmod", "chown", "creat", "execv", "execve", "fopen", "fopen64", "fchmodat", "fchownat", "lchown", "link",
    "linkat", "mkdir", "mkdirat", "mkfifo", "mknod", "open", "open64", "openat", "openat64", "posix_spawn",
    "remove", "removexattr", "rename", "renameat", "renameat2", "rmdir", "setxattr", "symlink", "symlinkat",
    "syscall", "system", "truncate", "truncate64", "unlink", "unlinkat", "utime", "utimensat", "utimes",
}  # fmt: skip
READ_ONLY_DATABASE = ("mode=ro", "immutable=1")


def judge_program(
    refuse: Callable[..., Any], program: Any, args: Any = (), env: Any = None
) -> None:
    """Raise OSError unless the program changes no file, or is Python with the guard."""
    name = os.fsdecode(program)
    found = os.path.realpath(shutil.which(name) or name)
    if os.path.basename(name) in READERS:
        return
    words = [os.fsdecode(word) for word in args] if isinstance(args, (list, tuple)) else []
    if found == os.path.realpath(sys.executable) and keeps_guard(words, env):
        return
    refuse(name)


def keeps_guard(words: Sequence[str], env: Any) -> bool:
    """Return whether a new interpreter of Python runs our `sitecustomize`."""
    if env is not None:
        variables = {os.fsdecode(name): os.fsdecode(value) for name, value in dict(env).items()}
        if not ours_first(variables.get("PYTHONPATH", "")) or "STEPLADDER_CHECK" not in variables:
            return False
    for word in words[1:]:
        if not word.startswith("-") or word in ("-", "-c", "-m"):
            break
        if (
            not word.startswith("--")
            and not word.startswith(("-W", "-X"))
            and WITHOUT_GUARD & set(word)
        ):
            return False
    return ours_first(os.environ.get("PYTHONPATH", "")) if env is None else True


def ours_first(path: str) -> bool:
    return path.split(os.pathsep)[0].endswith(os.path.join("tools", "check", "startup"))


def popen(refuse: Any, refuse_outside: Any, program: Any, args: Any, folder: Any, env: Any) -> None:
    words = [args] if isinstance(args, (str, bytes, os.PathLike)) else list(args)
    judge_program(refuse, program if program is not None else words[0], words, env)


def executed(
    refuse: Any, refuse_outside: Any, program: Any, args: Any = (), env: Any = None
) -> None:
    judge_program(refuse, program, args, env)


def by_shell(refuse: Any, refuse_outside: Any, command: Any) -> None:
    judge_program(refuse, command)


def spawned(
    refuse: Any, refuse_outside: Any, mode: Any, program: Any, args: Any = (), env: Any = None
) -> None:
    judge_program(refuse, program, args, env)


def terminal(refuse: Any, refuse_outside: Any, args: Any) -> None:
    judge_program(refuse, args if isinstance(args, str) else args[0])


def symbol(refuse: Any, refuse_outside: Any, library: Any, name: Any) -> None:
    if name in FUNCTIONS_OF_C:
        refuse(f"the function {name} of C")


def database(refuse: Any, refuse_outside: Any, path: Any) -> None:
    """SQLite opens its files by itself. One that may be read only is not written."""
    name = os.fsdecode(path)
    if name in ("", ":memory:"):
        return
    if name.startswith("file:"):
        name, _, options = name.removeprefix("file:").partition("?")
        if any(option in options for option in READ_ONLY_DATABASE) or "mode=memory" in options:
            return
        name = "/" + name.lstrip("/") if name.startswith("//") else name
    refuse_outside(name)


def bound(refuse: Any, refuse_outside: Any, sock: Any, address: Any) -> None:
    """A Unix socket is a file; an address that begins with a zero byte is none."""
    if isinstance(address, (str, bytes)) and os.fsencode(address)[:1] not in (b"", b"\0"):
        refuse_outside(address)


EVENTS: dict[str, Callable[..., None]] = {
    "subprocess.Popen": popen,
    "os.exec": executed,
    "os.posix_spawn": executed,
    "os.spawn": spawned,
    "os.system": by_shell,
    "pty.spawn": terminal,
    "ctypes.dlsym": symbol,
    "sqlite3.connect": database,
    "socket.bind": bound,
}
