"""The `Work` that a collective of a process group returns, and the queue that runs collectives."""

from __future__ import annotations

import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from time import perf_counter
from typing import Any

from torch.distributed import Work as TorchWork
from torch.futures import Future

from stepladder_exchange.call_frame import CallFrame, find_caller
from stepladder_exchange.flight_record import EndCallback
from stepladder_exchange.queue_thread import QueueThread
from stepladder_exchange.runner import ExchangeRunner

# How long a collective with async_op=True may block its caller. Most ranks arrive sooner. After
# this time a thread takes over, which costs several wake-ups.
MAX_CALLER_WAIT_S = 0.005
Stages = Iterator[object]
ErrorExplainer = Callable[[RuntimeError], RuntimeError]
NO_TIMEOUT = timedelta(0)


class ProcessGuard:
    """Knows the process that has made it, from which others may be forked."""

    def __init__(self) -> None:
        """Create the guard of this process."""
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this process has made the guard."""
        return self._pid == os.getpid()

    def validate(self) -> None:
        """Raise RuntimeError if this process was forked from the one that has made the guard."""
        if not self.is_here:
            raise RuntimeError(
                f"this process was forked from process {self._pid}, and is no rank of its group"
            )


def copy_error(error: RuntimeError) -> RuntimeError:
    """Return a copy of an error without its traceback, whose frames keep the shared memory alive.

    torch's own tests look for the word "timeout" in the message.
    """
    message = str(error)
    if message.startswith("timed out:"):
        message += ", the timeout of the group"
    return RuntimeError(message)


class GroupWork(TorchWork):
    """A collective that was started; it may be finished already."""

    def __init__(self, outputs: Any, on_end: EndCallback | None = None) -> None:
        """Create the work of a collective, which is not finished.

        Args:
            outputs: The tensors that hold the result, which are the value of the future.
            on_end: What is called with the collective's error, or None, when it has ended.
        """
        super().__init__()
        self.outputs = outputs
        self.error: RuntimeError | None = None
        self.has_ended = False
        self._on_end = on_end
        self._lock = threading.Lock()
        # Locked until the collective ends. It is no threading.Event: a rank that waits in one is in
        # a function of Python's, and the stack of a hang would look like a deadlock of threads.
        self._gate: threading.Lock | None = None
        self._end: Future[None] | None = None
        self._future: Future[Any] | None = None

    def end(self, error: RuntimeError | None = None) -> None:
        """Mark the collective as finished or failed, and tell all that wait for it."""
        with self._lock:
            had_ended = self.has_ended
            self.error = error
            self.has_ended = True
            if self._gate is not None and not had_ended:
                self._gate.release()
            end = self._end
        if self._on_end is not None:
            self._on_end(error)
        if end is not None:
            end.set_result(None)

    def _get_outputs(self, _: object) -> Any:
        if self.error is not None:
            raise RuntimeError(str(self.error))
        return self.outputs

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Wait for the result.

        Returns:
            True, as torch's own work does.

        Raises:
            RuntimeError: The collective has failed, or has not ended within the timeout.
        """
        if not self.wait_for_end(timeout):
            seconds = timeout.total_seconds()
            raise RuntimeError(f"timed out: the collective has a timeout of {seconds:g} s")
        if self.error is not None:
            raise RuntimeError(str(self.error))
        return True

    def wait_for_end(self, timeout: timedelta) -> bool:
        """Wait until the collective has finished or failed, without a timeout if that is 0.

        Returns:
            Whether it has.
        """
        if self.has_ended:
            return True
        with self._lock:
            if self.has_ended:
                return True
            if self._gate is None:
                self._gate = threading.Lock()
                self._gate.acquire()
        seconds = timeout.total_seconds()
        has_ended = self._gate.acquire(timeout=seconds if seconds > 0 else -1)
        if has_ended:
            self._gate.release()
        return has_ended

    def get_future(self) -> Future[Any]:
        """Return a future whose value is the list of the result's tensors.

        Only a callback can give a future of torch an error that DistributedDataParallel sees:
        `set_exception` gives it a value, which DDP takes for its tensors, and crashes.
        """
        with self._lock:
            if self._future is not None:
                return self._future
            end: Future[None] = Future()
            future = end.then(self._get_outputs)
            self._end = end
            self._future = future
            has_ended = self.has_ended
        if has_ended:
            end.set_result(None)
        return future

    def is_completed(self) -> bool:
        """Return whether the collective has finished or failed."""
        return self.has_ended

    def is_success(self) -> bool:
        """Return whether the collective has finished."""
        return self.has_ended and self.error is None

    def exception(self) -> RuntimeError | None:
        """Return why the collective has failed, or None."""
        return self.error

    def result(self) -> Any:
        """Return the tensors that hold the result."""
        return self.outputs

    def synchronize(self) -> None:
        """Wait for the result, as `wait` does."""
        self.wait()


