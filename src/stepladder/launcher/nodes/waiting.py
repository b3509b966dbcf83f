"""Waits inside torch, which may last minutes and hold back signals: in a thread, so that they can be left."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from typing import TypeVar

from stepladder.rank.lifecycle import leave

T = TypeVar("T")
NAME = "stepladder-wait"
SECONDS_BETWEEN_CHECKS = 0.1


def interruptible(wait: Callable[[], T], check: Callable[[], object]) -> T:
    """The value of `wait()`. When `check()`, called ten times a second meanwhile, raises, the wait is given up."""
    values: list[T] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            values.append(wait())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call, name=NAME, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(SECONDS_BETWEEN_CHECKS)
        check()
    if errors:
        raise errors[0]
    return values[0]


def end_process_if_waiting(code: int) -> int:
    """`code`; but where torch still waits in a thread, this process ends with it: the interpreter would abort."""
    if any(thread.name.startswith((NAME, "RendezvousKeepAlive")) for thread in threading.enumerate()):
        atexit._run_exitfuncs()
        leave(code)
    return code
