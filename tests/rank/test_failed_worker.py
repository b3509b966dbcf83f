"""Which worker's end made a rank fail is found in whatever error the rank has seen."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.context import ForkProcess

import pytest
import torch  # noqa: F401  (its signal handling is asked)
from torch.utils.data._utils.signal_handling import _remove_worker_pids, _set_worker_pids
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from stepladder.rank.error_record import ErrorKind, RankError
from stepladder.rank.failed_worker import LOCAL_OF_LOADER, name_failed_worker

KILLED = "DataLoader worker (pid 7) is killed by signal: Killed."
UNEXPECTED = "exited unexpectedly"
ENDED = "DataLoader worker (pid(s) 7, 8) exited unexpectedly"
EXITED = "DataLoader worker (pid 7) exited unexpectedly with exit code 3."
BUS = (
    "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's"
    " workers are out of shared memory. Please try to raise your shared memory limit."
)


def chained(error: Exception, cause: Exception) -> Exception:
    error.__context__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "text", "kind"),
    [
        (RuntimeError(KILLED + " "), KILLED, ErrorKind.WORKER_KILLED),
        (
            RuntimeError(f"callback: RuntimeError: {KILLED} \n\nAt:\n x"),
            KILLED,
            ErrorKind.WORKER_KILLED,
        ),
        (chained(KeyError(3), RuntimeError(KILLED)), KILLED, ErrorKind.WORKER_KILLED),
        (chained(RuntimeError(ENDED), RuntimeError(KILLED)), KILLED, ErrorKind.WORKER_KILLED),
        (RuntimeError(ENDED), ENDED, ErrorKind.OTHER),
        (
            chained(RuntimeError(ENDED), RuntimeError(f"{EXITED} Details")),
            f"{EXITED} Details",
            ErrorKind.OTHER,
        ),
        (RuntimeError(BUS), BUS, ErrorKind.SHARED_MEMORY),
        (ValueError("a label"), "a label", ErrorKind.OTHER),
        (ConnectionResetError("by peer"), "by peer", ErrorKind.OTHER),
    ],
)
def test_the_error_of_a_rank(error: Exception, text: str, kind: ErrorKind) -> None:
    record = RankError.from_error(1, error)
    assert (record.text, record.kind) == (text, kind)


@pytest.mark.parametrize(
    ("end", "text"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "is killed by signal: Killed."),
        (lambda: os._exit(5), "exited unexpectedly with exit code 5."),
    ],
)
def test_a_worker_that_the_loader_has_found_is_named_with_its_end(
    end: Callable[[], None], text: str
) -> None:
    """torch tells the pid alone, if its signal handler comes too late."""
    worker: ForkProcess = multiprocessing.get_context("fork").Process(target=end)
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    worker.start()
    worker.join()
    signal.signal(signal.SIGCHLD, handler)

    def try_get_data() -> None:
        failed_workers = [worker]
        raise RuntimeError(f"DataLoader worker (pid(s) {failed_workers[0].pid}) {UNEXPECTED}")

    with pytest.raises(RuntimeError) as caught:
        try_get_data()
    named = name_failed_worker(caught.value)
    assert str(named) == f"DataLoader worker (pid {worker.pid}) {text}"
    assert str(name_failed_worker(named)) == str(named)  # once it is named it remains so


def test_the_loader_has_the_local_variable_that_is_read() -> None:
    code = _MultiProcessingDataLoaderIter._try_get_data.__code__
    assert LOCAL_OF_LOADER in code.co_varnames


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_worker_that_torch_has_not_noticed_yet_is_found(has_ended: bool) -> None:
    # Another test's DataLoader may have set torch's handler, which raises: a rank mutes it meanwhile.
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    worker: ForkProcess = multiprocessing.get_context("fork").Process(target=_die)
    worker.start()
    assert worker.pid is not None
    _set_worker_pids(id(worker), (worker.pid,))  # as a DataLoader's iterator does
    if has_ended:  # and waits for whoever asks
        os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
    try:
        named = name_failed_worker(ConnectionResetError("by peer"))
    finally:
        _remove_worker_pids(id(worker))
        worker.join()
        signal.signal(signal.SIGCHLD, handler)
    assert str(named) == f"DataLoader worker (pid {worker.pid}) is killed by signal: Killed."
    assert isinstance(named.__cause__, ConnectionResetError)
