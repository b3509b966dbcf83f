"""The collectives of a training run, and the only owner of its process group.

Every collective goes through `Comm`, so the rule that all ranks call the same collectives in the
same order can be checked in one file. With one process each collective does nothing, so callers
need no second code path.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from stepladder.core.errors import InputError, PeerLost
from stepladder.core.world import World
from stepladder.rank.membership import GROUP_LATE, Membership, get_control_channel
from stepladder.rank.progress import COLLECTIVE, GROUP, REGROUP, VARYING_SIZE, Progress
from stepladder.train.group_setup import (
    init_process_group,
    join_shared_memory,
    set_collective_timeout,
)
from stepladder.train.group_teardown import can_use_nccl, destroy_group, poll_work
from stepladder.train.peer_loss import raising_peer_lost
from stepladder.train.pending import Pending
from stepladder.train.phases import EXCHANGING, Phases
from stepladder.train.serialize import deserialize, serialize
from stepladder_exchange.shared_memory import SharedMemory
from stepladder_exchange.torch_fixes_gloo import list_tcp_connections, shut_down_connections
from stepladder_exchange.work import CombineFunction, Work

T = TypeVar("T")

# How long the ranks of a new group wait for each other at first; doubled after each attempt.
# All of them are running already, so gloo needs little time; NCCL sets up its communicators.
REGROUP_TIMEOUT_S = 1.0
REGROUP_TIMEOUT_NCCL_S = 10.0

# torch 2.13 renamed this function and warns about the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Comm:
    """The collectives over the ranks of one group, and how the ranks form the next group."""

    def __init__(
        self,
        world: World,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        timeout_seconds: float = 600,
    ) -> None:
        """Create the collectives of a group. Nothing is sent before `init_process_group`.

        Args:
            world: This rank and how many there are.
            device: The device on which this rank computes.
            group: The ranks of `all_reduce` and `all_gather`; all ranks by default.
            timeout_seconds: How long a collective waits for the other ranks.
        """
        self.world = world
        """This rank and how many there are; replaced after a loss."""
        self.device = device
        self.group = group
        self.timeout_seconds = timeout_seconds
        self.progress = Progress()
        self.phases = Phases(self.progress.slots)
        """Context managers that record what this rank is doing: `with comm.phases(READING)`."""
        self.members = list(range(world.world_size))
        """The rank numbers of the launch, in the order of this group's ranks."""
        self.loss_reasons: list[str] = []
        """One sentence for each rank that was lost before this group was formed."""
        self.loss_count = 0  # ranks that were lost before this group was formed
        self.group_number = 0  # counts the groups that were formed after a loss
        self.connections: set[str] = set()  # TCP connections of the process group
        self.unfinished: set[Pending] = set()  # collectives of the process group
        self.uses_nccl = can_use_nccl(world, device)
        self.shared_memory: SharedMemory | None = None
        """Carries the collectives when the ranks share memory; None otherwise."""

    @property
    def alone(self) -> bool:
        """Whether there is only one rank, so that every collective is a no-op."""
        return self.world.world_size == 1

    # -- collectives -------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor) -> Pending:
        """Start adding `tensor` over the ranks, in place."""
        if self.alone:
            return Pending(None)
        self.progress.record_collective("all_reduce", tensor.numel())
        return self._start((self.shared_memory or dist).all_reduce, tensor, group=self.group)

    def all_to_all(
        self, received: Tensor, sent: Tensor, received_sizes: list[int], sent_sizes: list[int]
    ) -> Pending:
        """Start sending each rank its part of the flat `sent`; shared memory needs equal sizes."""
        self.progress.record_collective("all_to_all", VARYING_SIZE)
        if self.shared_memory is None:
            return self._start(dist.all_to_all_single, received, sent, received_sizes, sent_sizes)
        return self._start(
            self.shared_memory.all_to_all, received, sent, received_sizes, sent_sizes
        )

    def all_gather(self, gathered: Tensor, part: Tensor, block: str = "") -> Pending:
        """Start collecting every rank's flat `part`, of the model block `block`, in rank order."""
        if block:
            self.progress.record_block_collective("all_gather", block, part.numel())
        else:
            self.progress.record_collective("all_gather", part.numel())
        if self.shared_memory is None:
            return self._start(_all_gather, gathered, part, group=self.group)
        parts = gathered.split(part.numel())
        return self._start(self.shared_memory.all_gather, parts, part, block=block)

    def reduce_scatter(self, result: Tensor, tensor: Tensor, block: str) -> Pending:
        """Start adding the flat `tensor` over the ranks; `result` gets this rank's slice."""
        assert self.shared_memory is not None
        self.progress.record_block_collective("reduce_scatter", block, tensor.numel())
        slices = tensor.split(len(result))
        return self._start(self.shared_memory.reduce_scatter, result, slices, block=block)

    def combine(
        self, rows: Tensor, rows_per_rank: tuple[int, ...], length: int, combine: CombineFunction
    ) -> Pending:
        """Start an all-reduce of rows of `length` elements, whose additions `combine` makes."""
        assert self.shared_memory is not None
        self.progress.record_collective("all_reduce", length)
        return self._start(self.shared_memory.combine, rows, rows_per_rank, length, combine)

    def _start(
        self, collective: Callable[..., dist.Work | Work], *args: Any, **options: Any
    ) -> Pending:
        with raising_peer_lost:
            return Pending(collective(*args, async_op=True, **options), self)

    def sum(self, values: np.ndarray) -> np.ndarray:
        """Return the float64 sum over the ranks: exact when all ranks but one contribute zero."""
        tensor = torch.from_numpy(np.array(values, dtype=np.float64))
        self.all_reduce(tensor).wait()
        return tensor.numpy()

    def start_sum(self, values: list[float]) -> tuple[Pending, Callable[[], list[float]]]:
        """Start adding a few numbers over the ranks, in float64.

        Returns:
            The collective that was started, and a function that returns the sums once the
            collective is done.
        """
        if self.alone:
            return Pending(None), lambda: values
        if self.shared_memory is None:
            tensor = torch.tensor(values, dtype=torch.float64)
            return self.all_reduce(tensor), tensor.tolist
        self.progress.record_collective("all_reduce", len(values))
        work = self.shared_memory.start_sum(values)
        return self._start(lambda **_: work), work.result

    def exact_mean(self, total: float, count: int) -> float:
        """Return the mean over the samples of all ranks: sums and counts are added, never means."""
        total_sum, count_sum = self.sum(np.array([total, count])).tolist()
        return total_sum / count_sum if count_sum else float("nan")

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Overwrite `tensor` with the tensor of rank `source`."""
        if not self.alone:
            self.progress.record_collective("broadcast", tensor.numel())
            self._start((self.shared_memory or dist).broadcast, tensor, src=source).wait()

    def broadcast_model(self, model: torch.nn.Module) -> None:
        """Overwrite the parameters and buffers with those of rank 0."""
        if self.alone:
            return
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                dense = tensor.detach().contiguous()  # a channels_last weight is not contiguous
                self.broadcast(dense)
                tensor.copy_(dense)

    def broadcast_bytes(self, data: bytes | None, source: int = 0) -> bytes:
        """Return the bytes of rank `source` on every rank. The other ranks pass None."""
        if self.alone:
            return data or b""
        length = torch.tensor([len(data or b"")])
        self.broadcast(length, source)
        buffer = torch.empty(int(length), dtype=torch.uint8)
        if data:
            buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        self.broadcast(buffer, source)
        return buffer.numpy().tobytes()

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Return every rank's bytes in rank order. All ranks pass the same number of bytes."""
        if self.alone:
            return [data]
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        parts = [torch.empty_like(tensor) for _ in range(self.world.world_size)]
        self.progress.record_collective("all_gather", tensor.numel())
        self._start((self.shared_memory or dist).all_gather, parts, tensor).wait()
        return [part.numpy().tobytes() for part in parts]

    def on_first(self, function: Callable[[], T]) -> T:
        """Call `function` on rank 0, and return its value on every rank.

        Args:
            function: Returns values that JSON has, bytes, tuples and snapshots. Reading them can
                run no code.

        Returns:
            The value that the function returned on rank 0.

        Raises:
            InputError: The function raised it on rank 0; every rank raises it.
            TypeError: The function returned a value of another type.
        """
        if self.alone:
            return function()
        message = b""
        if self.world.is_first:
            try:
                message = serialize({"value": function()})
            except InputError as error:
                message = serialize({"found": error.problem, "hint": error.hint})
        reply = deserialize(self.broadcast_bytes(message))
        if "found" in reply:
            raise InputError(reply["found"], reply["hint"])
        value: T = reply["value"]
        return value

    def make_subgroup(self, labels: Sequence[Hashable]) -> Comm:
        """Return a Comm of the ranks with this rank's label. All ranks must call this method.

        Its `world` counts those ranks, and its `all_reduce` and `all_gather` are among them.
        """
        groups = {}
        for label in dict.fromkeys(labels):
            ranks = [rank for rank, rank_label in enumerate(labels) if rank_label == label]
            groups[label] = dist.new_group(ranks)
        group = groups[labels[self.world.rank]]
        return Comm(self.world.within_subgroup(labels), self.device, group)

    def wait_for(self, work: dist.Work | Work) -> None:
        """Wait until the collective is done or a rank is lost.

        gloo alone might wait on although a connection has ended.

        Raises:
            PeerLost: Another rank was lost.
        """
        if self.uses_nccl:  # NCCL only queues the wait, so there is no time to measure
            self._wait_or_detect_loss(work)
        else:
            with self.phases(EXCHANGING):
                self._wait_or_detect_loss(work)

    def _wait_or_detect_loss(self, work: dist.Work | Work) -> None:
        launcher = get_control_channel()
        if launcher is None or isinstance(work, Work):
            work.wait()
            return
        deadline = time.monotonic() + self.timeout_seconds
        while not work.is_completed():
            poll_work(work, self.uses_nccl, deadline)
            if launcher.num_losses != self.loss_count and not work.is_completed():
                raise PeerLost("another rank was lost")
        work.wait()

    # -- forming and leaving groups ----------------------------------------------------------------

    def init_process_group(self, timeout_seconds: float) -> None:
        """Form the process group with the other ranks of `world`."""
        connections_before = list_tcp_connections()
        init_process_group(self.world, self.device, timeout_seconds, self.uses_nccl)
        self.connections = list_tcp_connections() - connections_before
        with raising_peer_lost:
            self.shared_memory = join_shared_memory(self.world, self.device, self.timeout_seconds)
        launcher = get_control_channel()
        if launcher is not None:
            launcher.set_loss_handler(self.shut_down_connections)

    def shut_down_connections(self) -> None:
        """Shut down the group's connections, so nothing waits for a lost rank. Thread-safe."""
        shut_down_connections(self.connections)

    def regroup(self, reason: bytes) -> bool:
        """Leave the group and form the next one with the remaining ranks.

        Args:
            reason: A reason of rank/membership.py, sent to the launcher.

        Returns:
            Whether there is a next group.
        """
        launcher = get_control_channel()
        timeout = REGROUP_TIMEOUT_NCCL_S if self.uses_nccl else REGROUP_TIMEOUT_S
        while launcher is not None:
            self._leave_group()
            self.progress.slots[REGROUP] = 0
            membership, self.loss_count = launcher.await_membership(reason)
            if membership is None:
                return False
            self._adopt_membership(membership)
            if self.alone:
                return True
            with suppress(dist.DistError, RuntimeError):  # one more rank was lost, or one is slow
                self.init_process_group(timeout)
                if launcher.num_losses == self.loss_count:
                    set_collective_timeout(self.timeout_seconds)
                    return True
            reason = GROUP_LATE
            timeout = min(2 * timeout, self.timeout_seconds)
        return False

    def _leave_group(self) -> None:
        if dist.is_initialized():
            self.leave_shared_memory()
            self.shut_down_connections()
            unfinished = self.unfinished
            self.unfinished = set()
            destroy_group(self.uses_nccl, unfinished)

    def leave_shared_memory(self) -> None:
        """Stop using shared memory, and release the ranks that wait there for this rank."""
        if self.shared_memory is not None:
            self.shared_memory.leave_group()
            self.shared_memory = None

    def prepare_to_join(self, launch_rank: int) -> None:
        """Prepare this rank, which has no group yet, for the group that it will join.

        Until then it must not act as the first rank, or as one that is alone.

        Args:
            launch_rank: The number of this rank in the launch.
        """
        self.world = replace(self.world, rank=1, world_size=2)
        self.members = [-1, launch_rank]

    def _adopt_membership(self, membership: Membership) -> None:
        """Take this rank's place in a new group."""
        launch_rank = self.members[self.world.rank]
        self.progress.slots[COLLECTIVE] = 0  # all ranks of a group have started as many collectives
        self.progress.slots[GROUP] = membership.number
        self.members = membership.members
        self.group_number = membership.number
        self.loss_reasons = membership.loss_reasons
        rank = membership.members.index(launch_rank)
        node = membership.nodes[rank]
        ranks_of_node = [peer for peer, number in enumerate(membership.nodes) if number == node]
        self.world = replace(
            self.world,
            rank=rank,
            world_size=len(membership.members),
            local_rank=ranks_of_node.index(rank),
            ranks_per_node=len(ranks_of_node),
            init_method=membership.init_method,
        )
