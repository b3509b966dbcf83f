"""Tests leave nothing behind: no process, thread, file outside tmp_path, or environment variable."""

from __future__ import annotations

import atexit
import gc
import multiprocessing.forkserver
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import hypothesis.configuration
import psutil
import pytest
from xdist.scheduler import LoadFileScheduling

REPOSITORY = Path(__file__).parent.parent
SHARED_MNIST = REPOSITORY.parent / "shared" / "data" / "mnist"
sys.path.insert(0, str(Path(__file__).parent))  # `from ranks import run_ranks`, in ranks too

from labs import TestLab, lab_up  # noqa: E402
from processes import run  # noqa: E402
from warm import SERVERS  # noqa: E402

pytest_plugins = ["skipped", "cases"]

# With it a line and its end are two writes, and lines of processes that share a stream run into
# each other.
os.environ.pop("PYTHONUNBUFFERED", None)

# With it every process that a test starts compiles the source anew: 0.3 s of work.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Before torch is loaded, as `stepladder train` has it. Else its threads, waiting for each other,
# take the cores from all else: tests of the trainer took three times as long.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")

# Snapshots and ledgers wait for the disk until they are there for good. In memory that takes no
# time.
MEMORY = Path("/dev/shm")
if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 4 << 30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))
os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())

# `train` remembers job files there. A test has no business in the home folder of the person who
# runs it. Temporary files are there too: torchrun, and torch's spawn, leave theirs behind.
if (
    "PYTEST_XDIST_WORKER" not in os.environ
):  # a worker has the folder of the process that started it
    SESSION = Path(tempfile.mkdtemp(prefix="tests-"))  # sockets have names of 100 letters at most
    atexit.register(shutil.rmtree, SESSION, ignore_errors=True)
    os.environ["XDG_STATE_HOME"] = str(SESSION / "state")
    os.environ["TMPDIR"] = str(SESSION)
    tempfile.tempdir = str(SESSION)  # in place of what was found above

# A shell that runs the tests in the background has them ignore Ctrl-C, and all that they start;
# `nohup` SIGHUP.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


gc.disable()  # until the tests are found, which then takes a sixth less

# The same examples in every run, on machines of any speed.
hypothesis.settings.register_profile(
    "the same everywhere", derandomize=True, deadline=None, database=None
)
hypothesis.settings.load_profile("the same everywhere")
hypothesis.configuration.set_hypothesis_home_dir(
    Path(__file__).parent / "__pycache__" / "hypothesis"
)


APART = (
    "tests/lessons/",
    "tests/docs/test_docs.py",
)  # long tests, of which each prepares all that it needs


class ByFile(LoadFileScheduling):
    """xdist's workers take whole files, those with most tests first.

    What needs a Slurm cluster goes to two workers: that of Slurm's own room, and that of all
    others. Tests of files that are APART come last, one by one, to whichever worker is free.
    xdist's own groups of tests need a pytest older than 9.1."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        room = "of Slurm" if "slurm/" in file else "of others"
        if file.endswith("_lab.py"):
            return f"the lab {room}"
        return nodeid if file.startswith(APART) else file


def pytest_collection_finish() -> None:
    """Collect garbage again, but never look through what pytest has made for thousands of tests."""
    gc.freeze()
    gc.enable()


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    return ByFile(config, log)


def pytest_sessionfinish() -> None:
    multiprocessing.forkserver._forkserver._stop()
    for server in list(SERVERS):
        server.stop()


HASH_SEED = "PYTHONHASHSEED"
PERMANENT = ("fsspecIO", "asyncio_")  # fsspec's loop, which a process has once


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fails the test that leaks."""
    environment = _environment()
    threads = set(threading.enumerate())
    folder = set(Path.cwd().iterdir())
    processes = _children()  # of the session, as the one that ranks are forked from
    yield
    if HASH_SEED not in environment:
        os.environ.pop(HASH_SEED, None)  # `train` sets it, for the processes that it starts
    assert _environment() == environment, "the test changed environment variables"
    assert Path.cwd().is_dir() and set(Path.cwd().iterdir()) <= folder, (
        "the test left files in the current folder"
    )
    deadline = time.monotonic() + 30  # what ends by itself may take its time on a busy machine
    while (
        leftovers := (_children() - processes)
        | {
            thread
            for thread in set(threading.enumerate()) - threads
            if not thread.name.startswith(PERMANENT)
        }
    ) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not leftovers, f"the test left running: {leftovers}"


def _environment() -> dict[str, str]:
    ignored_names = (
        "PYTEST_CURRENT_TEST",
        "TORCHINDUCTOR_CACHE_DIR",
    )  # pytest's, and torch's at its first optimizer
    return {name: value for name, value in os.environ.items() if name not in ignored_names}


def _children() -> set[str]:
    """Our child processes, but for multiprocessing's own two, which live as long as the session."""
    servers = [server.pid for server in SERVERS if server.pid]
    own_processes = {
        multiprocessing.forkserver._forkserver._forkserver_pid,
        multiprocessing.resource_tracker._resource_tracker._pid,
        *servers,
    }
    subprocess._cleanup()  # type: ignore[attr-defined]  # what has ended, and nobody can wait for any more
    pids = [pid for parent in (os.getpid(), *servers) for pid in _children_of(parent)]
    return {_described(pid) for pid in pids if pid not in own_processes} - {""}


def _children_of(pid: int) -> list[int]:
    """The kernel's own list: psutil reads all processes for it, 2 ms after each of thousands of
    tests.
    """
    problems = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # a thread that has ended
            problems += map(int, path.read_text().split())
    return problems


def _described(pid: int) -> str:
    try:
        return str(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return ""


@pytest.fixture(scope="session")
def session_lab() -> Iterator[TestLab]:
    with lab_up("--nodes", 4, "--gpus", 2) as lab:
        yield lab


@pytest.fixture
def lab(session_lab: TestLab) -> Iterator[TestLab]:
    """A Slurm cluster of four nodes; whatever a test does to it is mended."""
    yield session_lab
    session_lab.restore()


@pytest.fixture
def short_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For TMPDIR: below tmp_path, whose name is the test's, the fork server's socket has too long a
    name.
    """
    return tmp_path_factory.mktemp("t")


@pytest.fixture
def mnist_dir() -> Path:
    """The real MNIST files, where this machine has them beside the checkout."""
    if not SHARED_MNIST.is_dir():
        pytest.skip(f"no MNIST files in {SHARED_MNIST}")
    return SHARED_MNIST


@pytest.fixture
def stepladder(tmp_path: Path) -> Any:
    """Run the command line in tmp_path as a user would; returns the finished process."""

    return lambda *args, **more: run(*args, cwd=tmp_path, **more)
