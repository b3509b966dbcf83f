"""The only owner of the process group and of collectives.

Every collective of a run goes through `Comm`, so "all ranks call it, in the same order" can be read in
one file. With one process each is a no-op, so callers need no second code path.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import urlsplit

import numpy as np
import torch
import torch.distributed as dist

from stepladder.core.address import await_name, name_interface, on_this_machine
from stepladder.core.errors import InputError, PeerLost
from stepladder.core.numbers import number_in
from stepladder.core.world import World
from stepladder.rank.gloo import spare_gloo_the_gil, until_gloo_rests
from stepladder.rank.loopback import keep_store_on_loopback
from stepladder.rank.progress import COUNT, WAITS, Progress
from stepladder.rank.refusal import SECONDS_TO_LEAVE, says_it
from stepladder.train.phases import Phases
from stepladder.train.wire import from_bytes, to_bytes

T = TypeVar("T")
# The new name since torch 2.13, which warns of the old one.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Pending:
    """A collective under way; `wait()` before its tensor is read."""

    def __init__(self, work: dist.Work | None, words: Any = None) -> None:
        self._work, self._words = work, words
        self._number = words[COUNT] if words is not None else 0

    def wait(self) -> None:
        if self._work is not None:
            self._words[WAITS] = self._number
            with _naming_lost_peers():
                self._work.wait()
            self._words[WAITS] = 0


class Comm:
    """Collectives over the ranks of `world`. `device`: where this rank computes.  phases: what it is at.

    group: the ranks that all_reduce is over, by default all.
    """

    def __init__(self, world: World, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        self.world, self.device, self.progress, self.group = world, device, Progress(), group
        self.phases = Phases(self.progress.words)

    @property
    def alone(self) -> bool:
        """Whether there is one rank only: then no collective is one."""
        return self.world.world_size == 1

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        """Start adding `tensor` over ranks, in place. Complete after `.wait()`."""
        if self.alone:
            return Pending(None)
        self.progress.reach("all_reduce", tensor.numel())
        return self._start(dist.all_reduce, tensor, group=self.group)

    def all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, received_sizes: list[int], sent_sizes: list[int]
    ) -> Pending:
        """Start sending each rank its part of the flat `sent`. Not for one process alone."""
        self.progress.reach("all_to_all", -1)
        return self._start(dist.all_to_all_single, received, sent, received_sizes, sent_sizes)

    def all_gather(self, gathered: torch.Tensor, mine: torch.Tensor) -> Pending:
        """Start collecting every rank's flat `mine`, in rank order. Not for one process alone."""
        self.progress.reach("all_gather", mine.numel())
        return self._start(_all_gather, gathered, mine)

    def _start(self, collective: Callable[..., dist.Work], *args: Any, **options: Any) -> Pending:
        with _naming_lost_peers():
            return Pending(collective(*args, async_op=True, **options), self.progress.words)

    def sum(self, values: np.ndarray) -> np.ndarray:
        """Sum over ranks in float64, any shape. Exact where all ranks but one contribute zero."""
        tensor = torch.from_numpy(np.array(values, dtype=np.float64))
        self.all_reduce(tensor).wait()
        return tensor.numpy()

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Overwrite `tensor` with rank 0's."""
        if not self.alone:
            self.progress.reach("broadcast", tensor.numel())
            self._start(dist.broadcast, tensor, src=0).wait()

    def broadcast_model(self, model: torch.nn.Module) -> None:
        """Overwrite parameters and buffers with rank 0's."""
        if self.alone:
            return
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                dense = tensor.detach().contiguous()  # a channels_last weight is not contiguous
                self.broadcast(dense)
                tensor.copy_(dense)

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        """Rank 0's bytes on every rank. The others pass None."""
        if self.alone:
            return data or b""
        length = torch.tensor([len(data or b"")])
        self.broadcast(length)
        buffer = torch.empty(int(length), dtype=torch.uint8)
        if data:
            buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        self.broadcast(buffer)
        return buffer.numpy().tobytes()

    def on_first(self, function: Callable[[], T]) -> T:
        """Call `function` on rank 0; its value, or its InputError, on every rank.

        The value is made of what JSON has, bytes, tuples and snapshots: nothing that is read here can run code.
        Raises TypeError for another one.
        """
        if self.alone:
            return function()
        told = b""
        if self.world.is_first:
            try:
                told = to_bytes({"value": function()})
            except InputError as error:
                told = to_bytes({"found": error.found, "hint": error.hint})
        answer = from_bytes(self.broadcast_bytes(told))
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
        self.progress.reach("all_gather", mine.numel())
        self._start(dist.all_gather, parts, mine).wait()
        return [part.numpy().tobytes() for part in parts]

    def among(self, names: list[bytes]) -> Comm:
        """The same ranks, whose all_reduce is over those of one name; names: of all ranks. A collective."""
        sets = {name: [rank for rank, other in enumerate(names) if other == name] for name in names}
        groups = {name: dist.new_group(ranks) for name, ranks in sets.items()}
        return Comm(self.world, self.device, groups[names[self.world.rank]])

    def exact_mean(self, total: float, count: int) -> float:
        """Mean over all ranks' samples: sums and counts are added, never means."""
        whole, counted = self.sum(np.array([total, count])).tolist()
        return whole / counted if counted else float("nan")


