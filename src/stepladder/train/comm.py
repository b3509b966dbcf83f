"""The only owner of the process group and of collectives.

Every collective of a run goes through `Comm`, so "all ranks call it, in the same order" can be read
in one file. With one process each is a no-op, so callers need no second code path."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from stepladder.core.errors import InputError, PeerLost
from stepladder.core.world import World
from stepladder.rank.membership import GROUP_LATE, Membership, get_control_channel
from stepladder.rank.progress import COUNT, GROUP, REGROUP, WAITS, Progress
from stepladder.rank.torch_fixes import list_tcp_connections, shut_down_connections
from stepladder.train.connections import raising_peer_lost
from stepladder.train.group_setup import (
    init_process_group,
    join_shared_memory,
    set_collective_timeout,
)
from stepladder.train.group_teardown import can_use_nccl, destroy_group, poll_work
from stepladder.train.phases import EXCHANGING, Phases
from stepladder.train.serialize import deserialize, serialize
from stepladder.train.shared_memory import SharedMemory
from stepladder.train.shared_memory_work import CombineFunction, Work

T = TypeVar("T")
SECONDS_TO_REGROUP, SECONDS_BY_NCCL = (
    1.0,
    10.0,
)  # all are there already; twice as long after each try
# The new name since torch 2.13, which warns of the old one.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Pending:
    """A collective under way; `wait()` before its tensor is read."""

    def __init__(self, work: dist.Work | Work | None, comm: Comm | None = None) -> None:
        self._work, self._comm = work, comm
        if comm is not None:
            self._number = comm.progress.slots[COUNT]
            if comm.shared_memory is None:
                comm.under_way.add(self)

    def wait(self) -> None:
        work, comm = self._work, self._comm
        if work is None or comm is None or (isinstance(work, Work) and work.is_met):
            return
        words = comm.progress.slots
        words[WAITS] = self._number
        try:
            with raising_peer_lost:
                comm.wait_for(work)
        finally:
            words[WAITS] = 0
            if comm.shared_memory is None and self.is_finished:
                comm.under_way.discard(self)

    @property
    def is_finished(self) -> bool:
        return self._work is None or self._work.is_completed()


class Comm:
    """Collectives over the ranks of `world`. `device`: where this rank computes.  phases: what it
    is at.

    group: the ranks that all_reduce is over, by default all.  timeout_seconds: how long a
    collective waits."""

    def __init__(
        self,
        world: World,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        timeout_seconds: float = 600,
    ) -> None:
        self.world, self.device, self.progress, self.group = world, device, Progress(), group
        self.phases = Phases(self.progress.slots)
        self.members = list(
            range(world.world_size)
        )  # the ranks' numbers in the launch, in this group's order
        self.loss_reasons: list[str] = []  # what became of ranks that were lost before this group
        self.group_number = 0  # of the groups that ranks formed in place of a broken one
        self.timeout_seconds = timeout_seconds
        self.connections: set[str] = set()  # of the process group
        self.under_way: set[Pending] = set()  # by way of the process group
        self.loss_count = 0  # of ranks, before the group was formed
        self.by_nccl = can_use_nccl(world, device)
        self.shared_memory: SharedMemory | None = (
            None  # by way of which the group's collectives go, where it has some
        )

    @property
    def alone(self) -> bool:
        """Whether there is one rank only: then no collective is one."""
        return self.world.world_size == 1

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        """Start adding `tensor` over ranks, in place. Complete after `.wait()`."""
        if self.alone:
            return Pending(None)
        self.progress.record_collective("all_reduce", tensor.numel())
        return self._start((self.shared_memory or dist).all_reduce, tensor, group=self.group)

    def all_to_all(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_sizes: list[int],
        sent_sizes: list[int],
    ) -> Pending:
        """Start sending each rank its part of the flat `sent`. Not for one process alone.

        With `memory` all sizes are equal.
        """
        self.progress.record_collective("all_to_all", -1)
        collective = (
            dist.all_to_all_single if self.shared_memory is None else self.shared_memory.all_to_all
        )
        return self._start(collective, received, sent, received_sizes, sent_sizes)

    def all_gather(self, gathered: torch.Tensor, mine: torch.Tensor, block: str = "") -> Pending:
        """Start collecting every rank's flat `mine`, in rank order. Not for one process alone.

        block: of the model, whose weights these are; a rank with another one is found by `memory`.
        """
        if block:
            self.progress.record_block_collective("all_gather", block, mine.numel())
        else:
            self.progress.record_collective("all_gather", mine.numel())
        if self.shared_memory is not None:
            return self._start(
                self.shared_memory.all_gather, gathered.split(mine.numel()), mine, block=block
            )
        return self._start(_all_gather, gathered, mine)

    def reduce_scatter(self, mine: torch.Tensor, whole: torch.Tensor, block: str) -> Pending:
        """With `memory`: start adding the flat `whole` over ranks. `mine` gets this rank's slice of
        the sum.

        block: as of `all_gather`.
        """
        assert self.shared_memory is not None
        self.progress.record_block_collective("reduce_scatter", block, whole.numel())
        return self._start(self.shared_memory.reduce_scatter, mine, whole, block=block)

    def combine(
        self, mine: torch.Tensor, rows: tuple[int, ...], length: int, fold: CombineFunction
    ) -> Pending:
        """Start an all-reduce whose additions are `fold`'s: the `combine` of `memory`, where there
        is one.
        """
        assert self.shared_memory is not None
        self.progress.record_collective("all_reduce", length)
        return self._start(self.shared_memory.combine, mine, rows, length, fold)

    def _start(
        self, collective: Callable[..., dist.Work | Work], *args: Any, **options: Any
    ) -> Pending:
        with raising_peer_lost:
            return Pending(collective(*args, async_op=True, **options), self)

    def sum(self, values: np.ndarray) -> np.ndarray:
        """Sum over ranks in float64, any shape. Exact where all ranks but one contribute zero."""
        tensor = torch.from_numpy(np.array(values, dtype=np.float64))
        self.all_reduce(tensor).wait()
        return tensor.numpy()

    def start_sum(self, values: list[float]) -> tuple[Pending, Callable[[], list[float]]]:
        """Start adding a few numbers over ranks, in float64; with what gives the sums, once it was
        waited for.
        """
        if self.alone:
            return Pending(None), lambda: values
        if self.shared_memory is None:
            tensor = torch.tensor(values, dtype=torch.float64)
            return self.all_reduce(tensor), tensor.tolist
        self.progress.record_collective("all_reduce", len(values))
        work = self.shared_memory.start_sum(values)
        return self._start(lambda **_: work), work.found

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        """Overwrite `tensor` with that of rank `source`."""
        if not self.alone:
            self.progress.record_collective("broadcast", tensor.numel())
            self._start((self.shared_memory or dist).broadcast, tensor, src=source).wait()

    def broadcast_model(self, model: torch.nn.Module) -> None:
        """Overwrite parameters and buffers with rank 0's."""
        if self.alone:
            return
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                dense = tensor.detach().contiguous()  # a channels_last weight is not contiguous
                self.broadcast(dense)
                tensor.copy_(dense)

    def broadcast_bytes(self, data: bytes | None, source: int = 0) -> bytes:
        """The bytes of rank `source` on every rank. The others pass None."""
        if self.alone:
            return data or b""
        length = torch.tensor([len(data or b"")])
        self.broadcast(length, source)
        buffer = torch.empty(int(length), dtype=torch.uint8)
        if data:
            buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        self.broadcast(buffer, source)
        return buffer.numpy().tobytes()

    def init_process_group(self, timeout_seconds: float) -> None:
        """The other ranks of `world`, in a process group."""
        before = list_tcp_connections()
        init_process_group(self.world, self.device, timeout_seconds, self.by_nccl)
        self.connections = list_tcp_connections() - before
        with raising_peer_lost:
            self.shared_memory = join_shared_memory(self.world, self.device, self.timeout_seconds)
        if (launcher := get_control_channel()) is not None:
            launcher.set_loss_handler(self.shut_down_connections)

    def shut_down_connections(self) -> None:
        """End the group's connections, so that no collective waits for a lost rank. Called by any
        thread.
        """
        shut_down_connections(self.connections)

    def regroup(self, reason: bytes) -> bool:
        """Leave the group, and meet the ranks of the next one. False where there is none.

        reason: one of rank/membership.py's.
        """
        launcher, patience = (
            get_control_channel(),
            SECONDS_BY_NCCL if self.by_nccl else SECONDS_TO_REGROUP,
        )
        while launcher is not None:
            self._leave()
            self.progress.slots[REGROUP] = 0
            found, self.loss_count = launcher.await_membership(reason)
            if found is None:
                return False
            self._become_one_of(found)
            if self.alone:
                return True
            with suppress(dist.DistError, RuntimeError):  # one more has gone meanwhile, or is slow
                self.init_process_group(patience)
                if launcher.num_losses == self.loss_count:
                    set_collective_timeout(self.timeout_seconds)
                    return True
            reason, patience = GROUP_LATE, min(2 * patience, self.timeout_seconds)
        return False

    def wait_for(self, work: dist.Work | Work) -> None:
        """Until the collective is done, or a rank is lost: gloo may wait on for a connection that
        has ended.
        """
        if self.by_nccl:  # that only queues the wait
            self._wait_for(work)
        else:
            with self.phases(EXCHANGING):
                self._wait_for(work)

    def _wait_for(self, work: dist.Work | Work) -> None:
        launcher = get_control_channel()
        if launcher is None or isinstance(work, Work):
            work.wait()
            return
        until = time.monotonic() + self.timeout_seconds
        while not work.is_completed():
            poll_work(work, self.by_nccl, until)
            if launcher.num_losses != self.loss_count and not work.is_completed():
                raise PeerLost("another rank was lost")
        work.wait()

    def _leave(self) -> None:
        if dist.is_initialized():
            self.leave_shared_memory()
            self.shut_down_connections()
            under_way, self.under_way = self.under_way, set()
            destroy_group(self.by_nccl, under_way)

    def leave_shared_memory(self) -> None:
        """Go no more by way of shared memory: nobody waits there for this rank."""
        if self.shared_memory is not None:
            self.shared_memory.leave_group()
            self.shared_memory = None

    def _become_one_of(self, found: Membership) -> None:
        number, words = self.members[self.world.rank], self.progress.slots
        words[COUNT], words[GROUP] = 0, found.number  # ranks of a group have begun as many
        self.members, self.group_number, self.loss_reasons = (
            found.members,
            found.number,
            found.loss_reasons,
        )
        rank = found.members.index(number)
        here = [one for one, node in enumerate(found.nodes) if node == found.nodes[rank]]
        self.world = replace(
            self.world,
            rank=rank,
            world_size=len(found.members),
            local_rank=here.index(rank),
            ranks_per_node=len(here),
            init_method=found.init_method,
        )

    def on_first(self, function: Callable[[], T]) -> T:
        """Call `function` on rank 0; its value, or its InputError, on every rank.

        The value is made of what JSON has, bytes, tuples and snapshots: nothing that is read here
        can run code. Raises TypeError for another one."""
        if self.alone:
            return function()
        told = b""
        if self.world.is_first:
            try:
                told = serialize({"value": function()})
            except InputError as error:
                told = serialize({"found": error.problem, "hint": error.hint})
        answer = deserialize(self.broadcast_bytes(told))
        if "found" in answer:
            raise InputError(answer["found"], answer["hint"])
        value: T = answer["value"]
        return value

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, in rank order, on every rank. All of one length."""
        if self.alone:
            return [data]
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        parts = [torch.empty_like(mine) for _ in range(self.world.world_size)]
        self.progress.record_collective("all_gather", mine.numel())
        self._start((self.shared_memory or dist).all_gather, parts, mine).wait()
        return [part.numpy().tobytes() for part in parts]

    def make_subgroup(self, names: list[bytes]) -> Comm:
        """The same ranks, whose all_reduce is over those of one name; names: of all ranks. A
        collective.
        """
        sets = {name: [rank for rank, other in enumerate(names) if other == name] for name in names}
        groups = {name: dist.new_group(ranks) for name, ranks in sets.items()}
        return Comm(self.world, self.device, groups[names[self.world.rank]])

    def exact_mean(self, total: float, count: int) -> float:
        """Mean over all ranks' samples: sums and counts are added, never means."""
        whole, counted = self.sum(np.array([total, count])).tolist()
        return whole / counted if counted else float("nan")
