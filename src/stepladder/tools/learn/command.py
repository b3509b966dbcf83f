"""Run the command of a lesson or an exercise with a timeout, and end every process it started."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from stepladder.core.errors import InputError
from stepladder.core.signals import exit_on_signals
from stepladder.rank.lifecycle import die_with_parent

PYTHON_PROGRAMS = {
    "python": (),
    "torchrun": ("-m", "torch.distributed.run"),
    "stepladder": ("-m", "stepladder"),
}
ABORT_TIMEOUT_S = 2.0

Echo = Callable[[str], object]


@dataclass(frozen=True)
class CommandResult:
    """The exit code and output of a command, and whether the timeout ended it."""

    exit_code: int
    output: str
    timed_out: bool

    def find_last_line(self, prefix: str) -> str:
        """Return the last line that begins with the prefix, or an empty text."""
        lines = [line.strip() for line in self.output.splitlines()]
        return next((line for line in reversed(lines) if line.startswith(prefix)), "")

    @property
    def failure(self) -> str:
        """Why the command failed, or an empty text."""
        if self.timed_out:
            return "it was stopped after a timeout: its output shows where it hung"
        if self.exit_code:
            return f"it ended with exit code {self.exit_code}, see its output"
        return ""


@exit_on_signals()
def run_command(
    command: Sequence[str], cwd: Path, echo: Echo, timeout_s: float | None, **variables: str
) -> CommandResult:
    """Run a command to its end, and end every process that it started.

    Each line of its output (stdout and stderr) is passed to `echo`. The variables are added to its
    environment.
    """
    process = start_process(
        find_program(command),
        cwd,
        make_environment(variables),
    )
    is_overdue = threading.Event()

    def end_overdue_process() -> None:
        is_overdue.set()
        abort_process_tree(process)
        kill_process_tree(process)

    timer = threading.Timer(timeout_s or threading.TIMEOUT_MAX, end_overdue_process)
    timer.daemon = True  # a Timer's constructor takes no such argument
    timer.start()
    lines = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            echo(line.rstrip("\n"))
        return CommandResult(
            process.wait(),
            "".join(lines),
            is_overdue.is_set(),
        )
    finally:
        timer.cancel()
        kill_process_tree(process)
        timer.join()


def find_program(command: Sequence[str]) -> list[str]:
    """Return the command with its Python program run by this interpreter."""
    program, *args = command
    if program in PYTHON_PROGRAMS:
        return [sys.executable, *PYTHON_PROGRAMS[program], *args]
    if shutil.which(program) is None:
        raise InputError(f"{program} is not installed", f"it is needed by: {shlex.join(command)}")
    return list(command)


def make_environment(variables: dict[str, str]) -> dict[str, str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return {
        "OMP_WAIT_POLICY": "PASSIVE",
        **os.environ,
        "PATH": path,
        "PYTHONFAULTHANDLER": "1",
        **variables,
    }


def start_process(
    command: list[str], cwd: Path, environment: dict[str, str]
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
        preexec_fn=die_with_parent,
    )


def list_process_tree(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Return all descendants of a process, and then the process itself."""
    try:
        root = psutil.Process(process.pid)
        return [*root.children(recursive=True), root]
    except psutil.NoSuchProcess:
        return []


def abort_process_tree(process: subprocess.Popen[str]) -> None:
    """Send SIGABRT to each process: with PYTHONFAULTHANDLER, Python then prints its stacks."""
    for member in list_process_tree(process):
        with suppress(psutil.NoSuchProcess):
            if hasattr(member, "rlimit"):  # Linux: write no core file
                member.rlimit(psutil.RLIMIT_CORE, (0, 0))
            member.send_signal(signal.SIGABRT)
            # Wait for each process in turn, so that their stacks do not interleave.
            with suppress(psutil.TimeoutExpired):
                member.wait(ABORT_TIMEOUT_S)


def kill_process_tree(process: subprocess.Popen[str]) -> None:
    """Kill a process and all that it started.

    The ranks of torchrun are descendants in sessions of their own; orphans are only in the process
    group. So both are killed.
    """
    if process.returncode is not None:  # it was reaped, and another process may have its pid now
        return
    for member in list_process_tree(process):
        with suppress(psutil.NoSuchProcess):
            member.kill()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
