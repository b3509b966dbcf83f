"""A command that another one has started, on this machine or over SSH, ends when its stdin does."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress

from stepladder.core.signing import SECRET_VARIABLE

ENDS_WITH_STDIN, AFTER_SECRET = "STEPLADDER_ENDS_WITH_STDIN", "after-secret"
SECONDS_TO_END = 45.0  # after stdin's end: ranks have 30 to stop well


def end_with_stdin() -> None:
    """On a host: when stdin ends, stop as on SIGTERM, and in the end without asking; ranks die with
    us.

    The secret of the launch is its first line: a command line would show it to everybody on the
    machine."""
    wanted = os.environ.pop(ENDS_WITH_STDIN, None)
    if wanted is None:
        return
    if wanted == AFTER_SECRET:
        os.environ[SECRET_VARIABLE] = os.read(0, 1024).decode().strip()

    def watch() -> None:
        with suppress(OSError):
            while os.read(0, 1024):
                pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(SECONDS_TO_END)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
