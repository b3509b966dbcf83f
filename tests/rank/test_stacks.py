"""Stacks of other processes: asked for, and read from what faulthandler and py-spy write."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from processes import wait_until
from stepladder.launcher.local.process_stats import find_children
from stepladder.rank import stacks
from stepladder.rank.stacks import (
    Frame,
    find_user_frame,
    get_stack_signal,
    handles_signal,
    parse_faulthandler,
    parse_py_spy,
    parse_traceback,
    read_abort_stacks,
)
from stepladder_exchange.call_frame import LIBRARY_PARTS

SCRIPT = """\
import os, sys, time
from pathlib import Path
from stepladder.rank.stacks import answer_stack_signal
answer_stack_signal(Path(sys.argv[1]))
def worker():
    time.sleep(100)
def trainer():
    time.sleep(100)
if os.fork() == 0:
    worker()
trainer()
"""


@pytest.fixture
def answering(tmp_path: Path) -> Iterator[tuple[int, Path]]:
    """A process with a forked child; both answer into one file."""
    (tmp_path / "job.py").write_text(SCRIPT)
    file = tmp_path / "stacks"
    process = subprocess.Popen([sys.executable, tmp_path / "job.py", file], start_new_session=True)
    wait_until(
        lambda: (
            find_children(process.pid)
            and handles_signal(find_children(process.pid)[0], get_stack_signal())
        )
    )
    yield process.pid, file
    for child in find_children(process.pid):
        os.kill(child, signal.SIGKILL)
    process.kill()
    process.wait()


def functions(pid: int, file: Path) -> list[str]:
    return [frame.function for stack in stacks._request_stacks(pid, file) for frame in stack]


def test_a_process_and_its_forked_worker_say_where_they_are(answering: tuple[int, Path]) -> None:
    pid, file = answering
    wait_until(lambda: functions(pid, file) == ["trainer", "<module>"])
    wait_until(lambda: functions(find_children(pid)[0], file) == ["worker", "<module>"])
    (stack,) = stacks._request_stacks(pid, file)
    assert stack[0].source == "time.sleep(100)" and str(stack[0]) == "trainer(), job.py:8"


def test_a_process_without_the_handler_is_not_asked(tmp_path: Path) -> None:
    """The signal would end it."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    assert stacks._request_stacks(process.pid, tmp_path / "stacks") == []
    assert process.poll() is None
    process.kill()
    process.wait()
    assert stacks._request_stacks(process.pid, tmp_path / "stacks") == []


def test_faulthandler_s_text_is_read_main_thread_first() -> None:
    text = (
        'Thread 0x00007f1 [reader] (most recent call first):\n  File "/a/b.py", line 5 in read\n\n'
        'Current thread 0x00007f2 (most recent call first):\n  File "/a/job.py", line 33 in loss\n'
        '  File "/a/job.py", line ??? in <module>\n'
    )
    assert parse_faulthandler(text) == [
        [Frame("loss", "/a/job.py", 33), Frame("<module>", "/a/job.py", 0)],
        [Frame("read", "/a/b.py", 5)],
    ]


def test_a_process_that_is_aborted_leaves_its_last_words(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(
        SCRIPT.partition("def worker")[0] + "def reduce():\n    os.abort()\nreduce()\n"
    )
    file = tmp_path / "stacks"
    assert read_abort_stacks(file) == []
    done = subprocess.run(
        [sys.executable, tmp_path / "job.py", file], capture_output=True, check=False
    )
    assert done.returncode == -6
    assert [str(frame) for frame in read_abort_stacks(file)[0]] == [
        "reduce(), job.py:6",
        "<module>(), job.py:7",
    ]


def test_a_traceback_is_read_as_a_stack_innermost_first() -> None:
    trace = 'Traceback (most recent call last):\n  File "/a/job.py", line 3, in main\n    loss()\n    ~~~~^^\n'
    trace += '  File "/a/job.py", line 7, in loss\n    raise RuntimeError\nRuntimeError: lost\n'
    assert parse_traceback(trace) == [
        [Frame("loss", "/a/job.py", 7), Frame("main", "/a/job.py", 3)]
    ]
    assert parse_traceback("") == []


def test_py_spy_s_json_is_read_main_thread_first() -> None:
    def thread(number: int, name: str) -> dict[str, object]:
        return {
            "os_thread_id": number,
            "frames": [{"name": name, "filename": "/a/job.py", "line": 2}],
        }

    threads = parse_py_spy(json.dumps([thread(78, "read"), thread(77, "build.<locals>.loss")]), 77)
    assert threads == [[Frame("loss", "/a/job.py", 2)], [Frame("read", "/a/job.py", 2)]]


def test_the_frame_that_counts_is_the_user_s() -> None:
    library = Frame("wait", f"{LIBRARY_PARTS[0]}/threading.py", 300)
    package_frame = Frame("step", f"{stacks.OWN_PREFIXES[0]}trainer.py", 20)
    exchange_frame = Frame("wait", f"{stacks.OWN_PREFIXES[1]}wait.py", 20)
    users = Frame("loss", "/home/me/job.py", 3)
    recipe = Frame("loss", f"{stacks.RECIPES_PREFIX}mnist.py", 3)
    assert find_user_frame([library, users, package_frame]) == users
    assert find_user_frame([library, recipe, package_frame]) == recipe
    assert find_user_frame([library, package_frame]) == package_frame
    assert find_user_frame([library, exchange_frame]) == exchange_frame
    assert find_user_frame([library]) == library
    assert find_user_frame([]) is None
