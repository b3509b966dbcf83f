"""Ranks that srun or torchrun has started have no launcher of ours: each looks at itself, and one
speaks for all.

They share torch's own store, where they meet. A rank that holds the interpreter's lock in compiled
code cannot answer there; one on the same machine then asks it by signal, as a launcher does."""

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
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

from stepladder.core.console import print_message, write_text
from stepladder.core.errors import make_readable
from stepladder.core.world import World
from stepladder.launcher.diagnose.hang import explain_hang
from stepladder.launcher.diagnose.inquiry import Inquiry
from stepladder.launcher.diagnose.rank_status import ProcessState, RankStatus
from stepladder.launcher.local.monitor import DEFAULT_EXPLAIN_AFTER_S, MONITOR_INTERVAL_S
from stepladder.launcher.local.process_stats import IdleKind, IdleMeter, is_stopped
from stepladder.launcher.nodes.own_node import WATCH
from stepladder.rank.error_record import RankError
from stepladder.rank.progress import LOCAL_SLOTS, PHASE, STEP, RankProgress
from stepladder.rank.stacks import Frame, Stack, dump_stacks_into, parse_traceback, read_stacks

SECONDS_TO_READ = 3.0  # what a rank that has left has told, before the store may go


def watch_itself(world: World, explain_after: float | None) -> SelfWatch:
    """From now on, in a thread: it has work where the main thread waits, and then nobody holds the
    lock.
    """
    stacks = os.memfd_create("stacks") if sys.platform == "linux" else -1
    watch = SelfWatch(
        world, DEFAULT_EXPLAIN_AFTER_S if explain_after is None else explain_after, stacks
    )
    if stacks < 0:
        return watch
    dump_stacks_into(stacks)
    threading.Thread(target=watch.run, name=WATCH, daemon=True).start()
    return watch


class StoreBoard:
    """What ranks tell each other in their store. Nothing of it is run: it is text."""

    def __init__(self, store: Any) -> None:
        self.store = store

    def write(self, key: str, text: str) -> None:
        self.store.set(key, text)

    def read(self, key: str) -> str:
        return bytes(self.store.get(key)).decode()

    def has(self, key: str) -> bool:
        return bool(self.store.check([key]))

    def write_if_absent(self, key: str, text: str) -> str:
        self.store.compare_set(key, "", text)
        return self.read(key)


