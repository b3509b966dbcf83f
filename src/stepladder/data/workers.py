"""DataLoader workers of a rank: their start, their exceptions on the way to the rank, their end."""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from stepladder.core.console import print_message
from stepladder.core.errors import InputError, get_text
from stepladder.core.signals import die_with_parent
from stepladder.core.sockets import send_tensors_by_open_socket
from stepladder.core.tracebacks import RemoteTraceback, fold_traceback
from stepladder.rank.stacks import blocks_signal
from stepladder.rank.torch_fixes import get_loader_workers, shut_down_loader_workers
from stepladder.rank.torch_fixes_loader import report_unsent_batches

WORKER_START_TIMEOUT_S = 30.0
WORKER_EXIT_TIMEOUT_S = 3.0


class _WorkerFailed(RuntimeError):
    """Raised in the rank when a worker's own exception cannot be pickled; it has its text."""


@dataclass(frozen=True)
class PackedError:
    """An exception in a worker, on its way to the rank in place of a batch.

    torch's DataLoader calls the exception's class with one text. That loses exceptions whose class
    takes other arguments, and blocks for ever on a class that cannot be pickled.

    Args:
        pickled: The exception, or b"" if it cannot be pickled.
        name: The name of its class.
        text: Its message.
        trace: Its traceback.
    """

    pickled: bytes
    name: str
    text: str
    trace: str

    @staticmethod
    def pack(error: BaseException) -> PackedError:
        """Pack an exception for the rank."""
        pickled = _pickle_error(error)
        fold_traceback(error, with_note=False)  # the rank adds a note of its own
        trace = "".join(traceback.format_exception(error))
        return PackedError(pickled, type(error).__name__, get_text(error), trace)

    def reraise(self) -> NoReturn:
        """Raise the exception, or _WorkerFailed with its text if it could not be pickled."""
        error: BaseException = _WorkerFailed(f"{self.name}: {self.text}")
        with suppress(Exception):
            error = pickle.loads(self.pickled)
        if isinstance(error, InputError):
            raise error
        raise error from RemoteTraceback(self.trace)


def _pickle_error(error: BaseException) -> bytes:
    """Return the pickled exception, or b"" if the rank could not raise it."""
    # In the rank these two would mean that the user stops the run, and that there is no more data.
    if isinstance(error, (KeyboardInterrupt, StopIteration)):
        return b""
    with suppress(Exception):
        pickled = pickle.dumps(error)
        if type(pickle.loads(pickled)) is type(error):
            return pickled
    return b""


def call_in_worker(function: Callable[..., Any], *args: Any) -> Any:
    """Return `function(*args)`, or a PackedError if it raises."""
    try:
        return function(*args)
    except BaseException as error:
        return PackedError.pack(error)


def call_in_rank(function: Callable[..., Any], *args: Any) -> Any:
    """Return `function(*args)`, and turn a StopIteration into a RuntimeError.

    A StopIteration would only end the loop over the batches, as if all data had been read.

    Raises:
        RuntimeError: The function has raised StopIteration.
    """
    try:
        return function(*args)
    except StopIteration as error:
        raise RuntimeError("the job's Dataset, or its collate, has raised StopIteration") from error


def initialize_worker(worker: int) -> None:
    """Set up this process as a worker of one rank.

    A first SIGTERM does nothing: it goes to all processes, and the trainer needs its workers to
    stop well. A second one ends the worker. A worker that hangs does not see that its rank was
    killed, so the kernel ends it then.
    """
    die_with_parent()
    send_tensors_by_open_socket(quiet=worker > 0)
    report_unsent_batches()
    signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def limit_start_time(batches: Any) -> threading.Timer:
    """End the forked workers of a DataLoader's iterator that have not started in time.

    In Python 3.11 the child of a fork hangs if a thread of a C++ library was entering Python at
    that moment: it waits for a lock of the interpreter that nobody in the child holds. The rank
    would wait for its batches without limit. Now torch reports the killed worker as a failure.

    Returns:
        The timer, to cancel when the iterator ends.
    """
    timer = threading.Timer(WORKER_START_TIMEOUT_S, _kill_stuck, [get_loader_workers(batches)])
    timer.daemon = True
    timer.start()
    return timer


def _kill_stuck(workers: list[Any]) -> None:
    for worker in workers:
        # Another start method imports the job anew, which may take its time.
        is_forked = isinstance(worker, multiprocessing.context.ForkProcess)
        if is_forked and blocks_signal(worker.pid, signal.SIGTERM):  # see initialize_worker
            print_message(f"DataLoader worker {worker.pid} hangs since its fork: it is ended")
            worker.kill()


def stop_workers(batches: Any) -> None:
    """End the workers of a DataLoader's iterator, also those that hang in the job's code.

    At the interpreter's end multiprocessing sends one SIGTERM, which a worker ignores, and then
    waits for the worker without limit. So no worker may be running by then. torch's own shutdown
    would wait five seconds for each worker.
    """
    workers = get_loader_workers(batches)
    killer = threading.Timer(WORKER_EXIT_TIMEOUT_S, _kill, [workers])
    killer.daemon = True
    killer.start()
    try:
        with suppress(RuntimeError):  # torch reports a worker that is killed meanwhile
            shut_down_loader_workers(batches)
    finally:
        killer.cancel()


def _kill(workers: list[Any]) -> None:
    for worker in workers:
        worker.kill()
