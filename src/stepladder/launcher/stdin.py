"""The end of a command that another one has started, here or over SSH: it ends with its stdin."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress

from stepladder.core.signing import SECRET_VARIABLE

END_WITH_STDIN_VARIABLE = "STEPLADDER_ENDS_WITH_STDIN"
AFTER_SECRET = "after-secret"  # its value where the first line of stdin is the launch's secret
STDIN_END_TIMEOUT_S = 45.0  # after stdin's end: ranks have 30 s to stop well


def end_with_stdin() -> None:
    """Stop this process when its stdin ends, if its environment asks for it.

    It first stops as on SIGTERM, and exits after a while in any case; its ranks die with it. The
    first line of stdin may be the launch's secret, which a command line would show to everybody on
    the machine.
    """
    mode = os.environ.pop(END_WITH_STDIN_VARIABLE, None)
    if mode is None:
        return
    if mode == AFTER_SECRET:
        os.environ[SECRET_VARIABLE] = os.read(0, 1024).decode().strip()

    def watch_stdin() -> None:
        with suppress(OSError):
            while os.read(0, 1024):
                pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(STDIN_END_TIMEOUT_S)
        os._exit(1)

    threading.Thread(target=watch_stdin, daemon=True).start()
