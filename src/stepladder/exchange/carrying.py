"""Messages of two ranks, and the calls that a group which shares memory leaves to gloo."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch.distributed import Work as TorchWork
from torch.futures import Future

from stepladder.exchange.group_base import GroupBase, Tensors
from stepladder.exchange.group_work import (
    NO_TIMEOUT,
    ErrorExplainer,
    GroupWork,
    copy_error,
    do_nothing,
)
from stepladder.exchange.message_queue import MessageQueue
from stepladder.exchange.network import LOSS_CHECK_S, LossFinder, await_loss, wait_for_collective
from stepladder.exchange.wait import OTHER_MACHINE, make_loss_error
from stepladder.rank.torch_fixes import shut_down_connections
from stepladder.rank.torch_fixes_groups import record_collective

MESSAGES = "send", "recv", "recv_anysource"  # after whose failure others can still be sent
# The kernel takes a message up to this size from its sender in one piece, so none is cut off.
MAX_WHOLE_BYTES = 1 << 14
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
        end = GroupWork([], do_nothing)
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


class CarryingGroup(GroupBase):
    """A group with messages, whose gloo group carries calls; their errors name a lost rank."""

    def send(self, tensors: Tensors, rank: int, tag: int) -> Any:
        """Send a tensor to a rank."""
        [tensor] = tensors
        queue = self._find_message_queue(tensor, tag)
        if queue is None:
            return self._carry_message("send", tensor, rank, tag)
        with record_collective("gloo:send", tensors):
            return queue.send(tensor, rank, tag, self._get_default_timeout())

    def recv(self, tensors: Tensors, rank: int, tag: int) -> Any:
        """Receive a tensor from a rank."""
        [tensor] = tensors
        queue = self._find_message_queue(tensor, tag)
        if queue is None:
            return self._carry_message("recv", tensor, rank, tag)
        with record_collective("gloo:recv", tensors):
            return queue.receive(tensor, [rank], tag, self._get_default_timeout())

    def recv_anysource(self, tensors: Tensors, tag: int) -> Any:
        """Receive a tensor from any rank."""
        [tensor] = tensors
        queue = self._find_message_queue(tensor, tag)
        if queue is None:
            return self._carry("recv_anysource", tensor.device, tensors, tag)
        with record_collective("gloo:recvAnySource", tensors):
            return queue.receive(tensor, [], tag, self._get_default_timeout())

    def _find_message_queue(self, tensor: torch.Tensor, tag: int) -> MessageQueue | None:
        """Return what carries a message, None if gloo carries it or refuses it."""
        is_on_host = tensor.device.type == "cpu" and tensor.layout is torch.strided
        is_valid = is_on_host and tensor.is_contiguous() and tag >= 0
        return self._message_queue if is_valid else None

    def monitored_barrier(self, *args: Any, **options: Any) -> None:
        """Wait until all ranks have come here; the first rank names those that do not come."""
        # gloo may never end a send that starts while its connection is being closed, as another
        # rank does after it has found a loss.
        lost_rank = self._find_loss_of_others()
        if lost_rank is not None:
            raise make_loss_error(lost_rank)
        with explaining_errors(partial(self._explain_loss, is_collective=True)):
            self._torch_group.monitored_barrier(*args, **options)

    def split_group(self, *args: Any, **options: Any) -> Any:
        """Return a group of some of the ranks, which has torch's back ends alone.

        torch reads the store of the group that it splits. This class keeps its store elsewhere, so
        the group of torch with the same back ends is split in its place.
        """
        group = self._torch_group
        group._set_group_name(self.group_name)
        group._set_group_desc(self.group_desc)
        return group.split_group(*args, **options)

    def _carry_message(self, method: str, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        """Let the back end of a tensor's device carry it to or from a peer."""
        network = self._network
        work = self._carry(method, tensor.device, [tensor], peer, tag)
        if network is None or tensor.nbytes <= MAX_WHOLE_BYTES or not isinstance(work, CarriedWork):
            return work
        return CarriedMessage(work, self._find_loss_of_others, self._names[peer])

    def _carry(self, method: str, device: torch.device, *args: object) -> Any:
        """Let the back end of a device start a call that shared memory does not carry.

        Args:
            method: The name of its method.
            device: Where the tensors are.
            *args: The arguments of the method.

        Returns:
            The work.
        """
        start = getattr(self._get_backend(device), method)
        if device.type != "cpu" or not self.is_shared:
            return start(*args)
        is_collective = method not in MESSAGES
        explain = partial(self._explain_loss, is_collective=is_collective)
        find_loss = self._find_loss_of_others if is_collective else None
        with explaining_errors(explain):
            return CarriedWork(start(*args), explain, find_loss)

    def _find_loss_of_others(self) -> int | None:
        """Return the name of a rank for whose loss a call of another rank has failed."""
        memory = self._memory
        lost = None if memory is None else memory.waiter.find_recorded_loss()
        if lost is None and self._network is not None:
            lost = self._network.find_loss()
        return lost

    def _explain_loss(self, error: RuntimeError, is_collective: bool) -> RuntimeError:
        """Return the error of a call that gloo has carried: it names a lost rank, if there is one.

        After a failed collective this rank shuts its connections down. Otherwise a rank that waits
        for this one, and not for the lost one, would wait until its timeout.
        """
        memory = self._memory
        lost_rank = None if memory is None else await_loss(memory.waiter, self._network)
        if lost_rank is None:
            return error
        if is_collective:
            shut_down_connections(self._connections)
        return make_loss_error(lost_rank)
