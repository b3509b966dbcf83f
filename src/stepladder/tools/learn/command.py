"""Run the command of a lesson or an exercise until it ends, hangs or takes too long.

Every process that it has started is ended.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from stepladder.core.errors import InputError
from stepladder.core.signals import die_with_parent, exit_on_signals
from stepladder.tools.learn.hang import (
    HANG_TIMEOUT_S,
    StallMeter,
    abort_process_tree,
    explain_output,
    find_ranks,
    list_process_tree,
)

PYTHON_PROGRAMS = {
    "python": (),
    "torchrun": ("-m", "torch.distributed.run"),
    "stepladder": ("-m", "stepladder"),
}
WATCH_INTERVAL_S = 0.5

Echo = Callable[[str], object]


@dataclass(frozen=True)
class CommandResult:
    """The exit code and output of a command, and whether it was ended.

    Args:
        exit_code: Its exit code.
        output: All that it has printed, stacks included.
        timed_out: It took too long.
        hung: All of its processes slept.
        explanation: What they waited for, if that could be found out.
    """

    exit_code: int
    output: str
    timed_out: bool
    hung: bool = False
    explanation: str = ""

    def find_last_line(self, prefix: str) -> str:
        """Return the last line that begins with the prefix, or an empty text."""
        lines = [line.strip() for line in self.output.splitlines()]
        return next((line for line in reversed(lines) if line.startswith(prefix)), "")

    @property
    def failure(self) -> str:
        """Why the command failed, or an empty text."""
        if self.hung:
            return f"it hung, and was stopped after {HANG_TIMEOUT_S:.0f} s without any work"
        if self.timed_out:
            return "it was stopped after a timeout: its output shows where it was"
        if self.exit_code:
            return f"it ended with exit code {self.exit_code}, see its output"
        return ""


class _Watch:
    """Ends a command that hangs or takes too long, once its processes have printed their stacks."""

    def __init__(
        self, process: subprocess.Popen[str], timeout_s: float | None, hang_timeout_s: float | None
    ) -> None:
        # Whether the command took too long.
        self.timed_out = False
        # Whether all processes of the command slept.
        self.hung = False
        # The processes in the order in which they printed their stacks.
        self.pids: list[int] = []
        # The rank of a process by its id, as far as it is known.
        self.ranks: dict[int, int] = {}
        self._process = process
        self._timeout_s = timeout_s or threading.TIMEOUT_MAX
        self._hang_timeout_s = hang_timeout_s or threading.TIMEOUT_MAX
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    @property
    def is_ending(self) -> bool:
        """Whether what is printed now are stacks."""
        return self.hung or self.timed_out

    def explain(self, stacks: str) -> str:
        """Return where the processes were, from the stacks that they have printed."""
        lead = "no process has worked"
        seconds = self._hang_timeout_s
        if self.timed_out:
            lead = "it has not come to its end"
            seconds = self._timeout_s
        return explain_output(stacks, self.pids, self.ranks, lead, seconds)

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        deadline = time.monotonic() + self._timeout_s
        stall_meter = StallMeter(self._process.pid)
        while not self._is_over.wait(WATCH_INTERVAL_S):
            self.timed_out = time.monotonic() > deadline
            self.hung = stall_meter.poll() > self._hang_timeout_s
            if self.is_ending:
                self.ranks = find_ranks(list_process_tree(self._process.pid))
                self.pids = [member.pid for member in abort_process_tree(self._process.pid)]
                _kill_process_tree(self._process)
                return


@exit_on_signals()
def run_command(
    command: Sequence[str],
    cwd: Path,
    echo: Echo,
    timeout_s: float | None,
    hang_timeout_s: float | None = None,
    **variables: str,
) -> CommandResult:
    """Run a command to its end, and end every process that it started.

    Each line of its output (stdout and stderr) is passed to `echo`. The variables are added to its
    environment.

    Args:
        command: The program and its arguments.
        cwd: Where it runs.
        echo: Gets each line. Of a command that hangs, it gets an explanation, not the stacks.
        timeout_s: How long it may take.
        hang_timeout_s: How long all of its processes may sleep; None: for ever.
        **variables: Additions to its environment.
    """
    process = _start_process(_find_program(command), cwd, _make_environment(variables))
    watch = _Watch(process, timeout_s, hang_timeout_s)
    lines = []
    stacks = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if watch.is_ending:
                stacks.append(line)
            else:
                lines.append(line)
                echo(line.rstrip("\n"))
        exit_code = process.wait()
    finally:
        watch.close()
        _kill_process_tree(process)
    explanation = ""
    if watch.is_ending:
        explanation = watch.explain("".join(stacks))
        echo(explanation or "".join(stacks).rstrip("\n"))
    return CommandResult(
        exit_code, "".join(lines + stacks), watch.timed_out, watch.hung, explanation
    )


def _find_program(command: Sequence[str]) -> list[str]:
    """Return the command with its Python program run by this interpreter."""
    program, *args = command
    if program in PYTHON_PROGRAMS:
        return [sys.executable, *PYTHON_PROGRAMS[program], *args]
    if shutil.which(program) is None:
        raise InputError(f"{program} is not installed", f"it is needed by: {shlex.join(command)}")
    return list(command)


def _make_environment(variables: dict[str, str]) -> dict[str, str]:
    interpreter_folder = str(Path(sys.executable).parent)
    path = os.pathsep.join([interpreter_folder, os.environ.get("PATH", "")])
    return {
        "OMP_WAIT_POLICY": "PASSIVE",
        **os.environ,
        "PATH": path,
        "PYTHONFAULTHANDLER": "1",
        **variables,
    }


def _start_process(
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


def _kill_process_tree(process: subprocess.Popen[str]) -> None:
    """Kill a process and all that it started.

    The ranks of torchrun are descendants in sessions of their own; orphans are only in the process
    group. So both are killed.
    """
    if process.returncode is not None:  # it was reaped, and another process may have its pid now
        return
    for member in reversed(list_process_tree(process.pid)):
        with suppress(psutil.NoSuchProcess):
            member.kill()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
