"""Prepares the fork server when it is imported there.

The server must neither outlive its launcher nor end before its ranks. Ranks die with the server,
and hold the pipe by which it would otherwise notice that its launcher was killed. A signal to the
whole process group (from Slurm, `timeout` or a terminal) is meant for the launcher and the ranks,
which unblock it.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from types import TracebackType

from stepladder.core.machine_limits import is_limit_error
from stepladder.core.paths import FORK_SERVER_VALUE, SAFE_PATH_VARIABLE
from stepladder.core.signals import die_with_parent
from stepladder.rank.lifecycle import RANK_SIGNALS


def _show_error(
    error_type: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print why the server ends.

    A limit of the machine is not printed: the launcher tries again, and reports the limit itself.
    """
    if not is_limit_error(error):
        sys.__excepthook__(error_type, error, trace)


sys.excepthook = _show_error  # each rank restores Python's own
die_with_parent()
if os.environ.get(SAFE_PATH_VARIABLE) == FORK_SERVER_VALUE:
    del os.environ[SAFE_PATH_VARIABLE]  # processes that ranks start must not inherit it
gc.disable()  # saves a fifth of the time that torch's import takes; each rank enables it again
signal.pthread_sigmask(signal.SIG_BLOCK, RANK_SIGNALS)
