"""The work of a call that gloo carries for a group which shares memory; its error names a loss."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch.distributed import Work as TorchWork
from torch.futures import Future

from stepladder_exchange.group_work import NO_TIMEOUT, ErrorExplainer, GroupWork, copy_error
from stepladder_exchange.network import LOSS_CHECK_S, LossFinder, wait_for_collective
from stepladder_exchange.wait import OTHER_MACHINE, make_loss_error

STORE_SERVER = 0  # the rank that serves the store, unless a launcher does


@contextmanager
def explaining_errors(explain: ErrorExplainer) -> Iterator[None]:
    """Replace an error that is raised in the block by the error that explains it."""
    try:
        yield
    except RuntimeError as error:
        raise explain(error) from None


class CarriedWork(TorchWork):
    """The work of a call that gloo carries; its error names a rank that was lost."""

    def __init__(
        self, work: Any, explain: ErrorExplainer, find_loss: LossFinder | None = None
    ) -> None:
        """Create the work.

        Args:
            work: The work of gloo.
            explain: Returns the error to raise in place of one of gloo's.
            find_loss: Returns the name of a rank that is lost to others, None if there is none.
                Without it, as for a message, nobody asks while gloo waits.
        """
        super().__init__()
        self._work = work
        self._explain = explain
        self._find_loss = find_loss

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Wait for the result, as gloo's work does."""
        with explaining_errors(self._explain):
            if self._find_loss is not None:
                return wait_for_collective(self._work, timeout, self._find_loss)
            is_done: bool = self._work.wait(timeout)
            return is_done

    def synchronize(self) -> None:
        """Wait for the result, as `wait` does."""
        self.wait()

    def get_future(self) -> Future[Any]:
        """Return a future whose value is the list of the result's tensors."""
        future: Future[Any] = self._work.get_future()
        return future.then(self._get_value)

    def _get_value(self, future: Future[Any]) -> Any:
        with explaining_errors(self._explain):
            return future.value()

    def is_completed(self) -> bool:
        """Return whether the call has finished or failed."""
        is_done: bool = self._work.is_completed()
        return is_done

    def is_success(self) -> bool:
        """Return whether the call has finished."""
        has_succeeded: bool = self._work.is_success()
        return has_succeeded

    def exception(self) -> Any:
        """Return why the call has failed, or None."""
        return self._work.exception()

    def result(self) -> Any:
        """Return the tensors that hold the result."""
        return self._work.result()

    def _source_rank(self) -> int:
        """Return from which rank a message came."""
        rank: int = self._work._source_rank()
        return rank


class CarriedMessage(CarriedWork):
    """A large message that gloo carries from or to another machine.

    gloo does not tell who waits for a message that is on its way while its connection breaks, and a
    wait that is cut short closes all connections. So a thread waits in gloo.
    """

    def __init__(self, work: CarriedWork, find_loss: LossFinder, peer: int) -> None:
        """Create the work.

        Args:
            work: The work of the message.
            find_loss: Returns the name of a rank that is lost, None if there is none.
            peer: The name of the other rank.
        """
        super().__init__(work, copy_error)
        self._find_any_loss = find_loss
        self._losses = (peer, OTHER_MACHINE) if peer == STORE_SERVER else (peer,)

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Wait for the message, or until its other rank is known to be lost."""
        end = GroupWork([])
        threading.Thread(
            target=self._await_gloo, args=(end, timeout), name="carried-message", daemon=True
        ).start()
        while not end.wait_for_end(timedelta(seconds=LOSS_CHECK_S)):
            lost = self._find_any_loss()
            if lost is not None and lost in self._losses:
                raise make_loss_error(lost)
        return end.wait()

    def _await_gloo(self, end: GroupWork, timeout: timedelta) -> None:
        error: RuntimeError | None = None
        try:
            self._work.wait(timeout)
        except RuntimeError as raised:
            error = copy_error(raised)
        end.end(error)
