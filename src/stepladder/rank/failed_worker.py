"""The data loader's worker whose end made its rank fail, whichever error the rank saw first."""

from __future__ import annotations

import re
import sys
import time
import traceback
from multiprocessing import active_children

SIGNAL_HANDLING = "torch.utils.data._utils.signal_handling"
LOADER_WORKER_KILLED = re.compile(r"DataLoader worker \(pid \d+\) is killed by signal: .*")
LOADER_WORKER_ENDED = re.compile(r"DataLoader worker \(pid\S* [\d, ]+\) exited unexpectedly.*")
# Between the moment that the kernel closes a process's sockets and the end of the process.
WORKER_END_TIMEOUT_S = 0.5
WORKER_END_POLL_S = 0.01


def name_failed_worker(error: BaseException) -> BaseException:
    """Return an error that names the ended worker which has caused an error, else the same error.

    torch raises an error in a signal handler when a worker has ended, that is in any line: it may
    be the context or the text of the error of another library. Or the rank reads from a closed
    socket before torch notices.
    """
    text = "".join(traceback.format_exception(error))
    match = LOADER_WORKER_KILLED.search(text) or LOADER_WORKER_ENDED.search(text)
    message = match[0] if match else _ask_torch(error)
    if message is None:
        return error
    failure = RuntimeError(message.strip())
    failure.__cause__ = error
    return failure.with_traceback(error.__traceback__)


def _ask_torch(error: BaseException) -> str | None:
    """Return torch's sentence on a worker that has ended, None if all are alive."""
    signal_handling = sys.modules.get(SIGNAL_HANDLING)
    if signal_handling is None:
        return None
    may_be_ending = isinstance(error, (ConnectionError, EOFError, FileNotFoundError))
    deadline = time.monotonic()
    if may_be_ending and active_children():
        deadline += WORKER_END_TIMEOUT_S
    while True:
        try:
            signal_handling._error_if_any_worker_fails()
        except RuntimeError as failure:
            return str(failure)
        if time.monotonic() >= deadline:
            return None
        time.sleep(WORKER_END_POLL_S)
