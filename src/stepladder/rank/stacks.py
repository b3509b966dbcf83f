"""Where a process is in its Python code: it says so itself on a signal, also in the middle of a C
call.

faulthandler writes from the signal handler, so a rank that holds the interpreter's lock, or waits
in a collective, still answers. Forked workers (DataLoader's) inherit the handler and the file.
py-spy, where it is installed and allowed, reads from outside, so it also sees processes that are
stopped."""

from __future__ import annotations

import faulthandler
import json
import linecache
import os
import re
import shutil
import signal
import subprocess
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PACKAGE = str(Path(__file__).parent.parent)
RECIPES = str(Path(PACKAGE) / "recipes")  # written as a user would
LIBRARIES = (sysconfig.get_path("stdlib"), "site-packages", "dist-packages", "<frozen", "<string>")
SECONDS_TO_ANSWER = 5.0
SECONDS_WITHOUT_MORE = 0.3  # a process that is kept from its core may pause within its answer
FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?),? in (?P<function>.*)$')


def stack_signal() -> int:
    """A real-time signal: USR1 and USR2 belong to schedulers and to users."""
    return getattr(signal, "SIGRTMIN", 34) + 7


@dataclass(frozen=True)
class Frame:
    """One call, as in a traceback."""

    function: str
    file: str
    line: int

    @property
    def source(self) -> str:
        """The line of code, or "" where the file is not here."""
        return linecache.getline(self.file, self.line).strip()

    @property
    def is_own(self) -> bool:
        return self.file.startswith(PACKAGE + os.sep) and not self.file.startswith(RECIPES)

    @property
    def is_library(self) -> bool:
        return any(part in self.file for part in LIBRARIES)

    def __str__(self) -> str:
        return f"{self.function}(), {Path(self.file).name}:{self.line}"


Stack = Sequence[Frame]  # innermost call first


def users_frame(stack: Stack) -> Frame | None:
    """Innermost frame of the user's own code; else of this package; else the innermost of all."""
    own = next((f for f in stack if f.is_own), None)
    users = next((f for f in stack if not f.is_own and not f.is_library), None)
    return users or own or (stack[0] if stack else None)


def answer_with_stack(file: Path) -> None:
    """Write this process's stacks to the end of `file` at each `stack_signal()`, and when it
    crashes.
    """
    answer_into(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))


def answer_into(target: int) -> None:
    if not faulthandler.is_enabled():  # else the user wants to see crashes, on stderr
        faulthandler.enable(target, all_threads=True)
    faulthandler.register(stack_signal(), target, all_threads=True, chain=False)


def stacks_of(pid: int, file: Path) -> list[Stack]:
    """The threads of a process that answers into `file`, main thread first; [] where it gives no
    answer.
    """
    return _from_outside(pid) or _from_itself(pid, file)


def _from_itself(pid: int, file: Path) -> list[Stack]:
    if not catches(pid, stack_signal()):  # the signal would end it
        return []
    try:
        before = file.stat().st_size
        os.kill(pid, stack_signal())
    except OSError:
        return []
    deadline, size, quiet = time.monotonic() + SECONDS_TO_ANSWER, before, 0.0
    while time.monotonic() < deadline and not (size > before and quiet >= SECONDS_WITHOUT_MORE):
        time.sleep(0.02)
        quiet = quiet + 0.02 if file.stat().st_size == size else 0.0
        size = file.stat().st_size
    with file.open(encoding="utf-8") as opened:
        opened.seek(before)
        return parse(opened.read())


def last_words(file: Path) -> list[Stack]:
    """Where a process was when compiled code aborted it, main thread first; [] where that is not
    how it ended.
    """
    try:
        _, crashed, text = file.read_text(encoding="utf-8").rpartition(
            "Fatal Python error: Aborted\n"
        )
    except OSError:
        return []
    return parse(text) if crashed else []


def raised_at(trace: str) -> list[Stack]:
    """The stack of a traceback, as an exception's text has it."""
    found = (FRAME.match(line) for line in trace.splitlines())
    stack = [
        Frame(f["function"], f["file"], int(f["line"])) for f in found if f and f["line"].isdigit()
    ]
    return [stack[::-1]] if stack else []


def parse(text: str) -> list[Stack]:
    """faulthandler's text as stacks, main thread first: it lists the newest thread first."""
    threads: list[list[Frame]] = []
    for line in text.splitlines():
        if line.startswith(("Thread ", "Current thread ")):
            threads.append([])
        elif (found := FRAME.match(line)) and threads:
            number = found["line"]
            threads[-1].append(
                Frame(found["function"], found["file"], int(number) if number.isdigit() else 0)
            )
    return list(reversed(threads))


def _from_outside(pid: int) -> list[Stack]:
    if not shutil.which("py-spy"):
        return []
    command = ["py-spy", "dump", "--json", "--nonblocking", "--pid", str(pid)]
    try:
        said = subprocess.run(
            command, capture_output=True, text=True, timeout=10, check=True
        ).stdout
        return parse_py_spy(said, pid)
    except (OSError, subprocess.SubprocessError, ValueError):
        return []  # not allowed to look (ptrace), or a Python that it does not know


def parse_py_spy(text: str, pid: int) -> list[Stack]:
    """`py-spy dump --json` as stacks, main thread first: that is the one whose number is the
    process's.
    """
    threads = sorted(json.loads(text), key=lambda thread: thread.get("os_thread_id") != pid)
    return [
        [
            Frame(f["name"].rpartition(".")[2], f["filename"], f["line"]) for f in thread["frames"]
        ]  # not Class.name
        for thread in threads
    ]


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for this signal."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    found = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return bool(found and int(found.group(1), 16) >> (number - 1) & 1)
