"""This machine as one node of a launch, and its waits inside torch. Imports no torch."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver
from typing import TypeVar

from stepladder.launcher.local.local_group import LocalGroup
from stepladder.launcher.local.supervisor import handle_signals
from stepladder.rank.lifecycle import exit_now

T = TypeVar("T")
WAIT, WATCH = "stepladder-wait", "stepladder-self-watch"  # names of threads
SECONDS_BETWEEN_CHECKS = 0.1


@dataclass(frozen=True)
class Introduction:
    """A node's word to the others before a start, and what they agree on by it.

    nproc: its ranks.  attempt: the number of the last start.  failed: attempt and step of the last
    failure in a step. Nodes that came later know less.  master: host and port where ranks meet; the
    first node's counts. lifeline: where its agent listens, see lifelines.py.  seat: see seats.py.
    """

    nproc: int
    attempt: int = -1
    failed: tuple[int, int] = (-1, 0)
    master: tuple[str, int] = ("", 0)
    lifeline: tuple[str, int] = ("", 0)
    seat: int = -1


@dataclass
class OwnNode:
    """A node over all starts of its ranks. restarts_left: of --max-restarts."""

    group: LocalGroup
    known: Introduction
    restarts_left: int


@contextmanager
def as_node(group: LocalGroup, nproc: int, max_restarts: int) -> Iterator[OwnNode]:
    """Until the block ends. It may import torchelastic, while torch is also loaded where ranks are
    forked from.
    """
    with handle_signals(group):
        forkserver.ensure_running()
        _prepare_torchelastic()
        yield OwnNode(group, Introduction(nproc), max_restarts)


def _prepare_torchelastic() -> None:
    """Before it is imported. What matters is said by our agent."""
    os.environ.setdefault(
        "TORCH_CPP_LOG_LEVEL", "ERROR"
    )  # a lost store would print a page of C++ frames
    logger = logging.getLogger("torch.distributed.elastic")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
    # Ranks get a store of their own for each start: in the agents' they would find the addresses of
    # the dead, and nodes that stay would remember it when its node goes.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"


def interruptible(wait: Callable[[], T], check: Callable[[], object]) -> T:
    """The value of `wait()`. When `check()`, called ten times a second meanwhile, raises, the wait
    is given up.

    Waits inside torch may last minutes and hold back signals, so this one is in a thread.
    """
    value: futures.Future[T] = futures.Future()

    def call() -> None:
        try:
            value.set_result(wait())
        except BaseException as error:
            value.set_exception(error)

    threading.Thread(target=call, name=WAIT, daemon=True).start()
    while not value.done():
        futures.wait([value], SECONDS_BETWEEN_CHECKS)
        check()
    return value.result()


def end_process_if_waiting(code: int) -> int:
    """`code`; but where torch still waits in a thread, this process ends with it: the interpreter
    would abort.
    """
    if any(
        thread.name.startswith((WAIT, WATCH, "RendezvousKeepAlive"))
        for thread in threading.enumerate()
    ):
        atexit._run_exitfuncs()
        exit_now(code)
    return code
