"""How a process group is formed: devices, backends, the store, memory that ranks share."""

from __future__ import annotations

import os
from datetime import timedelta
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store  # type: ignore[attr-defined]

from stepladder.core.address import make_loopback_env, set_interface_env, wait_for_name
from stepladder.core.arguments import validate_arguments
from stepladder.core.errors import InputError
from stepladder.core.world import World
from stepladder.rank.exchange_choice import EXCHANGE_VARIABLE, MEMORY_EXCHANGE
from stepladder.rank.membership import get_control_channel
from stepladder.rank.torch_fixes import get_host_backend, set_group_timeout
from stepladder.rank.torch_fixes_store import bind_store_to_loopback
from stepladder.train.gpu_setup import GpuSetup
from stepladder.train.group_teardown import NCCL_ERRORS_RAISE
from stepladder_exchange.rendezvous import share_memory
from stepladder_exchange.shared_memory import SharedMemory
from stepladder_exchange.torch_fixes_store import keep_stores_of_groups


def init_process_group(
    world: World, device: torch.device, timeout_seconds: float, use_nccl: bool
) -> None:
    """Make torch's default process group of the ranks of a world. A collective.

    Args:
        world: The ranks.
        device: The device of this rank.
        timeout_seconds: How long this rank, and later each collective, waits for other ranks.
        use_nccl: Whether tensors on GPUs are exchanged by NCCL; tensors on the host always by gloo.
    """
    is_torchrun = world.init_method == "env://"
    if is_torchrun:
        first_host = os.environ.get("MASTER_ADDR")
    else:
        first_host = urlsplit(world.init_method).hostname
    if world.num_nodes > 1 and first_host:
        set_interface_env(first_host)
    elif first_host:
        os.environ |= make_loopback_env()
        bind_store_to_loopback()
    keep_stores_of_groups()
    if (
        use_nccl and get_control_channel() is not None
    ):  # after a loss, the other ranks continue in place
        os.environ |= NCCL_ERRORS_RAISE
    if is_torchrun:
        wait_for_name("MASTER_ADDR", first_host or "", timeout_seconds)
    store = _open_file_store(world, timeout_seconds)
    backend = "gloo"
    nccl_device: torch.device | None = None
    if use_nccl:
        backend = "cpu:gloo,cuda:nccl"
        nccl_device = device
    dist.init_process_group(
        backend,
        init_method=None if store else world.init_method,
        store=store,
        rank=world.rank,
        world_size=world.world_size,
        timeout=timedelta(seconds=timeout_seconds),
        device_id=nccl_device,
    )


def _open_file_store(world: World, timeout_seconds: float) -> Store | None:
    """Return the store of ranks whose rendezvous is a file, None for another rendezvous.

    One file serves one group after the other, each with its own prefix of keys.
    """
    url = urlsplit(world.init_method)
    if url.scheme != "file" or not url.query:
        return None
    store = FileStore(url.path, world.world_size)
    store.set_timeout(timedelta(seconds=timeout_seconds))
    return PrefixStore(url.query, store)


def join_shared_memory(
    world: World, device: torch.device, timeout_seconds: float
) -> SharedMemory | None:
    """Return the memory that the ranks of the default group share, None if there is none.

    There is one for ranks that one launcher has started on one machine and that compute on its CPU.
    A collective.

    Raises:
        RuntimeError: If a rank was lost meanwhile.
    """
    is_asked_for = device.type == "cpu" and os.environ.get(EXCHANGE_VARIABLE) == MEMORY_EXCHANGE
    # Nodes of a lab are one machine to the rendezvous.
    may_share = is_asked_for and world.world_size <= world.ranks_per_node
    obstacle = "" if may_share else "it computes on a GPU, or its launcher has started only a part"
    rendezvous = share_memory(get_host_backend(), world.rank, world.world_size, obstacle)
    if rendezvous.memory is None or len(rendezvous.nodes) > 1:
        return None
    return SharedMemory(rendezvous.memory, world.rank, rendezvous.pids, timeout_seconds)


def set_collective_timeout(seconds: float) -> None:
    """Set how long the collectives of the default group wait from now on."""
    set_group_timeout(timedelta(seconds=seconds))


@validate_arguments
def pick_device(name: str, world: World) -> torch.device:
    """Return the device on which this rank computes.

    The ranks of a node take its GPUs in turn. The GPU becomes torch's current device.

    Args:
        name: "cpu", "cuda", or "auto", which is a GPU if there is one.
        world: The ranks.

    Raises:
        InputError: If `name` is "cuda" and torch sees no GPU.
    """
    has_gpu = torch.cuda.is_available()
    if name == "cpu" or (name == "auto" and not has_gpu):
        return torch.device("cpu")
    if not has_gpu:
        reason, hint = GpuSetup.detect().explain_absence()
        raise InputError(f"--device cuda, but {reason}", hint)
    device = torch.device("cuda", world.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
