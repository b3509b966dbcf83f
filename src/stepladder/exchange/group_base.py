"""A process group of torch.distributed that shares memory: how it is formed, and how it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache, partial
from typing import Any

import torch
from torch.distributed import ProcessGroupGloo, Store, distributed_c10d  # type: ignore[attr-defined]

from stepladder.core.console import print_message
from stepladder.exchange.group_work import CollectiveQueue, GroupWork, Stage, do_nothing
from stepladder.exchange.message_queue import MessageQueue
from stepladder.exchange.network import NodeNetwork
from stepladder.exchange.plan import make_large_halves
from stepladder.exchange.reduction import Reduction
from stepladder.exchange.rendezvous import share_memory
from stepladder.exchange.routing import can_share, find_reduction
from stepladder.exchange.shared_memory import SharedMemory
from stepladder.rank.torch_fixes import list_tcp_connections
from stepladder.rank.torch_fixes_groups import record_collective
from stepladder.rank.torch_fixes_store import make_store_of_one_group

C10D: Any = distributed_c10d  # torch's types of it name neither all classes nor all arguments
TorchGroup: Any = C10D.ProcessGroup  # whose name there stands for a class of ours later
FIRST_GROUP_ID = 1
LARGE_HALF_BYTES = 1 << 22
Tensors = list[torch.Tensor]


@cache
def announce_transport(obstacle: str, machines: int) -> None:
    """Print once how the ranks exchange tensors in the host's memory."""
    if torch.cuda.is_available():
        return  # most tensors are on GPUs, and are NCCL's
    way = "in shared memory"
    if machines > 1:
        way = f"in shared memory within each of {machines} machines, by gloo between them"
    if obstacle:
        print_message(f"the ranks exchange tensors by gloo: {obstacle}")
    else:
        print_message(f"the ranks exchange tensors {way}; --exchange gloo turns it off")


class GroupBase(TorchGroup):  # type: ignore[misc]
    """A group of ranks that share memory if they can, and that holds a gloo group."""

    def __init__(self, store: Store, rank: int, size: int, announces: bool = False) -> None:
        """Create a group without a back end.

        Args:
            store: A store of this group alone.
            rank: This rank.
            size: The number of ranks.
            announces: Whether rank 0 prints how the ranks exchange tensors.
        """
        super().__init__(rank, size)  # with a store, torch does not accept a class of Python
        # Calls torch's methods in place of `super()`: those of a class of Python hold the
        # interpreter's lock, and gloo's threads wait for it with gloo's lock in hand.
        self._torch_group = TorchGroup(store, rank, size)
        self.obstacle = "there is no gloo group for tensors in the host's memory"
        self._own_store = store
        self._has_backend = False
        self._announces = announces
        self._memory: SharedMemory | None = None
        self._network: NodeNetwork | None = None
        self._queue: CollectiveQueue | None = None
        self._message_queue: MessageQueue | None = None
        self._gloo: ProcessGroupGloo | None = None
        self._names: Sequence[int] = ()  # the number by which messages name each rank
        self._connections = list_tcp_connections()  # of the process; then of the gloo group

    def get_group_store(self) -> Store:
        """Return the store of this group."""
        return self._own_store

    @property
    def is_shared(self) -> bool:
        """Whether the ranks share memory; otherwise gloo carries everything."""
        return self._memory is not None

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
            self._announce(backend.wrapped_pg, 1)

    def _share_memory(self, gloo: ProcessGroupGloo) -> None:
        store = make_store_of_one_group(self._own_store, self.rank())
        rendezvous = share_memory(store, self.rank(), self.size())
        self.obstacle = rendezvous.obstacle
        self._announce(gloo, len(rendezvous.nodes))
        if rendezvous.memory is None:
            return
        node = next(node for node in rendezvous.nodes if self.rank() in node)
        names = self._names = gloo.options.global_ranks_in_group or range(self.size())
        self._memory = SharedMemory(
            rendezvous.memory,
            node.index(self.rank()),
            [rendezvous.pids[rank] for rank in node],
            FIRST_GROUP_ID,
            gloo.options._timeout.total_seconds(),
            [names[rank] for rank in node],
            make_large_halves(LARGE_HALF_BYTES),
        )
        if len(rendezvous.nodes) == 1:
            self._queue = CollectiveQueue(self._memory)
            self._message_queue = MessageQueue(self._memory)
            return
        network = NodeNetwork(store, gloo, self.rank(), rendezvous.nodes)
        explain = partial(network.leave_after_error, self._memory.waiter)
        self._network = network
        self._queue = CollectiveQueue(self._memory, explain, uses_network=True)

    def _announce(self, gloo: ProcessGroupGloo, machines: int) -> None:
        is_default = not gloo.options.global_ranks_in_group
        if self._announces and is_default and self.rank() == 0 and self.size() > 1:
            announce_transport(self.obstacle, machines)

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

    def _start(
        self,
        name: str,
        enqueue: Callable[[SharedMemory], Stage | None],
        inputs: Tensors,
        outputs: Tensors,
        opts: Any,
        finish: Callable[[], None] = do_nothing,
    ) -> GroupWork:
        """Start a collective.

        Args:
            name: The name that a profiler shows.
            enqueue: Puts the parts of the collective into the queue of the memory, and returns its
                next stage, if there is one.
            inputs: The tensors that a profiler shows with it.
            outputs: The tensors that will hold the result.
            opts: torch's options.
            finish: Completes the outputs.

        Returns:
            The work.
        """
        memory = self._memory
        queue = self._queue
        gloo = self._gloo
        assert memory is not None and queue is not None and gloo is not None
        timeout = self._get_timeout(opts)

        def enqueue_with_timeout() -> Stage | None:
            memory.waiter.set_timeout(timeout.total_seconds())
            return enqueue(memory)

        with record_collective(f"gloo:{name}", inputs):
            return queue.start(enqueue_with_timeout, GroupWork(outputs, finish), opts.asyncOp)

    def _get_timeout(self, opts: Any) -> timedelta:
        """Return how long a collective with these options waits for other ranks."""
        timeout: timedelta = opts.timeout
        return timeout if timeout.total_seconds() > 0 else self._get_default_timeout()

    def _get_default_timeout(self) -> timedelta:
        """Return how long a call without a timeout waits for other ranks."""
        assert self._gloo is not None
        timeout: timedelta = self._gloo.options._timeout
        return timeout

    def _find_reduction(
        self, tensors: Tensors, opts: Any, across_nodes: bool = False
    ) -> Reduction | None:
        """Return the reduction that shared memory does with these tensors, None if gloo does it.

        Args:
            tensors: The tensors.
            opts: torch's options.
            across_nodes: Whether it can also be done for ranks on several machines.
        """
        if not self._can_share(tensors, across_nodes):
            return None
        return find_reduction(opts.reduceOp, tensors[0].dtype)

    def _can_share(self, tensors: Tensors, across_nodes: bool = False) -> bool:
        return self.is_shared and (across_nodes or self._network is None) and can_share(tensors)
