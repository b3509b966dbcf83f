"""What a tool does on a signal while other processes work for it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

FIRST_SIGNAL_EXIT_CODE = 128  # to which a shell adds the number of the signal


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """Raise SystemExit in the block on a signal that would end this process at once.

    What the block has started is then ended too.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    replaced = [number for number, handler in handlers.items() if handler == signal.SIG_DFL]
    for number in replaced:
        signal.signal(number, lambda number, _: sys.exit(FIRST_SIGNAL_EXIT_CODE + number))
    try:
        yield
    finally:
        for number in replaced:
            signal.signal(number, signal.SIG_DFL)
