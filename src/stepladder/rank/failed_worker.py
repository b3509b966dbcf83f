"""The data loader's worker whose end made its rank fail, whichever error the rank saw first."""

from __future__ import annotations

import os
import re
import signal
import sys
import traceback
from multiprocessing.process import BaseProcess
from traceback import walk_tb

from stepladder.core.waiting import wait_until

SIGNAL_HANDLING = "torch.utils.data._utils.signal_handling"
LOADER_WORKER_KILLED = re.compile(r"DataLoader worker \(pid \d+\) is killed by signal: .*")
LOADER_WORKER_EXITED = re.compile(
    r"DataLoader worker \(pid \d+\) exited unexpectedly with exit code.*"
)
LOADER_WORKER_ENDED = re.compile(r"DataLoader worker \(pid\S* [\d, ]+\) exited unexpectedly.*")
LOCAL_OF_LOADER = "failed_workers"  # of the loader's _try_get_data: processes that have ended
# Between the moment that the kernel closes a process's sockets and the end of the process.
WORKER_END_TIMEOUT_S = 5.0  # on busy cores; the rank fails anyway
WORKER_END_POLL_S = 0.01


def name_failed_worker(error: BaseException) -> BaseException:
    """Return an error that names the ended worker which has caused an error, else the same error.

    torch raises an error in a signal handler when a worker has ended, that is in any line: it may
    be the context or the text of the error of another library. Or the rank reads from a closed
    socket before torch notices.
    """
    text = "".join(traceback.format_exception(error))
    match = LOADER_WORKER_KILLED.search(text) or LOADER_WORKER_EXITED.search(text)
    message = match[0] if match else _read_exit_code(error)
    if message is None:
        match = LOADER_WORKER_ENDED.search(text)
        message = match[0] if match else _ask_torch(error)
    if message is None:
        return error
    failure = RuntimeError(message.strip())
    failure.__cause__ = error
    return failure.with_traceback(error.__traceback__)


def _read_exit_code(error: BaseException) -> str | None:
    """Return how a worker has ended that torch's loader has found, None if it has found none.

    The loader may find the end before torch's signal handler does, and then tells the pid alone.
    """
    for frame, _ in walk_tb(error.__traceback__):
        workers = frame.f_locals.get(LOCAL_OF_LOADER)
        for worker in workers if isinstance(workers, list) else ():
            if not isinstance(worker, BaseProcess):  # a list of the user's
                return None
            pid = worker.pid
            if worker.exitcode and worker.exitcode < 0:
                how = signal.strsignal(-worker.exitcode)
                return f"DataLoader worker (pid {pid}) is killed by signal: {how}."
            code = worker.exitcode
            return f"DataLoader worker (pid {pid}) exited unexpectedly with exit code {code}."
    return None


def _ask_torch(error: BaseException) -> str | None:
    """Return torch's sentence on a worker that has ended, None if all are alive."""
    signal_handling = sys.modules.get(SIGNAL_HANDLING)
    if signal_handling is None:
        return None
    may_be_ending = isinstance(error, (ConnectionError, EOFError, FileNotFoundError))
    timeout_s = 0.0
    if may_be_ending and _has_children():
        timeout_s = WORKER_END_TIMEOUT_S

    def find_failure() -> str | None:
        try:
            signal_handling._error_if_any_worker_fails()
        except RuntimeError as failure:
            return str(failure)
        return None

    return wait_until(find_failure, timeout_s, poll_s=WORKER_END_POLL_S)


def _has_children() -> bool:
    """Return whether this process has children.

    It reaps none, unlike `multiprocessing.active_children`: torch asks them for their ends.
    """
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True