@contextmanager
def process_group(
    world: World | None = None, device: torch.device | None = None, timeout_seconds: float = 600
) -> Iterator[Comm]:
    """The ranks' process group for the length of the block; its `Comm` is the block's value.

    world: by default as the environment says, `World.detect()`.  device: by default this rank's GPU, or the CPU
    where there is none.  timeout_seconds: how long a collective waits for ranks that do not come.
    Raises InputError where the environment is half set, and in the block PeerLost where another rank has gone.

    Destroyed at its end, but not after an error: that would wait, up to the timeout, for collectives that
    ranks have begun and others will not join. The error must get out, and this process end.

    gloo on CPU; NCCL on CUDA, with gloo beside it for host values. Several ranks on one GPU: gloo only,
    since NCCL refuses them. A group that the caller's script has made already is used as it is, and left.
    """
    spare_gloo_the_gil()  # gradients are added within backward, and the process may end right after it
    if dist.is_initialized():
        adopted = _world_of_the_script()
        yield Comm(adopted, device or pick_device("auto", adopted))
        until_gloo_rests()
        return
    world = world or World.detect()
    device = device or pick_device("auto", world)
    if world.world_size == 1:
        yield Comm(world, device)
        return
    _meet(world, device, timeout_seconds)
    _count("joined", 1)
    try:
        yield Comm(world, device)
    except InputError as error:  # mostly all ranks have it at the same place
        error.speaks = _leave_after_all(error, world)
        dist.destroy_process_group()
        raise
    with suppress(Exception):  # one that has failed has closed its connections already
        dist.all_reduce(torch.zeros(1))  # all leave together: gloo may abort a rank whose peers have gone
    with suppress(Exception):
        dist.destroy_process_group()
    until_gloo_rests()


def _leave_after_all(error: InputError, world: World) -> bool:
    """Whether this rank says it. gloo complains of a rank that goes while another one joins."""
    end = time.monotonic() + SECONDS_TO_LEAVE
    with suppress(RuntimeError):  # the store is gone already
        while _count("joined") < world.world_size and time.monotonic() < end:
            time.sleep(0.01)
    return says_it(str(error), dist.distributed_c10d._get_default_store(), world)


def _count(what: str, more: int = 0) -> int:
    """How many ranks have joined the group, with so many more."""
    count: int = dist.distributed_c10d._get_default_store().add(f"stepladder/{what}", more)
    return count


def _world_of_the_script() -> World:
    """Who this process is in a group that is there already."""
    return World(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        local_rank=number_in(os.environ, "LOCAL_RANK", dist.get_rank()),
        ranks_per_node=number_in(os.environ, "LOCAL_WORLD_SIZE", dist.get_world_size()),
        source="the script's own process group",
    )


def _meet(world: World, device: torch.device, timeout_seconds: float) -> None:
    by_torchrun = world.init_method == "env://"
    first = os.environ.get("MASTER_ADDR") if by_torchrun else urlsplit(world.init_method).hostname
    if world.num_nodes > 1 and first:
        name_interface(first)
    elif first:
        os.environ |= on_this_machine()
        keep_store_on_loopback()
    shares_gpu = device.type == "cuda" and world.ranks_per_node > torch.cuda.device_count()
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" and not shares_gpu else "gloo"
    if by_torchrun:
        await_name("MASTER_ADDR", first or "", timeout_seconds)
    dist.init_process_group(
        backend,
        init_method=world.init_method,
        rank=world.rank,
        world_size=world.world_size,
        timeout=timedelta(seconds=timeout_seconds),
        device_id=device if "nccl" in backend else None,
    )


def pick_device(wanted: str, world: World) -> torch.device:
    """The device on which this rank computes. wanted: cpu, cuda, or auto, which is a GPU where there is one.

    Ranks of a node take its GPUs in turn; the GPU becomes torch's current device. Raises InputError where a GPU
    was asked for and none is seen.
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        build = "has no CUDA" if torch.version.cuda is None else f"is built for CUDA {torch.version.cuda}"
        raise InputError(
            f"--device cuda, but torch {torch.__version__} {build} and sees no GPU",
            "--device cpu, or install a CUDA build of torch",
        )
    device = torch.device("cuda", world.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


@contextmanager
def _naming_lost_peers() -> Iterator[None]:
    """gloo and NCCL say only `Connection closed`: mark it as a consequence, so the cause is shown first."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(f"a collective failed, most likely because another rank ended: {error}") from error
