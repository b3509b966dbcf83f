"""Waits inside torch can be left, and a process that has left one ends as it should."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepladder.core.errors import InputError
from stepladder.launcher.nodes.launch import open_or_find_store
from stepladder.launcher.nodes.local_node import exit_if_threads_wait, wait_interruptibly
from stepladder.launcher.options import RendezvousSpec


def nothing() -> None:
    pass


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What a thread of the test waits for; open at the test's end."""
    gate = threading.Event()
    yield gate
    gate.set()


def test_what_was_waited_for_comes_back(gate: threading.Event) -> None:
    assert wait_interruptibly(lambda: 3, nothing) == 3
    assert wait_interruptibly(gate.wait, gate.set)  # the check is called meanwhile
    with pytest.raises(KeyError, match="inside"):
        wait_interruptibly(lambda: {}["inside"], nothing)


def test_the_check_ends_the_wait(gate: threading.Event) -> None:
    def check() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        wait_interruptibly(gate.wait, check)


def test_a_process_with_nothing_to_wait_for_goes_on() -> None:
    assert exit_if_threads_wait(75) == 75


def test_a_process_that_has_left_a_wait_ends_with_its_code_and_in_order(tmp_path: Path) -> None:
    """A thread in torch that came back while the interpreter ends would abort it."""
    program = f"""
import atexit, sys, time
from pathlib import Path
from stepladder.launcher.nodes.local_node import exit_if_threads_wait, wait_interruptibly

def check():
    raise InterruptedError

atexit.register(lambda: Path({str(tmp_path / "done")!r}).touch())
try:
    wait_interruptibly(lambda: time.sleep(1000), check)
except InterruptedError:
    exit_if_threads_wait(75)
sys.exit("not reached")
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 75
    assert (tmp_path / "done").exists()


@pytest.mark.slow
def test_a_port_where_something_else_answers_is_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would wait for its words, here for 1 s."""
    monkeypatch.setattr("stepladder.launcher.nodes.launch.STORE_TIMEOUT_S", 1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        spec = RendezvousSpec("c10d", "127.0.0.1", port, "job", (2, 2), "127.0.0.1", 10.0, 0, {})
        with pytest.raises(
            InputError, match=f"port {port} of 127.0.0.1 is in use by something else"
        ):
            open_or_find_store(spec)


def test_where_nobody_answers_is_bad_input() -> None:
    spec = RendezvousSpec(
        "c10d", "127.0.0.1", 9, "job", (2, 2), "127.0.0.1", 0.2, 0, {"is_host": "0"}
    )
    with pytest.raises(InputError, match=r"no rendezvous answered at 127\.0\.0\.1:9 within 0\.2 s"):
        open_or_find_store(spec)
