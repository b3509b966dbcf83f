"""An unmodified script, module or command of `stepladder run`, and how a rank becomes it."""

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
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn
from zipfile import is_zipfile

from stepladder.core.console import print_message
from stepladder.core.errors import InputError, as_input_error
from stepladder.core.python_file import parse_source, read_source
from stepladder.rank.exchange_choice import EXCHANGE_VARIABLE, MEMORY_EXCHANGE
from stepladder.rank.lifecycle import EXIT_CALLBACKS
from stepladder.rank.progress import count_script_steps
from stepladder.rank.separate_training import refuse_separate_training
from stepladder.rank.torch_fixes_groups import make_groups_by, name_groups_in_stacks
from stepladder.rank.torch_fixes_loader import report_unsent_batches
from stepladder_exchange.after_import import call_after_import
from stepladder_exchange.torch_fixes_store import keep_stores_of_groups

FIRST_LINE_BYTES = 200


@dataclass(frozen=True)
class Script:
    """A script, module or command with its arguments.

    Args:
        name: A path, a module's name or a command.
        args: The arguments.
        kind: "file", "module" or "command".
        fresh: Each rank is a new interpreter; otherwise it is forked from one that has imported
            torch.
        safe_path: The launcher's interpreter has put no folder first in sys.path. Forked ranks
            inherit that sys.path, but have the flags of another interpreter.
    """

    name: str
    args: tuple[str, ...] = ()
    kind: str = "file"
    fresh: bool = False
    safe_path: bool = bool(sys.flags.safe_path)

    @staticmethod
    def from_arguments(
        name: str, args: tuple[str, ...], module: bool, no_python: bool, fresh: bool
    ) -> Script:
        """Return what a command line names, as torchrun does.

        An executable file that is not Python is a command.

        Args:
            name: The script.
            args: Its arguments.
            module: It is a module (-m).
            no_python: It is a command (--no-python).
            fresh: Each rank is a new interpreter.

        Raises:
            InputError: There is no such script, module or command.
        """
        if module and no_python:
            raise InputError("-m and --no-python: a module is Python", "leave one of them out")
        if module:
            if not _has_module(name):
                raise InputError(
                    f"-m {name}: there is no such module", f"{sys.executable} -c 'import {name}'"
                )
            return Script(name, args, "module", fresh)
        path = Path(name)
        _validate_runnable(path, name)
        if not no_python and path.exists() and not _is_executable(path):
            if not _is_packed(path):
                read_source(path)  # raises InputError where it is not Python
            return Script(name, args, "file", fresh)
        if shutil.which(name) is None:
            kind = "command" if no_python else "script"
            raise InputError(f"{kind} {name} does not exist", f"ls {path.absolute().parent}")
        return Script(name, args, "command", fresh)

    @property
    def is_forked(self) -> bool:
        """Whether a rank runs it in the process that was forked, and not as a new program."""
        return self.kind != "command" and not self.fresh

    @property
    def imports_torch(self) -> bool:
        """Whether to fork the ranks from a process that has imported torch.

        It would be in vain for a script that imports the standard library alone.
        """
        if not self.is_forked:
            return False
        return self.kind != "file" or not _imports_only_stdlib(Path(self.name))

    def command(self, explain_after: float | None = None) -> list[str]:
        """Return the command with which a new process runs it.

        Args:
            explain_after: Seconds without progress until the reason is printed, for a rank that no
                launcher of ours monitors.
        """
        if self.kind == "command":
            return [self.name, *self.args]
        program = [sys.executable, "-u", "-m", "stepladder.launcher.rank_main"]
        return [*program, str(explain_after or 0), self.kind, self.name, *self.args]

    def become_main(self) -> None:
        """Make a forked process look like a new interpreter."""
        EXIT_CALLBACKS.append(_end_interpreter)
        os.setsid()  # Ctrl-C in a terminal reaches the launcher alone, which forwards it once
        multiprocessing.current_process().name = "MainProcess"  # some scripts log only there
        multiprocessing.process._parent_process = None  # type: ignore[attr-defined]
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)  # type: ignore[union-attr]

    def work(self) -> int:
        """Run the script in a rank that has just been forked.

        Returns:
            The exit code. It raises what the script raises.
        """
        if not self.is_forked:
            os.setsid()
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            exec_program(self.command())
        self.become_main()
        if "torch.optim" in sys.modules:
            count_script_steps()
        self.run_here()
        return 0

    def run_here(self) -> None:
        """Run the script in this process, which has run nothing else."""
        # Python puts the folder of a script first in sys.path; the launcher's folder is there now.
        is_file = self.kind == "file"
        folder = Path(self.name).absolute().parent if is_file else Path.cwd()
        replaced_entries = 0 if self.safe_path else 1
        sys.path[:replaced_entries] = [str(folder)]
        sys.argv = [self.name, *self.args]
        refuse_separate_training("stepladder run --independent")
        prepare_groups(load_shared_memory_group)
        if self.kind == "module":
            runpy.run_module(self.name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(self.name, run_name="__main__")


def _use_cpus_together(_: ModuleType) -> None:
    """Let Accelerate train on CPUs with all ranks; unless asked, it lets each train alone."""
    import torch

    if not torch.accelerator.is_available():
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")


def _synchronize_batch_norm(_: ModuleType) -> None:
    """Let SyncBatchNorm work on CPU ranks."""
    from stepladder_exchange.torch_fixes_batch_norm import synchronize_on_cpus

    synchronize_on_cpus(_announce_batch_norm)


@cache
def _announce_batch_norm() -> None:
    import torch.distributed

    if torch.distributed.get_rank() == 0:
        print_message("SyncBatchNorm works on CPUs here; under torchrun it needs GPUs")


def prepare_groups(load_function: Callable[[], Callable[..., Any]]) -> None:
    """Make torch's groups and data loaders of this process tell what they wait for.

    Args:
        load_function: Returns what makes a group that exchanges by memory, where the launcher has
            asked for it.
    """
    keep_stores_of_groups()
    name_groups_in_stacks()
    call_after_import("accelerate.state", _use_cpus_together)
    call_after_import("torch", _synchronize_batch_norm)
    report_unsent_batches()
    if os.environ.get(EXCHANGE_VARIABLE) == MEMORY_EXCHANGE:
        make_groups_by(load_function)


def _validate_runnable(path: Path, name: str) -> None:
    """Raise InputError for a path that neither Python nor a shell can run."""
    if path.is_dir() and not (path / "__main__.py").is_file():
        raise InputError(f"script {name} is a folder without __main__.py", f"ls {name}")
    if path.is_char_device() or path.is_block_device():
        raise InputError(f"script {name} is a device", "the path of a file")


def load_shared_memory_group() -> Any:
    """Return a class of process groups that exchange tensors through shared memory, and say so."""
    from stepladder_exchange.process_group import SharedMemoryGroup

    return partial(SharedMemoryGroup, announce=_announce_exchange)


@cache
def _announce_exchange(obstacle: str, num_machines: int) -> None:
    """Print once how the ranks exchange tensors in the host's memory."""
    import torch

    if torch.cuda.is_available():
        return  # most tensors are on GPUs, and are NCCL's
    if obstacle:
        print_message(f"the ranks exchange tensors by gloo: {obstacle}")
        return
    way = "in shared memory"
    if num_machines > 1:
        way = f"in shared memory within each of {num_machines} machines, by gloo between them"
    print_message(f"the ranks exchange tensors {way}; --exchange gloo turns it off")


def exec_program(command: list[str]) -> NoReturn:
    """Replace this process by a program.

    Raises:
        InputError: The program cannot be started.
    """
    with as_input_error(
        f"{command[0]} cannot be started",
        "a first line like #!/bin/sh, or its program before its name",
    ):
        os.execvp(command[0], command)


def _end_interpreter() -> None:
    """Do what Python does at its end, which a forked rank does not reach by itself."""
    with suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()


def _has_module(name: str) -> bool:
    """Return whether the outermost package of a module exists: to look further would import it."""
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
    """Return whether Python runs the __main__.py of this folder or archive."""
    return path.is_dir() or (path.is_file() and is_zipfile(path))


def _imports_only_stdlib(path: Path) -> bool:
    try:
        nodes = list(ast.walk(parse_source(path)))
    except InputError:  # Python will report it
        return False
    names = []
    for node in nodes:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append("." * node.level + (node.module or ""))
    return {name.partition(".")[0] for name in names} <= sys.stdlib_module_names


def _is_executable(path: Path) -> bool:
    """Return whether a file is executable, and not Python by its name or its first line."""
    if not path.is_file() or not os.access(path, os.X_OK):
        return False
    if path.suffix in (".py", ".pyc", ".pyz"):
        return False
    first_line = path.open("rb").readline(FIRST_LINE_BYTES)
    return not (first_line.startswith(b"#!") and b"python" in first_line)
