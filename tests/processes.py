"""The command line as real processes: run to the end, or started, watched, signalled, and never
left behind.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import psutil
import pytest

from warm import SERVER, Forked

COMMAND = (sys.executable, "-m", "stepladder")
JOBS = Path(__file__).parent / "jobs"
SECONDS = 300  # for what takes some, on a machine with other work; then it hangs


def run(
    *args: object,
    cwd: Path,
    env: dict[str, str] | None = None,
    timeout: float = SECONDS,
    command: tuple[str, ...] = COMMAND,
) -> subprocess.CompletedProcess[str]:
    """One command to its end. Without one, all that it started is ended, and what was printed is
    shown.
    """
    with TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        process = start([*command, *map(str, args)], cwd, env or {}, out, err)
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            end_family(process.pid)
            process.wait()
            pytest.fail(
                f"{process.args} had no end after {timeout} s\nstdout:\n{read(out)}\nstderr:\n{read(err)}"
            )
        return subprocess.CompletedProcess(process.args, process.returncode, read(out), read(err))


def start(
    words: list[str],
    cwd: Path,
    env: dict[str, str],
    out: IO[str],
    err: IO[str],
    new_session: bool = False,
) -> subprocess.Popen[str] | Forked:
    """A process of its own, forked from the warm one where that is the same as a new interpreter."""
    full_env = {**os.environ, **env}
    if SERVER.can_run(words, full_env):
        return SERVER.start(words, cwd, full_env, (out.fileno(), err.fileno()), new_session)
    return subprocess.Popen(
        words,
        cwd=cwd,
        env=full_env,
        stdout=out,
        stderr=err,
        text=True,
        start_new_session=new_session,
    )


def read(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def end_family(pid: int) -> None:
    first = psutil.Process(pid)
    for child in [*first.children(recursive=True), first]:
        with suppress(psutil.NoSuchProcess):
            child.kill()


def train(
    *args: object, cwd: Path, env: dict[str, str] | None = None, code: int = 0, **more: Any
) -> dict[str, Any]:
    """`stepladder train ARGS --json` with the exit code that is expected: the object on its last
    line.
    """
    done = run("train", *args, "--json", cwd=cwd, env=env, **more)
    assert done.returncode == code, f"exit code {done.returncode}\n{done.stderr}"
    return json.loads(
        done.stdout.splitlines()[-1], parse_constant=lambda word: pytest.fail(f"{word} is not JSON")
    )


def first_difference(first: Path, second: Path) -> str:
    """Where two runs part, for the message of a test: the first lines of metrics.jsonl that differ."""
    lines = ((run_dir / "metrics.jsonl").read_text().splitlines() for run_dir in (first, second))
    pairs = zip_longest(*lines)
    return next((f"{one}\n{other}" for one, other in pairs if one != other), "the same metrics")


def audited(run_dir: Path) -> dict[str, Any]:
    """`stepladder audit --json`."""
    return json.loads(run("audit", run_dir, "--json", cwd=run_dir).stdout)


def refused(done: subprocess.CompletedProcess[str], *parts: str) -> str:
    """Exit code 2; the last line on stderr is the one error, holds the parts and a hint; no
    traceback.
    """
    assert done.returncode == 2, f"exit code {done.returncode}\n{done.stderr}"
    *_, line = done.stderr.splitlines()
    assert line.startswith("error: "), line
    assert done.stderr.count("error: ") == 1
    assert "Traceback" not in done.stderr, done.stderr
    for part in (*parts, ". HINT: "):
        assert part in line, line
    assert done.stdout == ""
    return line


class Started:
    """A command that runs in a session of its own; its output goes to files."""

    def __init__(self, command: list[str], cwd: Path, env: dict[str, str]) -> None:
        self.out = cwd / f"{time.monotonic_ns()}.out"
        self.err = cwd / f"{time.monotonic_ns()}.err"
        with self.out.open("w") as out, self.err.open("w") as err:
            self.popen = start(command, cwd, env, out, err, new_session=True)
        self.family: set[psutil.Process] = set()
        with suppress(psutil.NoSuchProcess):  # it may have ended already
            self.family.add(self.process)

    @cached_property
    def process(self) -> psutil.Process:
        return psutil.Process(self.popen.pid)

    def record_family(self) -> None:
        """Remember every process below this one: after a kill they have another parent."""
        with suppress(psutil.NoSuchProcess):  # it has ended this moment
            if self.popen.poll() is None:
                self.family |= set(self.process.children(recursive=True))

    def wait_for(self, path: Path) -> None:
        """Until `path` exists and is not empty."""
        wait_until(
            lambda: self.popen.poll() is not None or (path.exists() and path.stat().st_size > 0)
        )
        assert self.popen.poll() is None, f"ended early:\n{self.err.read_text()}"
        self.record_family()

    def end(self) -> int:
        """Its exit code, when it and all below it have ended."""
        try:
            code = self.popen.wait(SECONDS)
        except subprocess.TimeoutExpired:
            pytest.fail(
                f"still runs after {SECONDS} s:\n{self.out.read_text()}{self.err.read_text()}"
            )
        wait_until(lambda: not self.alive(), lambda: f"still alive: {self.alive()}")
        return code

    def alive(self) -> list[psutil.Process]:
        return [process for process in self.family if is_alive(process)]

    def signal_group(self, number: int) -> None:
        os.killpg(self.popen.pid, number)


@contextmanager
def started(
    *args: object, cwd: Path, env: dict[str, str] | None = None, command: tuple[str, ...] = COMMAND
) -> Iterator[Started]:
    """A running command; at the end of the block nothing of it is left."""
    running = Started([*command, *map(str, args)], cwd, env or {})
    try:
        yield running
    finally:
        running.record_family()
        for process in running.alive():
            with suppress(psutil.NoSuchProcess):  # it has ended this moment
                process.send_signal(signal.SIGKILL)
        running.popen.wait(SECONDS)
        psutil.wait_procs(running.family, SECONDS)


def is_alive(process: psutil.Process) -> bool:
    """In one question: between two, the process may end, and the second raise."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(
    condition: Callable[[], object],
    what: Callable[[], str] = lambda: "never came true",
    every: float = 0.02,
) -> None:
    """every: seconds between two looks; 0.25 for a look that starts a process, which would keep a
    core busy.
    """
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(every)