class SelfWatch:
    """One rank's. stacks: the file into which this process writes its stack on a signal."""

    board: StoreBoard | None = None

    def __init__(self, world: World, explain_after: float, stacks: int) -> None:
        self.world, self.rest, self.pid, self.host = (
            world,
            IdleMeter(),
            os.getpid(),
            socket.gethostname(),
        )
        self.enough = explain_after / MONITOR_INTERVAL_S
        self.address = json.dumps([self.host, self.pid, stacks])
        self.told_of, self.has_met, self.waits_since = (-1, -1), False, 0.0

    def run(self) -> None:
        with suppress(RuntimeError, OSError, ValueError):  # the store has gone, or holds rubbish
            self.board = board = StoreBoard(self._join_store())
            board.write(f"who-{self.world.rank}", self.address)
            atexit.register(self._leave, board)
            inquiry = Inquiry(board, self.world.rank, self.world.world_size)
            while True:
                time.sleep(MONITOR_INTERVAL_S)
                self.rest.poll(self.pid)
                answers = inquiry.poll(self._waits(), self._own)
                if answers is not None:
                    self._say(board, [one for ranks in answers.values() for one in ranks])

    def _join_store(self) -> Any:
        """Waits until there is one, and torch: to import it here would be in the main thread's way."""
        where = urlsplit(self.world.init_method)
        host, port = where.hostname, where.port
        if self.world.init_method == "env://":
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        while True:
            time.sleep(MONITOR_INTERVAL_S)
            torch = sys.modules.get("torch.distributed")
            with suppress(OSError):
                if hasattr(torch, "is_initialized") and torch is not None:
                    socket.create_connection((host, port), 5).close()
                    store = torch.TCPStore(host, port, None, False, timedelta(seconds=30), False)
                    return torch.PrefixStore("stepladder/self-watch", store)

    def _waits(self) -> bool:
        """Whether this rank waits for others, and nobody has been told of this wait yet."""
        if (
            self.rest.count(IdleKind.ASLEEP) >= self.enough
            and self.rest.context_switches != self.told_of
        ):
            return self._rank().is_waiting
        if self.rest.count(IdleKind.IDLE) >= self.enough and not self.has_met:
            self.has_met = self._rank().is_connecting
            return self.has_met
        return False

    def _own(self) -> Sequence[RankStatus]:
        self.told_of = self.rest.context_switches
        self.waits_since = time.monotonic() - self.rest.max_count * MONITOR_INTERVAL_S
        return [self._rank()]

    def _rank(self) -> RankStatus:
        ours = threading.get_ident()
        main = threading.main_thread().ident
        threads = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)
        stacks = [stack_of(frame) for ident, frame in threads if ident != ours]
        return RankStatus(
            self.world.rank, self.pid, ProcessState.RUNNING, own_standing(), stacks, host=self.host
        )

    def _leave(self, board: StoreBoard) -> None:
        """An end that no error has brought about is told. The first rank takes the store with it."""
        if not hasattr(sys, "last_value"):
            with suppress(RuntimeError):
                board.write(f"left-{self.world.rank}", str(LOCAL_SLOTS[STEP]))
                end = time.monotonic() + SECONDS_TO_READ * self.world.is_first
                while len(self._left(board)) < self.world.world_size and time.monotonic() < end:
                    time.sleep(0.05)

    def _left(self, board: StoreBoard) -> list[int]:
        return [rank for rank in range(self.world.world_size) if board.has(f"left-{rank}")]

    def says_who_left(self, error: RankError) -> bool:
        """Whether this rank has lost one that ended well: then that is said, by the first that has."""
        with suppress(RuntimeError):
            end = time.monotonic() + SECONDS_TO_READ
            while self.board is not None and error.is_consequence and time.monotonic() < end:
                if left := self._left(self.board):
                    own = RankStatus(
                        error.rank,
                        self.pid,
                        ProcessState.ENDED,
                        own_standing(),
                        parse_traceback(error.trace),
                        host=self.host,
                    )
                    name = str(self.world.rank)
                    if self.board.write_if_absent("left", name) == name:
                        found = explain_hang(
                            [own, *(self._silent(self.board, rank) for rank in left)]
                        )
                        write_text(
                            f"stepladder: {found.with_cause}", sys.__stderr__
                        )  # torch puts `[rank0]:` before others
                    return True
                time.sleep(0.05)
        return False

    def _say(self, board: StoreBoard, ranks: list[RankStatus]) -> None:
        if self.rest.context_switches != self.told_of and not self._rank().is_connecting:
            return  # this rank goes on: the one it waited for was slow to start, and has come since
        silent = set(range(self.world.world_size)) - {one.rank for one in ranks}
        ranks += [self._silent(board, rank) for rank in sorted(silent)]
        waited = time.monotonic() - self.waits_since
        print_message(
            explain_hang(sorted(ranks, key=lambda one: one.rank)).format_report(
                "other ranks have waited", waited
            )
        )

    def _silent(self, board: StoreBoard, rank: int) -> RankStatus:
        """One that has not answered."""
        if board.has(f"left-{rank}"):
            return RankStatus(
                rank, 0, ProcessState.DONE, RankProgress(step=int(board.read(f"left-{rank}")))
            )
        if not board.has(f"who-{rank}"):
            return RankStatus(rank, 0, ProcessState.SILENT)
        name, number, file = json.loads(board.read(f"who-{rank}"))
        host, pid = make_readable(name), int(number)
        if host != self.host:
            return RankStatus(rank, pid, ProcessState.SILENT, host=host)
        if not Path(f"/proc/{pid}").exists():
            return RankStatus(rank, pid, ProcessState.ENDED, host=host)
        threads = read_stacks(pid, Path(f"/proc/{pid}/fd/{int(file)}"))
        running = ProcessState.RUNNING if threads else ProcessState.SILENT
        return RankStatus(
            rank,
            pid,
            ProcessState.STOPPED if is_stopped(pid) else running,
            threads=threads,
            host=host,
        )


def own_standing() -> RankProgress:
    return RankProgress(step=LOCAL_SLOTS[STEP], phase=LOCAL_SLOTS[PHASE])


def stack_of(frame: FrameType | None) -> Stack:
    """Innermost call first."""
    stack = []
    while frame is not None:
        stack.append(Frame(frame.f_code.co_name, frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return stack
