"""The Python stacks of a process: the process itself writes them to a file when it gets a signal.

faulthandler writes from the signal handler, so a rank still answers while it waits in a collective,
or while compiled code holds the GIL. Forked workers (DataLoader's) inherit the handler and the
file. py-spy, if it is installed and permitted, reads a process from outside; it also works for a
process that is stopped.
"""

from __future__ import annotations

import faulthandler
import json
import linecache
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from stepladder.core.tracebacks import OWN_PREFIXES, RECIPES_PREFIX
from stepladder_exchange.call_frame import CallFrame, add_library, is_library_file

STACK_TIMEOUT_S = 5.0
STACK_POLL_S = 0.02
STACK_QUIET_S = 0.3  # a process that gets no CPU core may pause in the middle of its answer
PY_SPY_TIMEOUT_S = 10
FRAME_LINE = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?),? in (?P<function>.*)$')
ABORT_TEXT = "Fatal Python error: Aborted\n"


def get_stack_signal() -> int:
    """Return the signal on which a process writes its stacks.

    It is a real-time signal, since schedulers and users have their own uses of USR1 and USR2.
    """
    return getattr(signal, "SIGRTMIN", 34) + 7


def _is_stepladder_file(file: str) -> bool:
    """Return whether a file belongs to this package, and not to its recipes, or to the exchange."""
    return file.startswith(OWN_PREFIXES) and not file.startswith(RECIPES_PREFIX)


add_library(_is_stepladder_file)


@dataclass(frozen=True)
class Frame(CallFrame):
    """One call, and whose code it is."""

    @property
    def source(self) -> str:
        """The line of code, or "" if the file is not on this machine."""
        return linecache.getline(self.file, self.line).strip()

    @property
    def is_stepladder(self) -> bool:
        """Whether the file belongs to this package, and not to its recipes, or to the exchange."""
        return _is_stepladder_file(self.file)

    @property
    def is_library(self) -> bool:
        """Whether the file belongs to Python or to an installed package."""
        return is_library_file(self.file)

    @property
    def is_users(self) -> bool:
        """Whether the file belongs to neither this package nor a library."""
        return not self.is_stepladder and not self.is_library


Stack = Sequence[Frame]  # innermost call first


