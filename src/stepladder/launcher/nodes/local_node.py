"""This machine as one node of a launch, and waits inside torch that can be given up.

Imports no torch.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import forkserver
from typing import Any, TypeVar

from stepladder.launcher.local.local_group import LocalGroup
from stepladder.launcher.local.supervisor import stopping_on_signals
from stepladder.rank.lifecycle import exit_now

T = TypeVar("T")
WAIT_THREAD_NAME = "stepladder-wait"
SELF_MONITOR_THREAD_NAME = "stepladder-self-watch"
# Threads that may be inside a call of torch: the last is torchelastic's.
TORCH_THREAD_NAMES = (WAIT_THREAD_NAME, SELF_MONITOR_THREAD_NAME, "RendezvousKeepAlive")
WAIT_CHECK_INTERVAL_S = 0.1


@dataclass(frozen=True)
class NodeInfo:
    """What a node tells the others before a start, and what they agree on.

    Args:
        nproc: The number of its ranks.
        attempt: The number of the last start; a node that joined later knows a smaller one.
        failed: Attempt and step of the last failure in a step.
        master: Host and port where ranks meet; the first node's value is used.
        liveness_address: Host and port where its agent listens, see liveness.py.
        node_id: See node_ids.py.
    """

    nproc: int
    attempt: int = -1
    failed: tuple[int, int] = (-1, 0)
    master: tuple[str, int] = ("", 0)
    liveness_address: tuple[str, int] = ("", 0)
    node_id: int = -1


@dataclass
class LocalNode:
    """This node over all starts of its ranks.

    Args:
        group: Its ranks.
        info: What it tells the other nodes.
        restarts_left: Restarts that --max-restarts still allows.
    """

    group: LocalGroup
    info: NodeInfo
    restarts_left: int

    def update_info(self, **changes: Any) -> None:
        """Change fields of the info."""
        self.info = replace(self.info, **changes)

    def set_info(self, info: NodeInfo) -> None:
        """Set what the nodes have agreed on."""
        self.info = info

    def use_restart(self) -> None:
        """Count one restart."""
        self.restarts_left -= 1

    def limit_restarts(self, count: int) -> None:
        """Allow at most so many further restarts."""
        self.restarts_left = min(count, self.restarts_left)


@contextmanager
def open_local_node(group: LocalGroup, nproc: int, max_restarts: int) -> Iterator[LocalNode]:
    """Handle signals for the group, and prepare torchelastic for the block.

    Meanwhile the process from which ranks are forked imports torch, too.

    Yields:
        This node, with its number of ranks and of restarts.
    """
    with stopping_on_signals(group):
        forkserver.ensure_running()
        _prepare_torchelastic()
        yield LocalNode(group, NodeInfo(nproc), max_restarts)


def _prepare_torchelastic() -> None:
    """Silence torchelastic before it is imported: our agent prints what matters."""
    # Without this a lost store prints a page of C++ frames.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    logger = logging.getLogger("torch.distributed.elastic")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
    # Ranks get a new store for each start. In the agents' store they would find the addresses of
    # ranks that are gone, and the remaining nodes would lose it with the node that serves it.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"


def wait_interruptibly(wait: Callable[[], T], check: Callable[[], object]) -> T:
    """Return the value of `wait()`, which runs in a thread.

    A wait inside torch may last minutes and hold back signals.

    Args:
        wait: May block.
        check: Called ten times a second meanwhile; an exception from it abandons the wait.
    """
    value: futures.Future[T] = futures.Future()

    def call() -> None:
        try:
            value.set_result(wait())
        except BaseException as error:
            value.set_exception(error)

    threading.Thread(target=call, name=WAIT_THREAD_NAME, daemon=True).start()
    while not value.done():
        futures.wait([value], WAIT_CHECK_INTERVAL_S)
        check()
    return value.result()


def exit_if_threads_wait(code: int) -> int:
    """Return `code`, or end this process with it where a thread still waits inside torch.

    The interpreter would abort at its own end.
    """
    if any(thread.name.startswith(TORCH_THREAD_NAMES) for thread in threading.enumerate()):
        atexit._run_exitfuncs()
        exit_now(code)
    return code
