"""Helpers of the tests: the command `slurm-lab`, and what tells processes and networks apart."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from slurm_lab.prepare import NETWORK_PROGRAMS, SLURM_PROGRAMS, can_have_networks

COMMAND = (sys.executable, "-m", "slurm_lab")
TIMEOUT_S = 120  # on a machine with other work; after it the command hangs
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"


def run(
    *arguments: object,
    state: Path,
    command: tuple[object, ...] = COMMAND,
    env: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run `slurm-lab ARGUMENTS` with its files below the folder `state`."""
    return subprocess.run(
        [str(argument) for argument in (*command, *arguments)],
        cwd="/",
        env={**os.environ, "PATH": PATH, "XDG_STATE_HOME": str(state), **(env or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def expect_refusal(process: subprocess.CompletedProcess[str], *parts: str) -> str:
    """Check for exit code 2 and one line on stderr with these parts and a hint; return the line."""
    assert process.returncode == 2, f"{process.returncode}\n{process.stdout}{process.stderr}"
    assert process.stdout == ""
    [line] = process.stderr.splitlines()
    assert line.startswith("error: ")
    for part in (*parts, ". HINT: "):
        assert part in line, line
    return line


def find_obstacle() -> str:
    """Return why no lab with networks can be up on this machine, or ""."""
    programs = [name for names in (SLURM_PROGRAMS | NETWORK_PROGRAMS).values() for name in names]
    folders = PATH.split(":")
    missing = [
        name for name in programs if not any(Path(folder, name).exists() for folder in folders)
    ]
    if missing:
        return f"not installed: {', '.join(missing)}"
    return "" if can_have_networks() else "this user can have no network namespaces"


def wait_until(condition: Callable[[], object], poll_interval_s: float = 0.1) -> None:
    """Wait until the condition holds."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(poll_interval_s)


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process runs."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def find_processes_with(text: str) -> list[psutil.Process]:
    """Return the processes, other than this one, with the text in their command or environment."""
    processes = []
    for process in psutil.process_iter():
        try:
            values = [*process.cmdline(), *process.environ().values()]
        except (psutil.Error, OSError):
            continue
        if process.pid != os.getpid() and any(text in value for value in values):
            processes.append(process)
    return processes


def list_network_parts(bridge: str) -> set[tuple[str, int]]:
    """Return a lab's namespaces and devices, each with what tells it from a later one of its name.

    A namespace's number may be given out again at once, so it is the time at which it was made.
    """
    namespaces = Path("/run/netns").glob("*")
    parts = {(f"netns {path.name}", path.stat().st_ctime_ns) for path in namespaces}
    parts |= {(name, number) for number, name in socket.if_nameindex()}
    return {part for part in parts if re.fullmatch(rf"(netns )?{bridge}(n\d+)?", part[0])}


class StartedLab:
    """A lab that `slurm-lab up` has started."""

    def __init__(self, state: Path, command: tuple[object, ...]) -> None:
        self.state = state
        self.command = command
        self.folder = state / "slurm-lab" / "lab"

    def run(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        """Run `slurm-lab ARGUMENTS`."""
        return run(*arguments, state=self.state, command=self.command)

    def succeed(self, *arguments: object) -> str:
        """Run `slurm-lab ARGUMENTS`, expect exit code 0, and return what it printed."""
        process = self.run(*arguments)
        assert process.returncode == 0, f"{arguments}\n{process.stdout}{process.stderr}"
        return process.stdout

    def read_nodes(self) -> dict[str, dict[str, Any]]:
        """Return the state of each node by its name."""
        status = json.loads(self.succeed("status", "--json"))
        return {node["name"]: node for node in status["nodes"]}

    def read_record(self) -> dict[str, Any]:
        """Return the lab's record."""
        record: dict[str, Any] = json.loads((self.folder / "lab.json").read_text())
        return record


@contextmanager
def start_lab(*flags: object, command: tuple[object, ...] = COMMAND) -> Iterator[StartedLab]:
    """Yield a lab of its own, which is down after the block."""
    # A test's own folder has too long a path for Slurm's sockets.
    with tempfile.TemporaryDirectory(prefix="slurm-lab-", dir="/tmp") as folder:
        Path(folder).chmod(0o777 | 0o1000)  # for a command of another user
        lab = StartedLab(Path(folder), command)
        try:
            lab.succeed("up", *flags)
            yield lab
        finally:
            if lab.folder.exists():
                lab.succeed("down")