def walk_stack(frame: FrameType | None) -> list[Frame]:
    """Return a frame of this process and the calls around it, the innermost first."""
    stack = []
    while frame is not None:
        code = frame.f_code
        stack.append(Frame(code.co_name, code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return stack


def find_user_frame(stack: Stack) -> Frame | None:
    """Return the innermost frame of the user's code, else of this package, else of all."""
    for frame in stack:
        if frame.is_users:
            return frame
    for frame in stack:
        if frame.is_stepladder:
            return frame
    return stack[0] if stack else None


def answer_stack_signal(file: Path) -> None:
    """Append this process's stacks to a file at each stack signal, and when it crashes."""
    answer_stack_signal_into(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))


def answer_stack_signal_into(descriptor: int) -> None:
    """Write this process's stacks into an open file at each stack signal, and when it crashes."""
    if not faulthandler.is_enabled():  # if it is, the user wants to see crashes on stderr
        faulthandler.enable(descriptor, all_threads=True)
    # This handler sets errno to 0. One that chains restores it, but interrupts system calls.
    faulthandler.register(get_stack_signal(), descriptor, all_threads=True, chain=False)


def read_stacks(pid: int, file: Path) -> list[Stack]:
    """Return the stacks of a process's threads, main thread first.

    Args:
        pid: The process.
        file: The file into which it writes its stacks.

    Returns:
        The stacks; none if the process does not answer.
    """
    return _run_py_spy(pid) or _request_stacks(pid, file)


def _request_stacks(pid: int, file: Path) -> list[Stack]:
    """Return the stacks that a process writes on the stack signal."""
    if not handles_signal(pid, get_stack_signal()):  # without a handler the signal would kill it
        return []
    try:
        old_size = file.stat().st_size
        os.kill(pid, get_stack_signal())
    except OSError:
        return []
    _wait_for_answer(file, old_size)
    with file.open(encoding="utf-8") as opened:
        opened.seek(old_size)
        return parse_faulthandler(opened.read())


def _wait_for_answer(file: Path, old_size: int) -> None:
    """Wait until a file has grown and then kept its size for STACK_QUIET_S."""
    deadline = time.monotonic() + STACK_TIMEOUT_S
    size = old_size
    quiet_s = 0.0
    while time.monotonic() < deadline:
        if size > old_size and quiet_s >= STACK_QUIET_S:
            return
        time.sleep(STACK_POLL_S)
        new_size = file.stat().st_size
        quiet_s = quiet_s + STACK_POLL_S if new_size == size else 0.0
        size = new_size


def read_abort_stacks(file: Path) -> list[Stack]:
    """Return the stacks of a process that compiled code has aborted, main thread first.

    Args:
        file: The file into which the process wrote its stacks.

    Returns:
        The stacks; none if the process ended in another way.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except OSError:
        return []
    _, abort_text, stacks_text = text.rpartition(ABORT_TEXT)
    return parse_faulthandler(stacks_text) if abort_text else []


def parse_traceback(trace: str) -> list[Stack]:
    """Return the stack in the text of a traceback, or nothing."""
    frames = []
    for line in trace.splitlines():
        match = FRAME_LINE.match(line)
        if match and match["line"].isdigit():
            frames.append(Frame(match["function"], match["file"], int(match["line"])))
    return [frames[::-1]] if frames else []


def parse_faulthandler(text: str) -> list[Stack]:
    """Return the stacks in faulthandler's text, main thread first.

    faulthandler lists the newest thread first, so its order is reversed.
    """
    threads: list[list[Frame]] = []
    for line in text.splitlines():
        if line.startswith(("Thread ", "Current thread ")):
            threads.append([])
            continue
        match = FRAME_LINE.match(line)
        if match and threads:
            line_number = int(match["line"]) if match["line"].isdigit() else 0
            threads[-1].append(Frame(match["function"], match["file"], line_number))
    return list(reversed(threads))


def _run_py_spy(pid: int) -> list[Stack]:
    """Return the stacks that py-spy reads from outside, or none."""
    if not shutil.which("py-spy"):
        return []
    command = ["py-spy", "dump", "--json", "--nonblocking", "--pid", str(pid)]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=PY_SPY_TIMEOUT_S, check=True
        )
        return parse_py_spy(result.stdout, pid)
    # py-spy may not read the process (ptrace is forbidden), or does not know this Python version.

    except (OSError, subprocess.SubprocessError, ValueError):
        return []


def parse_py_spy(text: str, pid: int) -> list[Stack]:
    """Return the stacks in the output of `py-spy dump --json`, main thread first.

    The main thread is the one whose thread id equals the process id.
    """
    threads = sorted(json.loads(text), key=lambda thread: thread.get("os_thread_id") != pid)
    return [[_parse_py_spy_frame(frame) for frame in thread["frames"]] for thread in threads]


def _parse_py_spy_frame(frame: dict[str, Any]) -> Frame:
    function = frame["name"].rpartition(".")[2]  # without the class
    return Frame(function, frame["filename"], frame["line"])


def handles_signal(pid: int, number: int) -> bool:
    """Tell whether a process has a handler for a signal."""
    return number in _read_signals(pid, "SigCgt")


def blocks_signal(pid: int, number: int) -> bool:
    """Tell whether the main thread of a process blocks a signal."""
    return number in _read_signals(pid, "SigBlk")


def _read_signals(pid: int, name: str) -> set[int]:
    """Return a set of signals of a process by its name in proc(5); no signals if it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return set()
    match = re.search(rf"^{name}:\s*([0-9a-f]+)$", status, re.MULTILINE)
    mask = int(match.group(1), 16) if match else 0
    return {number for number in signal.valid_signals() if mask >> (number - 1) & 1}
