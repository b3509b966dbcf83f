"""A test in one of the processes that run it: what a fork of the server does."""

from __future__ import annotations

import os
import pickle
import signal
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from _pytest.runner import runtestprotocol

from stepladder.core.errors import DONE
from stepladder.core.world import World
from stepladder.launcher.script import prepare_groups
from stepladder.train.comm import Comm
from stepladder.train.process_group import process_group
from stepladder_exchange.process_group import SharedMemoryGroup

# The server ends a test in time, and then asks each rank where it waits. A rank whose collective
# had failed by then, or while another one is in the debugger, would answer with pytest's code.
GROUP_TIMEOUT = timedelta(days=1)


@dataclass(frozen=True)
class RankTest:
    """A test on a number of processes.

    Args:
        item: The test.
        files: For each process, the file that it writes its reports to.
        store: The file by which they find each other.
        timeout: Seconds after which the processes are ended.
        exchange: How they exchange tensors: memory or gloo.
        group: Whether they form a process group before the test.
    """

    item: pytest.Item
    files: tuple[Path, ...]
    store: Path
    timeout: float = 60.0
    exchange: str = "memory"
    group: bool = True


@contextmanager
def open_comm() -> Iterator[Comm]:
    """Yield the collectives of this test's processes."""
    with process_group(device=torch.device("cpu")) as comm:
        yield comm


class Terminal:
    """What the debugger of `--pdb` needs: stdin, for the first process that fails."""

    def __init__(self) -> None:
        self._stdin = os.dup(0)
        self._token, token_writer = os.pipe()
        os.set_blocking(self._token, False)
        os.write(token_writer, b".")

    def attach(self) -> None:
        """Give this process the stdin that its start as a rank has taken away."""
        os.dup2(self._stdin, 0)
        sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)

    def take(self) -> bool:
        """Return whether this process is the first that asks."""
        with suppress(BlockingIOError):
            return bool(os.read(self._token, 1))
        return False


class _FailureWatch:
    """Keeps the first error of the test, and opens the debugger in one process alone."""

    def __init__(self, config: pytest.Config, terminal: Terminal | None) -> None:
        self.error: BaseException | None = None
        # Whether another process has the debugger, and this one must not end it.
        self.is_second = False
        self._config = config
        self._terminal = terminal

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Watch the report of each part of the test."""
        report = yield
        is_first = self.error is None and call.excinfo is not None
        if is_first and (report.failed or hasattr(report, "wasxfail")):
            assert call.excinfo is not None
            self.error = call.excinfo.value
            if self._terminal is not None and not self._terminal.take():
                self.is_second = True
                self._config.pluginmanager.unregister(name="pdbinvoke")
        return report


def run_test(test: RankTest, terminal: Terminal | None) -> int:
    """Run the test in this process, which was just forked, and write its reports.

    Args:
        test: The test.
        terminal: The terminal of the debugger, None if there is none.

    Returns:
        The exit code of a process that another one must not wait for.
    """
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stderr = sys.__stderr__
    rank = World.detect().rank
    config = test.item.config
    if terminal is not None:
        terminal.attach()
    config.pluginmanager.getplugin("capturemanager").start_global_capturing()
    watch = _FailureWatch(config, terminal)
    config.pluginmanager.register(watch)
    torch.set_num_threads(1)
    prepare_groups(lambda: SharedMemoryGroup)
    if test.group:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{test.store}",
            rank=rank,
            world_size=len(test.files),
            timeout=GROUP_TIMEOUT,
        )
        dist.barrier()  # a rank that ends while another one still connects would fail that one
    reports = runtestprotocol(test.item, log=False, nextitem=None)
    _save_coverage()
    to_serializable = config.hook.pytest_report_to_serializable
    records = [to_serializable(config=config, report=report) for report in reports]
    test.files[rank].write_bytes(pickle.dumps(records))
    if watch.error is not None and not watch.is_second:
        raise watch.error  # the launcher judges by it which rank was the cause
    return DONE


def _save_coverage() -> None:
    """Write what a running measurement by coverage has seen in this process."""
    coverage = sys.modules.get("coverage")
    measurement = coverage.Coverage.current() if coverage else None
    if measurement is not None:
        measurement.stop()
        measurement.save()
