"""The run that is broken in chaos.py: started, looked at, and compared with the unbroken one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import psutil

from stepladder.core.errors import InputError
from stepladder.rank.progress import NUM_SLOTS, STEP
from stepladder.storage.audit import audit

STEPS = 96
NPROC = 3
SNAPSHOT_EVERY = 3
JOB = [
    "mlp",
    "--sync",
    "exact",
    "--samples",
    "1024",
    "--global-batch",
    "32",
    "--microbatch",
    "4",
    "--lr",
    "0.02",
]
SECONDS = 120.0  # no trial takes so long, unless it hangs


@dataclass(frozen=True)
class Trial:
    """What one trial showed.

    same: its weights are those of the unbroken run.  exact: no sample lost or repeated.  stderr: what it
    printed.  differences: hashes and audit.  run_dir: where the run was."""

    same: bool
    exact: bool
    seconds: float
    stderr: str
    differences: str
    run_dir: Path

    @property
    def kills(self) -> int:
        return self.stderr.count("was killed by SIGKILL")

    @property
    def is_whole(self) -> bool:
        return self.same and self.exact

    def keep_folder(self) -> None:
        """Say why it is bad, and copy its run directory to where it outlives the benchmark."""
        kept = Path(tempfile.mkdtemp(prefix="chaos-")) / "run"
        if self.run_dir.exists():
            shutil.copytree(self.run_dir, kept)
        print(f"{self.stderr}\n{self.differences}\nkept in {kept}", file=sys.stderr)


class Command:
    """`stepladder train` in a session of its own. Its temporary files are ours, the ranks' progress
    among them.
    """

    def __init__(self, folder: Path, *flags: object, epochs: int = 3) -> None:
        self.temporary = Path(tempfile.mkdtemp(dir=folder))
        self.run_dir = folder / "run"
        self.err = self.temporary / "err"
        steps = ["--epochs", str(epochs), "--snapshot-every", str(SNAPSHOT_EVERY)]
        command = [
            sys.executable,
            "-m",
            "stepladder",
            "train",
            *JOB,
            *steps,
            "--run-dir",
            str(self.run_dir),
        ]
        with self.err.open("w") as err:
            self.popen = subprocess.Popen(
                [*command, *map(str, flags)],
                env={**os.environ, "TMPDIR": str(self.temporary)},
                stdout=err,
                stderr=err,
                start_new_session=True,
            )
        self.process = psutil.Process(self.popen.pid)

    @property
    def running(self) -> bool:
        return self.popen.poll() is None

    def ranks(self) -> list[psutil.Process]:
        """Return the processes that the fork server has forked, in rank order."""
        with suppress(psutil.NoSuchProcess):
            below = self.process.children(recursive=True)
            return sorted((p for p in below if p.ppid() != self.popen.pid), key=lambda p: p.pid)
        return []

    def step(self) -> int:
        """The furthest step that a rank has computed its share of, as the launcher sees it."""
        furthest = 0
        for file in Path(f"/proc/{self.popen.pid}/fd").glob("*"):
            with suppress(OSError):  # files come and go while they are listed
                if file.readlink().name.startswith("memfd:progress"):
                    slots = memoryview(file.read_bytes()).cast("q")[STEP::NUM_SLOTS]
                    furthest = max([furthest, *slots])
        return furthest

    def wait_for(self, condition: Callable[[], object]) -> None:
        """Wait until a condition is true, or the command has ended."""
        deadline = time.monotonic() + SECONDS
        while self.running and not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(self.err.read_text())
            time.sleep(0.001)


@contextmanager
def started(folder: Path, *flags: object, epochs: int = 3) -> Iterator[Command]:
    """A command in a folder of its own; nothing of it is left at the end of the block."""
    command = Command(folder, *flags, epochs=epochs)
    try:
        yield command
    finally:
        command.popen.kill()  # its ranks die with it
        command.popen.wait()


def examine(command: Command, reference: str, began: float) -> Trial:
    """Wait for the end, and compare."""
    try:
        command.popen.wait(SECONDS)
        weights = json.loads((command.run_dir / "result.json").read_text())["weights_sha256"]
        proof = audit(command.run_dir)
        same = weights == reference
        exact = proof.ok
        differences = f"weights {weights}, unbroken {reference}; {proof}"
    except (OSError, subprocess.TimeoutExpired, InputError) as error:
        same = False
        exact = False
        differences = repr(error)
    return Trial(
        same, exact, time.monotonic() - began, command.err.read_text(), differences, command.run_dir
    )


def unbroken(folder: Path, epochs: int = 3) -> str:
    """The hash of the weights of one process that nothing happens to."""
    with started(folder, epochs=epochs) as command:
        command.popen.wait(SECONDS)
    return json.loads((command.run_dir / "result.json").read_text())["weights_sha256"]


class Whole(Protocol):
    """What can be as an unbroken run is."""

    @property
    def is_whole(self) -> bool: ...

    def keep_folder(self) -> None: ...


Run = TypeVar("Run", bound=Whole)


def keep_if_bad(result: Run) -> Run:
    if not result.is_whole:
        result.keep_folder()
    return result


def verdict(claim: str, count: int, of: int) -> str:
    return f"- {'PASS' if count == of else 'FAIL'}: {claim}: {count} of {of}"
