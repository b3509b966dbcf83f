"""Signals: of a parent that ends, while others work for a process, and while it records its end."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing import parent_process
from types import FrameType

PR_SET_PDEATHSIG = 1  # from linux/prctl.h
FIRST_SIGNAL_EXIT_CODE = 128  # to which a shell adds the number of the signal

Handler = Callable[[int, FrameType | None], object]


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent ends, or end it if the parent has ended.

    `kill -9` of a launcher must leave no rank: an orphan would go on writing to the run directory.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    launcher = parent_process()
    if launcher is not None and not launcher.is_alive():
        os._exit(1)


@contextmanager
def block_signals(numbers: Collection[int]) -> Iterator[None]:
    """Block signals in this thread during the block, and in processes that start there."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


@contextmanager
def handle_signals(numbers: Iterable[int], handler: Handler) -> Iterator[None]:
    """Handle signals by a function in the block, and as before after it."""
    with ExitStack() as at_end:
        for number in numbers:
            at_end.callback(signal.signal, number, signal.signal(number, handler))
        yield


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """Raise SystemExit in the block on a signal that would end this process at once.

    What the block has started is then ended too.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    replaced = [number for number, handler in handlers.items() if handler == signal.SIG_DFL]
    with handle_signals(replaced, _exit_on_signal):
        yield


def _exit_on_signal(number: int, _frame: object) -> None:
    sys.exit(FIRST_SIGNAL_EXIT_CODE + number)


def mute_signal_handlers(error: BaseException) -> BaseException:
    """Let no handler of the job, or of a library, run from now on in this process.

    A handler runs between any two lines of the main thread, and may raise: torch's does when a data
    loader's worker has ended. The muted signals neither end this process nor change how it gets to
    know of the end of its children.

    Args:
        error: The error that ends this process.

    Returns:
        The error; or what a handler has raised until now, whose context the error is.
    """
    while threading.current_thread() is threading.main_thread():
        try:
            for number in signal.valid_signals():
                if callable(signal.getsignal(number)):
                    signal.signal(number, lambda *_: None)
            break
        except BaseException as raised:
            error = raised
    return error
