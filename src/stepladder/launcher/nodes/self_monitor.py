"""Ranks that srun or torchrun started monitor themselves: none of our launchers watches them.

They share torch's store, where they exchange what each one is doing, and one rank prints for all.
A rank that holds the interpreter's lock in compiled code cannot answer there; another rank on the
same machine then asks it by signal, as a launcher does.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from stepladder.core.console import print_message, write_text
from stepladder.core.errors import make_readable
from stepladder.core.signing import ForgedError
from stepladder.core.waiting import wait_until
from stepladder.core.world import World
from stepladder.launcher.diagnose.hang import explain_hang
from stepladder.launcher.diagnose.inquiry import Inquiry
from stepladder.launcher.diagnose.rank_status import ProcessState, RankStatus
from stepladder.launcher.local.monitor import DEFAULT_EXPLAIN_AFTER_S, MONITOR_INTERVAL_S
from stepladder.launcher.local.process_stats import IdleKind, IdleMeter, is_stopped
from stepladder.launcher.nodes.local_node import SELF_MONITOR_THREAD_NAME
from stepladder.launcher.nodes.signed_board import SignedBoard
from stepladder.rank.error_record import RankError
from stepladder.rank.progress import LOCAL_SLOTS, PHASE, STEP, RankProgress
from stepladder.rank.stacks import (
    answer_stack_signal_into,
    parse_traceback,
    read_stacks,
    walk_stack,
)

EXIT_NOTICE_TIMEOUT_S = 3.0  # to read that a rank has exited, before the store may be gone
EXIT_NOTICE_POLL_INTERVAL_S = 0.05
STORE_CONNECT_TIMEOUT_S = 5
STORE_READ_TIMEOUT_S = 30
STOP_TIMEOUT_S = 5.0


def start_self_monitor(world: World, explain_after: float | None) -> SelfMonitor:
    """Monitor this rank in a thread from now on.

    The thread has work when the main thread waits, and then the interpreter's lock is free.

    Args:
        world: The processes of the run.
        explain_after: Seconds without progress until the reason is printed; None for the default.

    Returns:
        The monitor, whose thread runs on Linux only.
    """
    stack_file = os.memfd_create("stacks") if sys.platform == "linux" else -1
    if explain_after is None:
        explain_after = DEFAULT_EXPLAIN_AFTER_S
    monitor = SelfMonitor(world, explain_after, stack_file)
    if stack_file >= 0:
        answer_stack_signal_into(stack_file)
        thread = threading.Thread(target=monitor.run, name=SELF_MONITOR_THREAD_NAME, daemon=True)
        atexit.register(monitor.stop, thread)
        thread.start()
    return monitor


class SelfMonitor:
    """The monitor of one rank, in its own process."""

    def __init__(self, world: World, explain_after: float, stack_file: int) -> None:
        """Set up the monitor.

        Args:
            world: The processes of the run.
            explain_after: Seconds without progress until the reason is printed.
            stack_file: Descriptor of the file into which this process writes its stack on a signal.
        """
        self.world = world
        # The id of this process.
        self.pid = os.getpid()
        # The name of this machine.
        self.host = socket.gethostname()
        # How long this process has been idle.
        self.meter = IdleMeter()
        # Values that the ranks exchange, once the store is open.
        self.board: SignedBoard | None = None
        self._polls_until_explained = explain_after / MONITOR_INTERVAL_S
        self._contact = json.dumps([self.host, self.pid, stack_file])
        # Context switches of this process when its wait was last reported.
        self._reported_switches = (-1, -1)
        self._has_connected = False
        self._waiting_since = 0.0
        self._stopping = threading.Event()

    def stop(self, thread: threading.Thread) -> None:
        """Stop polling, and wait for the thread, before the interpreter is finalized.

        Python ends a daemon thread that then returns from compiled code. It does so by unwinding
        the thread's stack, and C++ answers that in the store's code with abort().

        Args:
            thread: The monitor's thread.
        """
        self._stopping.set()
        thread.join(STOP_TIMEOUT_S)

    def run(self) -> None:
        """Poll until the process ends."""
        # The store is gone, or holds rubbish.
        with suppress(RuntimeError, OSError, ValueError, ForgedError):
            store = self._open_store()
            if store is None:
                return
            # The ranks share no secret: what they exchange is text, and is never run.
            board = SignedBoard(store, "stepladder/self-watch", "")
            self.board = board
            board.write(f"who-{self.world.rank}", self._contact)
            atexit.register(self._report_exit, board)
            inquiry = Inquiry(board, self.world.rank, self.world.world_size)
            while not self._stopping.wait(MONITOR_INTERVAL_S):
                self.meter.poll(self.pid)
                answers = inquiry.poll(self._is_waiting(), self._inspect_ranks)
                if answers is not None:
                    ranks = [rank for reply in answers.values() for rank in reply]
                    self._print_explanation(board, ranks)

    def _open_store(self) -> Any:
        """Open the ranks' store, once it is served and the main thread has imported torch.

        An import of torch here would delay the main thread.

        Returns:
            The store of the process group; None if the process exits before there is one.
        """
        host, port = self.world.endpoint
        timeout = timedelta(seconds=STORE_READ_TIMEOUT_S)
        while not self._stopping.wait(MONITOR_INTERVAL_S):
            torch = sys.modules.get("torch.distributed")
            if torch is None or not hasattr(torch, "is_initialized"):
                continue
            with suppress(OSError):
                socket.create_connection((host, port), STORE_CONNECT_TIMEOUT_S).close()
                return torch.TCPStore(host, port, None, False, timeout, False)
        return None

    def _is_waiting(self) -> bool:
        """Return whether this rank waits for others in a wait that was not reported yet."""
        is_asleep = self.meter.count(IdleKind.ASLEEP) >= self._polls_until_explained
        if is_asleep and self.meter.context_switches != self._reported_switches:
            return self._inspect().is_waiting
        if (
            self.meter.count(IdleKind.IDLE) >= self._polls_until_explained
            and not self._has_connected
        ):
            self._has_connected = self._inspect().is_connecting
            return self._has_connected
        return False

    def _inspect_ranks(self) -> Sequence[RankStatus]:
        """Return the state of this rank, and remember its wait as reported."""
        self._reported_switches = self.meter.context_switches
        polls = self.meter.max_count
        self._waiting_since = time.monotonic() - polls * MONITOR_INTERVAL_S
        return [self._inspect()]

    def _inspect(self) -> RankStatus:
        """Return the state of this rank, with the stacks of its threads, the main one first."""
        monitor_thread = threading.get_ident()
        main_thread = threading.main_thread().ident
        frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != main_thread)
        stacks = [walk_stack(frame) for thread, frame in frames if thread != monitor_thread]
        progress = _read_own_progress()
        return RankStatus(
            self.world.rank, self.pid, ProcessState.RUNNING, progress, stacks, host=self.host
        )

    def _report_exit(self, board: SignedBoard) -> None:
        """Tell the other ranks that this one exits without an error.

        The first rank, which serves the store, gives the others time to read that.
        """
        if hasattr(sys, "last_value"):
            return
        with suppress(RuntimeError, ForgedError):
            board.write(f"left-{self.world.rank}", str(LOCAL_SLOTS[STEP]))
            if self.world.is_first:
                wait_until(
                    lambda: len(self._find_exited(board)) >= self.world.world_size,
                    EXIT_NOTICE_TIMEOUT_S,
                )

    def _find_exited(self, board: SignedBoard) -> list[int]:
        return [rank for rank in range(self.world.world_size) if board.has(f"left-{rank}")]

    def reports_early_exit(self, error: RankError) -> bool:
        """Find out whether this rank failed because another one exited well.

        The first rank that finds it out prints it.

        Args:
            error: The failure of this rank.

        Returns:
            True if so.
        """
        if self.board is None or not error.is_consequence:
            return False
        with suppress(RuntimeError, ForgedError):
            exited = wait_until(partial(self._find_exited, self.board), EXIT_NOTICE_TIMEOUT_S)
            if exited:
                self._print_early_exit(self.board, error, exited)
                return True
        return False

    def _print_early_exit(self, board: SignedBoard, error: RankError, exited: list[int]) -> None:
        name = str(self.world.rank)
        if board.write_if_absent("left", name) != name:
            return
        own_status = RankStatus(
            error.rank,
            self.pid,
            ProcessState.ENDED,
            _read_own_progress(),
            parse_traceback(error.trace),
            host=self.host,
        )
        explanation = explain_hang(
            [own_status, *(self._inspect_peer(board, rank) for rank in exited)]
        )
        # torch puts `[rank0]:` before what goes to sys.stderr.
        write_text(f"stepladder: {explanation.with_cause}", sys.__stderr__)

    def _print_explanation(self, board: SignedBoard, ranks: list[RankStatus]) -> None:
        """Print why ranks wait.

        Args:
            board: Values that the ranks exchange.
            ranks: The ranks that have answered.
        """
        if (
            self.meter.context_switches != self._reported_switches
            and not self._inspect().is_connecting
        ):
            return  # the rank that this one waited for was only slow to start
        answered = {rank.rank for rank in ranks}
        silent = [rank for rank in range(self.world.world_size) if rank not in answered]
        ranks = ranks + [self._inspect_peer(board, rank) for rank in silent]
        explanation = explain_hang(sorted(ranks, key=lambda rank: rank.rank))
        waited = time.monotonic() - self._waiting_since
        print_message(explanation.format_report("other ranks have waited", waited))

    def _inspect_peer(self, board: SignedBoard, rank: int) -> RankStatus:
        """Return the state of a rank that has not answered."""
        if board.has(f"left-{rank}"):
            return RankStatus(
                rank, 0, ProcessState.DONE, RankProgress(step=int(board.read(f"left-{rank}")))
            )
        if not board.has(f"who-{rank}"):
            return RankStatus(rank, 0, ProcessState.SILENT)
        name, number, file = json.loads(board.read(f"who-{rank}"))
        host = make_readable(name)
        pid = int(number)
        if host != self.host:
            return RankStatus(rank, pid, ProcessState.SILENT, host=host)
        if not Path(f"/proc/{pid}").exists():
            return RankStatus(rank, pid, ProcessState.ENDED, host=host)
        stacks = read_stacks(pid, Path(f"/proc/{pid}/fd/{int(file)}"))
        state = ProcessState.RUNNING if stacks else ProcessState.SILENT
        if is_stopped(pid):
            state = ProcessState.STOPPED
        return RankStatus(rank, pid, state, threads=stacks, host=host)


def _read_own_progress() -> RankProgress:
    """Return the step and the phase of this process."""
    return RankProgress(step=LOCAL_SLOTS[STEP], phase=LOCAL_SLOTS[PHASE])
