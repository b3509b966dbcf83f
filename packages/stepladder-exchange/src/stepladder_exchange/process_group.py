"""A process group of torch.distributed that shares memory: how it is formed, and how it ends.

Its gloo group carries what shared memory does not: tensors on other devices, sparse tensors, and
every collective that the table of collectives.py has not. The caller sees one group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch.distributed import ProcessGroupGloo, Store  # type: ignore[attr-defined]

from stepladder_exchange.carried_work import CarriedMessage, CarriedWork, explaining_errors
from stepladder_exchange.collectives import C10D, COLLECTIVES, Call, MemoryCollective, find_tensors
from stepladder_exchange.flight_record import find_flight_record
from stepladder_exchange.group_work import CollectiveQueue, GroupWork
from stepladder_exchange.message_queue import MessageQueue
from stepladder_exchange.network import NodeNetwork, await_loss
from stepladder_exchange.plan import make_large_halves
from stepladder_exchange.rendezvous import share_memory
from stepladder_exchange.routing import can_share
from stepladder_exchange.shared_memory import SharedMemory
from stepladder_exchange.torch_fixes_gloo import (
    keep_backward_context_from_gloo,
    list_tcp_connections,
    shut_down_connections,
)
from stepladder_exchange.torch_fixes_profiler import record_collective
from stepladder_exchange.torch_fixes_store import make_store_of_one_group
from stepladder_exchange.wait import make_loss_error
from stepladder_exchange.work import Tensors

TorchGroup: Any = C10D.ProcessGroup  # whose name there stands for a class of ours later
Announcer = Callable[[str, int], None]
LARGE_HALF_BYTES = 1 << 22
# The titles that a profiler shows for messages, after whose failure others can still be sent.
MESSAGES = {"send": "gloo:send", "recv": "gloo:recv", "recv_anysource": "gloo:recvAnySource"}
# The kernel takes a message up to this size from its sender in one piece, so none is cut off.
MAX_WHOLE_BYTES = 1 << 14


class SharedMemoryGroup(TorchGroup):  # type: ignore[misc]
    """A group of ranks that share memory if they can, and that holds a gloo group.

    It has a method for each name in the table of collectives, which starts the collective and
    returns its work. Reductions are done in rank order.
    """

    def __init__(
        self, store: Store, rank: int, size: int, announce: Announcer | None = None
    ) -> None:
        """Create a group without a back end.

        Args:
            store: A store of this group alone.
            rank: This rank.
            size: The number of ranks.
            announce: Called on rank 0 when the ranks have agreed on how they exchange tensors,
                with the reason why they share no memory ("" if they do), and the number of
                machines.
        """
        keep_backward_context_from_gloo()
        super().__init__(rank, size)  # with a store, torch does not accept a class of Python
        # Calls torch's methods in place of `super()`: those of a class of Python hold the
        # interpreter's lock, and gloo's threads wait for it with gloo's lock in hand.
        self._torch_group = TorchGroup(store, rank, size)
        self.obstacle = "there is no gloo group for tensors in the host's memory"
        self._own_store = store
        self._has_backend = False
        self._announce = announce
        self._memory: SharedMemory | None = None
        self._network: NodeNetwork | None = None
        self._queue: CollectiveQueue | None = None
        self._message_queue: MessageQueue | None = None
        self._gloo: ProcessGroupGloo | None = None
        self._names: Sequence[int] = ()  # the number by which messages name each rank
        self._connections = list_tcp_connections()  # of the process; then of the gloo group
        self._flight_record = find_flight_record()

    def get_group_store(self) -> Store:
        """Return the store of this group."""
        return self._own_store

    @property
    def is_shared(self) -> bool:
        """Whether the ranks share memory; otherwise gloo carries everything."""
        return self._memory is not None

    # -- how it is formed, and how it ends ---------------------------------------------------------

    def _register_backend(
        self, device: torch.device, backend_type: Any, backend: Any = None
    ) -> None:
        """Take a back end for a device, and share memory beside a gloo group for the host."""
        super()._register_backend(device, backend_type, backend)
        self._torch_group._register_backend(device, backend_type, backend)
        if not self._has_backend:  # the first one is the default
            self._torch_group._set_default_backend(backend_type)
            self._has_backend = True
        if device.type != "cpu" or self._gloo is not None:
            return
        if isinstance(backend, ProcessGroupGloo):
            self._gloo = backend
            self._connections = list_tcp_connections() - self._connections
            self._share_memory(backend)
        elif isinstance(backend, C10D._ProcessGroupWrapper):
            self.obstacle = "TORCH_DISTRIBUTED_DEBUG=DETAIL compares all collectives there"
            self._announce_exchange(backend.wrapped_pg, 1)

    def _share_memory(self, gloo: ProcessGroupGloo) -> None:
        rendezvous = share_memory(gloo, self.rank(), self.size())
        self.obstacle = rendezvous.obstacle
        self._announce_exchange(gloo, len(rendezvous.nodes))
        if rendezvous.memory is None:
            return
        node = next(node for node in rendezvous.nodes if self.rank() in node)
        names = self._names = gloo.options.global_ranks_in_group or range(self.size())
        self._memory = SharedMemory(
            rendezvous.memory,
            node.index(self.rank()),
            [rendezvous.pids[rank] for rank in node],
            gloo.options._timeout.total_seconds(),
            [names[rank] for rank in node],
            make_large_halves(LARGE_HALF_BYTES),
        )
        if len(rendezvous.nodes) == 1:
            self._queue = CollectiveQueue(self._memory)
            self._message_queue = MessageQueue(self._memory)
            return
        store = make_store_of_one_group(self._own_store, self.rank())
        network = NodeNetwork(store, gloo, self.rank(), rendezvous.nodes)
        explain = partial(network.leave_after_error, self._memory.waiter)
        self._network = network
        self._queue = CollectiveQueue(self._memory, explain, uses_network=True)

    def _announce_exchange(self, gloo: ProcessGroupGloo, machines: int) -> None:
        is_default = not gloo.options.global_ranks_in_group
        if self._announce is not None and is_default and self.rank() == 0 and self.size() > 1:
            self._announce(self.obstacle, machines)

    def split_group(self, *args: Any, **options: Any) -> Any:
        """Return a group of some of the ranks, which has torch's back ends alone.

        torch reads the store of the group that it splits. This class keeps its store elsewhere, so
        the group of torch with the same back ends is split in its place.
        """
        group = self._torch_group
        group._set_group_name(self.group_name)
        group._set_group_desc(self.group_desc)
        return group.split_group(*args, **options)

    def shutdown(self) -> None:
        """Leave the group."""
        self._leave_group()
        super().shutdown()

    def abort(self) -> None:
        """Leave the group, also if a collective is under way in another thread."""
        if self._queue is not None:
            self._queue.abort()
        self._leave_group()
        super().abort()

    def _leave_group(self) -> None:
        if self._message_queue is not None:  # before this rank leaves: then it sends nothing more
            self._message_queue.close()
        if self._queue is not None:
            self._queue.close()

    # -- collectives -------------------------------------------------------------------------------

    def _start(self, collective: MemoryCollective, arguments: Sequence[Any], opts: Any) -> Any:
        """Start a collective in shared memory, or let gloo start it, and return its work."""
        memory = self._memory
        queue = self._queue
        can_carry = self._network is None or collective.crosses_nodes
        can_carry = can_carry and can_share(find_tensors(arguments))
        if memory is None or queue is None or not can_carry:
            return self._carry(collective.gloo_method, *arguments, opts)
        timeout = opts.timeout
        if timeout.total_seconds() <= 0:
            timeout = self._timeout
        call = Call(memory, self._network, self.rank(), self.size(), opts, timeout)
        stages = collective.run(call, *arguments)
        shown = next(stages, None)
        if shown is None:
            return self._carry(collective.gloo_method, *arguments, opts)
        inputs, outputs = shown

        def run() -> Iterator[None]:
            memory.waiter.set_timeout(timeout.total_seconds())
            yield from stages

        name = f"gloo:{collective.title}"
        on_end = None
        if self._flight_record is not None:
            on_end = self._flight_record.begin(self.group_name, name, inputs)
        with record_collective(name, inputs):
            return queue.start(run(), GroupWork(outputs, on_end), opts.asyncOp)

    @property
    def _timeout(self) -> timedelta:
        """How long a call without a timeout waits for other ranks."""
        assert self._gloo is not None
        timeout: timedelta = self._gloo.options._timeout
        return timeout

    def _carry(self, method: str, *arguments: Any) -> Any:
        """Let the back end of the tensors start a call that shared memory does not carry.

        Args:
            method: The name of its method.
            *arguments: The arguments of the method.

        Returns:
            The work.
        """
        tensor = next(find_tensors(arguments), None)
        start = getattr(self._torch_group, method)  # a back end has not all methods
        if tensor is not None:
            start = getattr(self._get_backend(tensor.device), method, start)
        if tensor is None or tensor.device.type != "cpu" or not self.is_shared:
            return start(*arguments)
        is_collective = method not in MESSAGES
        explain = partial(self._explain_loss, is_collective=is_collective)
        find_loss = None
        if is_collective:
            find_loss = self._find_loss_of_others
        with explaining_errors(explain):
            return CarriedWork(start(*arguments), explain, find_loss)

    def monitored_barrier(self, *args: Any, **options: Any) -> None:
        """Wait until all ranks have come here; the first rank names those that do not come."""
        # gloo may never end a send that starts while its connection is being closed, as another
        # rank does after it has found a loss.
        lost_rank = self._find_loss_of_others()
        if lost_rank is not None:
            raise make_loss_error(lost_rank)
        with explaining_errors(partial(self._explain_loss, is_collective=True)):
            self._torch_group.monitored_barrier(*args, **options)

    # -- messages ----------------------------------------------------------------------------------

    def send(self, tensors: Tensors, rank: int, tag: int) -> Any:
        """Send a tensor to a rank."""
        return self._start_message("send", tensors, [rank], tag)

    def recv(self, tensors: Tensors, rank: int, tag: int) -> Any:
        """Receive a tensor from a rank."""
        return self._start_message("recv", tensors, [rank], tag)

    def recv_anysource(self, tensors: Tensors, tag: int) -> Any:
        """Receive a tensor from any rank."""
        return self._start_message("recv_anysource", tensors, [], tag)

    def _start_message(self, method: str, tensors: Tensors, peers: list[int], tag: int) -> Any:
        """Send or receive a tensor through shared memory, or let gloo carry it or refuse it."""
        [tensor] = tensors
        queue = self._message_queue
        is_on_host = tensor.device.type == "cpu" and tensor.layout is torch.strided
        if queue is not None and is_on_host and tensor.is_contiguous() and tag >= 0:
            with record_collective(MESSAGES[method], tensors):
                if method == "send":
                    return queue.send(tensor, peers[0], tag, self._timeout)
                return queue.receive(tensor, peers, tag, self._timeout)
        work = self._carry(method, tensors, *peers, tag)
        is_cut = self._network is not None and tensor.nbytes > MAX_WHOLE_BYTES and peers
        if is_cut and isinstance(work, CarriedWork):
            return CarriedMessage(work, self._find_loss_of_others, self._names[peers[0]])
        return work

    # -- a loss ------------------------------------------------------------------------------------

    def _find_loss_of_others(self) -> int | None:
        """Return the name of a rank for whose loss a call of another rank has failed."""
        loss = None
        if self._memory is not None:
            loss = self._memory.waiter.find_recorded_loss()
        if loss is None and self._network is not None:
            loss = self._network.find_loss()
        return loss

    def _explain_loss(self, error: RuntimeError, is_collective: bool) -> RuntimeError:
        """Return the error of a call that gloo has carried: it names a lost rank, if there is one.

        After a failed collective this rank shuts its connections down. Otherwise a rank that waits
        for this one, and not for the lost one, would wait until its timeout.
        """
        lost_rank = None
        if self._memory is not None:
            lost_rank = await_loss(self._memory.waiter, self._network)
        if lost_rank is None:
            return error
        if is_collective:
            shut_down_connections(self._connections)
        return make_loss_error(lost_rank)


def _make_method(collective: MemoryCollective) -> Callable[..., Any]:
    """Return the method of a group that starts a collective, as torch calls it."""
    count = collective.argument_count

    def start(group: SharedMemoryGroup, *args: Any, opts: Any = collective.options) -> Any:
        arguments = args[:count]
        [opts] = args[count:] or [opts]
        return group._start(collective, arguments, opts)

    return start


for _name, _collective in COLLECTIVES.items():
    setattr(SharedMemoryGroup, _name, _make_method(_collective))
