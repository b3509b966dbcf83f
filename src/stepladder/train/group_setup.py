"""How ranks meet: on which device each computes, where the first one listens, with which backend."""

from __future__ import annotations

import os
from datetime import timedelta
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store  # type: ignore[attr-defined]

from stepladder.core.address import await_name, name_interface, on_this_machine
from stepladder.core.errors import InputError
from stepladder.core.world import World
from stepladder.rank.membership import wire
from stepladder.rank.segment import mapped
from stepladder.rank.torch_fixes import bind_store_to_loopback, set_group_timeout
from stepladder.train.gpu_setup import GpuSetup
from stepladder.train.group_teardown import NCCL_ERRORS_RAISE
from stepladder.train.shared_memory import SharedMemory


def init_process_group(
    world: World, device: torch.device, timeout_seconds: float, use_nccl: bool
) -> None:
    """The other ranks of `world`, in the default process group. by_nccl: what is on cards goes that
    way.
    """
    by_torchrun = world.init_method == "env://"
    first = os.environ.get("MASTER_ADDR") if by_torchrun else urlsplit(world.init_method).hostname
    if world.num_nodes > 1 and first:
        name_interface(first)
    elif first:
        os.environ |= on_this_machine()
        bind_store_to_loopback()
    if use_nccl and wire() is not None:  # the others are to go on after a loss
        os.environ |= NCCL_ERRORS_RAISE
    if by_torchrun:
        await_name("MASTER_ADDR", first or "", timeout_seconds)
    store = _store_in_file(world, timeout_seconds)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if use_nccl else "gloo",
        init_method=None if store else world.init_method,
        store=store,
        rank=world.rank,
        world_size=world.world_size,
        timeout=timedelta(seconds=timeout_seconds),
        device_id=device if use_nccl else None,
    )


def _store_in_file(world: World, timeout_seconds: float) -> Store | None:
    """Return the store of ranks that meet in a file, which serves group after group, each with its
    own keys.
    """
    where = urlsplit(world.init_method)
    if where.scheme != "file" or not where.query:
        return None
    store = FileStore(where.path, world.world_size)
    store.set_timeout(timedelta(seconds=timeout_seconds))
    return PrefixStore(where.query, store)


def join_shared_memory(
    world: World, device: torch.device, timeout_seconds: float
) -> SharedMemory | None:
    """That of the default group, whose ranks all call this: where one launcher has started them on
    one machine, and they compute on its CPU. Raises RuntimeError where one has gone."""
    segment = mapped() if device.type == "cpu" else None
    memory = None if segment is None else SharedMemory(segment)
    # All gather, whatever each has: without our launcher, ranks may guess different numbers of
    # nodes.
    mine = torch.tensor([-1 if memory is None else memory.last_exchange, os.getpid()])
    found = [torch.empty_like(mine) for _ in range(world.world_size)]
    dist.all_gather(found, mine)
    numbers, pids = torch.stack(found).T.tolist()
    if memory is None or min(numbers) < 0:
        return None
    memory.join_group(world.rank, pids, max(numbers) + 1, timeout_seconds)
    return memory


def set_collective_timeout(seconds: float) -> None:
    """Of the default group's collectives from now on."""
    set_group_timeout(timedelta(seconds=seconds))


def pick_device(name: str, world: World) -> torch.device:
    """The device on which this rank computes. wanted: cpu, cuda, or auto, which is a GPU where
    there is one.

    Ranks of a node take its GPUs in turn; the GPU becomes torch's current device. Raises InputError
    where a GPU was asked for and none is seen."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        found, hint = GpuSetup.detect().explain_absence()
        raise InputError(f"--device cuda, but {found}", hint)
    device = torch.device("cuda", world.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