class _QueuedCollective:
    """A collective with one stage or several, each of which needs the result of the one before."""

    def __init__(self, runner: ExchangeRunner, stages: Stages, work: GroupWork) -> None:
        """Create a collective that has not begun.

        Args:
            runner: Runs the exchanges.
            stages: Each puts parts of the collective into the queue of the runner.
            work: What the caller got.
        """
        self.work = work
        self._runner = runner
        self._stages = stages
        self._is_running = False
        self._caller: CallFrame | None = None

    def remember_caller(self) -> None:
        """Remember the user's call, for an error in another thread."""
        self._caller = find_caller()

    def advance(self, until: float = math.inf) -> bool:
        """Run the collective; return whether it is done, as `ExchangeRunner.advance` does."""
        while not self._is_running or self._runner.advance(until, self._caller):
            self._is_running = False
            for _stage in self._stages:
                if self._runner.queue:  # other stages have only used the network
                    self._runner.begin()
                    self._is_running = True
                    break
            if not self._is_running:
                return True
        return False


class CollectiveQueue:
    """Runs the collectives of one group one after the other, as all ranks do.

    The caller's thread runs a collective if none is before it. When the peers do not arrive soon
    and the caller need not wait, a thread of this queue takes over. While `_waiting` holds a
    collective, that thread alone uses the memory; otherwise the thread with the lock. The callbacks
    of a future run in that thread. If one of them starts a collective, another thread takes over:
    the callback may wait for what it has started, as those of PowerSGD do.
    """

    def __init__(
        self,
        runner: ExchangeRunner,
        explain: ErrorExplainer = copy_error,
        uses_network: bool = False,
    ) -> None:
        """Create the queue of a group.

        Args:
            runner: Runs the exchanges.
            explain: Returns the error to keep in place of one that a collective has raised.
            uses_network: Whether a stage may wait for other machines: then a collective with
                async_op=True runs in the thread at once.
        """
        self._runner = runner
        self._explain = explain
        self._uses_network = uses_network
        self._lock = threading.Lock()
        self._arrival = threading.Condition(self._lock)
        self._waiting: deque[_QueuedCollective] = deque()
        self._thread: threading.Thread | None = None
        self._error: RuntimeError | None = None
        self._is_closed = False
        self._process = ProcessGuard()

    def start(self, stages: Stages, work: GroupWork, is_async: bool) -> GroupWork:
        """Start a collective, and finish it if all peers arrive soon.

        Args:
            stages: Its stages, as of `_QueuedCollective`.
            work: The collective's work.
            is_async: Whether the caller continues before the result is there.

        Returns:
            The same work; it has ended if the caller is not asynchronous.

        Raises:
            RuntimeError: The collective has failed, or an earlier one has.
        """
        self._process.validate()
        with self._lock:
            if self._error is not None:
                raise RuntimeError(str(self._error))
            collective = _QueuedCollective(self._runner, stages, work)
            runs_later = bool(self._waiting) or (is_async and self._uses_network)
            if runs_later or not self._run_here(collective, is_async):
                collective.remember_caller()
                self._waiting.append(collective)
                self._wake_thread()
        if not is_async:
            work.wait()
        return work

    def _run_here(self, collective: _QueuedCollective, is_async: bool) -> bool:
        """Run a collective in the caller's thread; return whether it has ended."""
        until = perf_counter() + MAX_CALLER_WAIT_S if is_async else math.inf
        try:
            if not collective.advance(until):
                return False
            collective.work.end()
        except RuntimeError as error:
            self._error = self._explain(error)
            collective.work.end(self._error)
        except BaseException:
            self._error = RuntimeError("an earlier collective of this group was interrupted")
            raise
        return True

    def _wake_thread(self) -> None:
        if self._thread in (None, threading.current_thread()):
            self._thread = QueueThread(self._run_waiting, self._leave, "exchange")
            self._thread.start()
        self._arrival.notify()

    def _run_waiting(self) -> None:
        """Run the waiting collectives until the queue is closed, or another thread takes over."""
        while (collective := self._await_next()) is not None:
            error = self._error or self._run(collective)
            with self._lock:
                self._error = self._error or error
                self._waiting.popleft()
            collective.work.end(error)

    def _await_next(self) -> _QueuedCollective | None:
        """Return the collective that is next; None if this thread has nothing more to run."""
        with self._lock:
            while self._thread is threading.current_thread():
                if self._waiting:
                    return self._waiting[0]
                if self._is_closed:
                    break
                self._arrival.wait()
        return None

    def _run(self, collective: _QueuedCollective) -> RuntimeError | None:
        """Run a collective to its end; return the error if it fails."""
        try:
            collective.advance()
        except RuntimeError as error:
            return self._explain(error)
        except Exception as error:
            return RuntimeError(f"{type(error).__name__}: {error}")
        return None

    def abort(self) -> None:
        """Leave the group: a collective that waits for other ranks fails."""
        if self._process.is_here:
            self._runner.leave_group()

    def _leave(self) -> None:
        self.abort()  # first: a thread that waits for other ranks may hold the lock
        self.close()

    def close(self) -> None:
        """Leave the group after the collective under way, and end the thread."""
        if not self._process.is_here:  # where the lock may be held for ever
            return
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            if self._error is None:
                self._error = RuntimeError("the process group was destroyed")
            if not self._waiting:
                self._runner.drop_batch()
            self._arrival.notify()
        self._runner.leave_group()
