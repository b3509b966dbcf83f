"""Processes that read a Dataset for their rank: how they start, hand on an exception, and end."""

from __future__ import annotations

import pickle
import signal
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from stepladder.core.errors import InputError, get_text
from stepladder.core.sockets import send_tensors_by_open_socket
from stepladder.core.tracebacks import RemoteTraceback, fold_traceback
from stepladder.rank.lifecycle import die_with_parent
from stepladder.rank.torch_fixes import get_loader_workers, shut_down_loader_workers

SECONDS_FOR_WORKERS_TO_END = 3.0


class WorkerFailed(RuntimeError):
    """A process that reads the Dataset has raised what cannot travel: its text says what it was."""


@dataclass(frozen=True)
class WorkerFailure:
    """An exception in a worker, on its way to the rank in a batch's place.

    torch's DataLoader calls the exception's class with one text: that loses exceptions whose class
    wants other arguments, and waits for ever for a class that cannot be pickled.

    Attributes:
        pickled: the exception, or b"" where it cannot travel.
        name: of its class.
        text: its message.
        trace: its traceback.
    """

    pickled: bytes
    name: str
    text: str
    trace: str

    @staticmethod
    def of(error: BaseException) -> WorkerFailure:
        """Return what travels in the exception's place."""
        pickled = b""
        # In the rank these two would mean that somebody wants to stop, and that there is no more
        # data.
        if not isinstance(error, (KeyboardInterrupt, StopIteration)):
            with suppress(Exception):
                pickled = pickle.dumps(error)
                if type(pickle.loads(pickled)) is not type(error):
                    pickled = b""
        fold_traceback(error, with_note=False)  # the rank has a note of its own
        trace = "".join(traceback.format_exception(error))
        return WorkerFailure(pickled, type(error).__name__, get_text(error), trace)

    def raise_it(self) -> NoReturn:
        """Raise the exception itself where it could travel, else one with its text."""
        error: BaseException = WorkerFailed(f"{self.name}: {self.text}")
        with suppress(Exception):
            error = pickle.loads(self.pickled)
        if isinstance(error, InputError):
            raise error
        raise error from RemoteTraceback(self.trace)


def in_worker(call: Callable[..., Any], *args: Any) -> Any:
    """Return `call(*args)` or, where it raises, a WorkerFailure."""
    try:
        return call(*args)
    except BaseException as error:
        return WorkerFailure.of(error)


def in_rank(call: Callable[..., Any], *args: Any) -> Any:
    """Return `call(*args)`; a StopIteration that it raises would only end the loop over the
    batches.
    """
    try:
        return call(*args)
    except StopIteration as error:
        raise RuntimeError("the job's Dataset, or its collate, has raised StopIteration") from error


def serve_one_rank(worker: int) -> None:
    """Make this process a worker of one rank.

    A stop signal to all processes is for the trainer, which needs its workers to stop well. The
    second SIGTERM ends a worker. One that hangs does not see that its rank was killed, so the
    kernel is asked to end it then."""
    die_with_parent()
    send_tensors_by_open_socket(quiet=worker > 0)
    signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def end_workers(batches: Any) -> None:
    """End the workers of a DataLoader's iterator, also those that hang in the job's code.

    Multiprocessing sends one SIGTERM at the interpreter's end, which a worker takes for the
    trainer, and then waits for the worker without limit. So no worker may be left then. Torch would
    wait five seconds for each."""
    workers = get_loader_workers(batches)
    killer = threading.Timer(SECONDS_FOR_WORKERS_TO_END, _kill, [workers])
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
