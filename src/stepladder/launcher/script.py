"""What `stepladder run` runs: a script, a module or a command, unmodified; and how a rank becomes
it.
"""

from __future__ import annotations

import ast
import atexit
import importlib.util
import multiprocessing
import os
import runpy
import shutil
import signal
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn
from zipfile import is_zipfile

from stepladder.core.errors import InputError, as_input_error
from stepladder.core.python_file import parse_source, read_source
from stepladder.rank.lifecycle import EXIT_CALLBACKS
from stepladder.rank.progress import count_script_steps


@dataclass(frozen=True)
class Script:
    """name: a path, a module's name or a command.  kind: "file", "module" or "command".

    fresh: each rank is an interpreter of its own; else it is forked from one that has imported
    torch. safe_path: whether the interpreter that started it has put no folder first in sys.path.
    Ranks that are forked have that interpreter's sys.path, and flags of another one."""

    name: str
    args: tuple[str, ...] = ()
    kind: str = "file"
    fresh: bool = False
    safe_path: bool = bool(sys.flags.safe_path)

    @staticmethod
    def find(
        name: str, args: tuple[str, ...], module: bool, no_python: bool, fresh: bool
    ) -> Script:
        """As torchrun has it; what is no Python file, but can be executed, is. Raises InputError."""
        if module and no_python:
            raise InputError("-m and --no-python: a module is Python", "leave one of them out")
        if module:
            if not _has_module(name):
                raise InputError(
                    f"-m {name}: there is no such module", f"{sys.executable} -c 'import {name}'"
                )
            return Script(name, args, "module", fresh)
        if Path(name).is_dir() and not (Path(name) / "__main__.py").is_file():
            raise InputError(f"script {name} is a folder without __main__.py", f"ls {name}")
        if Path(name).is_char_device() or Path(name).is_block_device():
            raise InputError(f"script {name} is a device", "the path of a file")
        if not no_python and Path(name).exists() and not _is_executable(Path(name)):
            if not _is_packed(Path(name)):
                read_source(Path(name))
            return Script(name, args, "file", fresh)
        if shutil.which(name) is None:
            what = "command" if no_python else "script"
            raise InputError(f"{what} {name} does not exist", f"ls {Path(name).absolute().parent}")
        return Script(name, args, "command", fresh)

    @property
    def is_forked(self) -> bool:
        """Whether a rank runs it in the process that was forked, and not as a new program."""
        return self.kind != "command" and not self.fresh

    @property
    def imports_torch(self) -> bool:
        """Whether it pays to fork the ranks from a process that has; not for the standard library
        alone.
        """
        return self.is_forked and not (self.kind == "file" and _is_plain(Path(self.name)))

    def command(self, explain_after: float | None = None) -> list[str]:
        """How a new process runs it. explain_after: of a rank that no launcher watches."""
        if self.kind == "command":
            return [self.name, *self.args]
        words = [str(explain_after or 0), self.kind, self.name, *self.args]
        return [sys.executable, "-u", "-m", "stepladder.launcher.be_rank", *words]

    def become_main(self) -> None:
        """Make a forked process what a new interpreter would be."""
        EXIT_CALLBACKS.append(end_interpreter)
        os.setsid()  # Ctrl-C in a terminal reaches the launcher alone, which hands it on, once
        signal.signal(signal.SIGINT, signal.default_int_handler)
        multiprocessing.current_process().name = "MainProcess"  # some scripts log only there
        multiprocessing.process._parent_process = None  # type: ignore[attr-defined]
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)  # type: ignore[union-attr]

    def work(self) -> int:
        """Be the script, in a rank that has just been forked. Returns its exit code, or raises as
        it does.
        """
        if not self.is_forked:
            os.setsid()
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            become(self.command())
        self.become_main()
        if "torch.optim" in sys.modules:
            count_script_steps()
        self.run_here()
        return 0

    def run_here(self) -> None:
        """Be the script, in a process that has run nothing else."""
        # The launcher's own folder stands first in sys.path, where Python puts that of a script.
        folder = str(Path(self.name).absolute().parent) if self.kind == "file" else str(Path.cwd())
        sys.path[: 0 if self.safe_path else 1] = [folder]
        sys.argv = [self.name, *self.args]
        if self.kind == "module":
            runpy.run_module(self.name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(self.name, run_name="__main__")


def become(command: list[str]) -> NoReturn:
    """This process is that program from now on. Raises InputError where it is none."""
    with as_input_error(
        f"{command[0]} cannot be started",
        "a first line like #!/bin/sh, or its program before its name",
    ):
        os.execvp(command[0], command)


def end_interpreter() -> None:
    """What Python does at its end, which a forked rank does not come to by itself."""
    with suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()


def _has_module(name: str) -> bool:
    """Looks for the outermost package only: to look further would import it."""
    sys.path.insert(0, str(Path.cwd()))
    try:
        spec = importlib.util.find_spec(name.partition(".")[0])
        if spec is not None and spec.origin is not None and spec.origin.endswith(".py"):
            read_source(Path(spec.origin))
        return spec is not None
    except (ImportError, ValueError):
        return False
    finally:
        sys.path.pop(0)


def _is_packed(path: Path) -> bool:
    """A folder or an archive, which Python looks into."""
    return path.is_dir() or (path.is_file() and is_zipfile(path))


def _is_plain(path: Path) -> bool:
    try:
        nodes = list(ast.walk(parse_source(path)))
    except InputError:  # Python will say so itself
        return False
    imported = [
        alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names
    ]
    imported += [
        ("." * node.level) + (node.module or "")
        for node in nodes
        if isinstance(node, ast.ImportFrom)
    ]
    return {name.partition(".")[0] for name in imported} <= sys.stdlib_module_names


def _is_executable(path: Path) -> bool:
    """A program of its own: marked so, and no Python file by its name or first line."""
    if not path.is_file() or not os.access(path, os.X_OK) or path.suffix in (".py", ".pyc", ".pyz"):
        return False
    first = path.open("rb").readline(200)
    return not (first.startswith(b"#!") and b"python" in first)
