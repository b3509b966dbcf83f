"""Imported by the process that ranks are forked from, for what it does there: it must neither
outlive its launcher nor end before its ranks.

Ranks die with the server, and hold the pipe by which it would otherwise notice that its launcher
was killed. A signal to the whole process group (Slurm, `timeout`, a closed terminal) is for the
ranks, which unblock it."""

from __future__ import annotations

import gc
import os
import signal
import sys
from types import TracebackType

from stepladder.core.paths import FOR_FORK_SERVER, SAFE_PATH
from stepladder.core.surroundings import is_limit
from stepladder.rank.lifecycle import FOR_RANKS, die_with_parent


def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Why the server ends. Its launcher tries again, and has a line for a limit of the machine."""
    if not is_limit(error):
        sys.__excepthook__(kind, error, trace)


sys.excepthook = show  # each rank takes Python's own back
die_with_parent()
if os.environ.get(SAFE_PATH) == FOR_FORK_SERVER:
    del os.environ[SAFE_PATH]  # what ranks start is not concerned
gc.disable()  # a fifth of the time that torch's import takes; each rank enables it again
signal.pthread_sigmask(signal.SIG_BLOCK, FOR_RANKS)
