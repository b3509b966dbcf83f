"""Hooks that record collectives in order, and the start and the end of the process group."""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from stepladder.tools.check.events import (
    GroupDestroy,
    GroupInit,
    JoinContext,
    NeedsOneNode,
    OtherGroup,
    RankRead,
    Returned,
    ScriptCollective,
    SpawnsRanks,
)
from stepladder.tools.check.probe.loss_graph import gathered_features
from stepladder.tools.check.probe.patching import (
    Fields,
    NestingDepth,
    WrappedCall,
    default_on_error,
    record_calls,
    record_user_calls,
    recorder,
    wrap,
    wrap_after_import,
)
from stepladder.tools.check.probe.probe_log import current_log, is_made_by_script, record
from stepladder.tools.probe.events import ProbeEvent

COLLECTIVES = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "gather",
    "gather_object",
    "scatter",
    "scatter_object_list",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
    "broadcast_object_list",
    "barrier",
    "monitored_barrier",
)
# Those that leave the graph of what they gather out, and the name of that argument.
GATHERS_TENSORS = {"all_gather": "tensor", "all_gather_into_tensor": "input_tensor"}
STORES = ("TCPStore", "FileStore")
MAX_RECORDED_VALUES = 64
MAX_GATHERED_ITEMS = 10_000


running_collective = NestingDepth()
asked: set[str] = set()  # the functions by which the user's code has asked for its rank


def attach() -> None:
    if not dist.is_available():
        return
    spawn = sys.modules["torch.multiprocessing.spawn"]
    for name in COLLECTIVES:
        wrap([c10d, dist], name, partial(record_collective, name))
    record_calls([c10d, dist], "init_process_group", init_event)
    wrap(c10d, "_update_default_pg", record_group)
    record_calls([c10d, dist], "destroy_process_group", lambda _: GroupDestroy())
    for name in ("get_rank", "get_world_size"):
        wrap([c10d, dist], name, partial(record_question, name))
    for name in STORES:
        record_user_calls(getattr(dist, name), "__init__", lambda _: OtherGroup())
    wrap_after_import("torch.distributed.rpc", "init_rpc", recorder(lambda _: OtherGroup()))
    start_owners = [spawn, torch.multiprocessing]
    record_calls(start_owners, "start_processes", wait_for_start_without_torchrun)
    record_calls(spawn, "_wrap", note_spawned_rank)
    from torch.distributed.algorithms.join import Join

    record_calls(Join, "__enter__", lambda _: JoinContext())


def note_spawned_rank(call: WrappedCall) -> None:
    current_log().set_spawned_rank(call.args[1])


def record_question(name: str, call: WrappedCall) -> Any:
    """Record the first question of the user's code for its rank, or the number of ranks."""
    if (
        name not in asked
        and not torch.compiler.is_compiling()
        and current_log().is_called_by_user()
    ):
        asked.add(name)
        record(RankRead(name=name))
    return call.run()


def wait_for_start_without_torchrun(_: WrappedCall) -> None:
    """Wait to be ended if this process was started as torchrun does it.

    The script makes its ranks itself, so the checker starts it again, as one process.
    """
    if current_log().settings.torchrun:
        wait_for_other_start(SpawnsRanks())


def wait_for_other_start(reason: ProbeEvent) -> None:
    """Record why the script must be started otherwise, and wait to be ended with the parent."""
    current_log().write(reason)
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def init_event(call: WrappedCall) -> GroupInit:
    settings = current_log().settings
    if is_made_by_script():
        wait_for_start_without_torchrun(call)
    if not settings.torchrun:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", str(settings.port))
    elif takes_local_rank(call.argument(4, "rank")):
        wait_for_other_start(NeedsOneNode())
    backend = str(call.argument(0, "backend"))
    return GroupInit(backend=backend, direct=current_log().is_called_by_user())


def takes_local_rank(rank: Any) -> bool:
    """Return whether a process names its local rank as its rank, and they are not the same."""
    own = os.environ.get("RANK")
    return own is not None and str(rank) != own and str(rank) == os.environ.get("LOCAL_RANK")


def record_group(call: WrappedCall) -> Any:
    """Record the default group, also where torch makes it itself, as `init_device_mesh` does."""
    result = call.run()
    if isinstance(call.args[0], dist.ProcessGroup):
        current_log().set_group(dist.get_rank(), dist.get_world_size())
    return result


def record_collective(name: str, call: WrappedCall) -> Any:
    if running_collective.depth:
        return call.run()
    log = current_log()
    fields = describe_call(name, call)
    record(ScriptCollective(op=name, way=log.user_stack(), **fields))
    if name in GATHERS_TENSORS:
        gathered_features.add(call.argument(1, GATHERS_TENSORS[name]), log.user_line())
    with running_collective:
        result = call.run()
    log.write(Returned())
    return result


@default_on_error(lambda: {"group": "?"})
def describe_call(name: str, call: WrappedCall) -> Fields:
    """Return the group of a collective, and the shape and the (few) values of its tensor."""
    arguments = [*call.args, *call.kwargs.values()]
    group = first_of_type(arguments, dist.ProcessGroup)
    ranks = "" if group is None else str(dist.get_process_group_ranks(group))
    fields: Fields = {"group": ranks}
    if name in ("all_gather_object", "gather_object"):
        index = 1 if name == "all_gather_object" else 0
        fields["numbers"] = sample_numbers(call.argument(index, "obj"))
    tensor = first_of_type(arguments, Tensor)
    if tensor is None:
        return fields
    if name in ("all_reduce", "reduce"):
        index = 1 if name == "all_reduce" else 2
        fields["sums"] = call.argument(index, "op") in (None, dist.ReduceOp.SUM)
    return fields | describe_tensor(tensor)


def first_of_type(values: list[Any], kind: Any) -> Any:
    return next((value for value in values if isinstance(value, kind)), None)


def describe_tensor(tensor: Tensor) -> Fields:
    count = tensor.numel()
    fields: Fields = {"shape": list(tensor.shape), "ptr": tensor.data_ptr(), "count": count}
    if count <= MAX_RECORDED_VALUES and not tensor.is_complex():
        fields["value"] = tensor.detach().reshape(-1).double().tolist()
    return fields


def sample_numbers(gathered: Any) -> list[int]:
    """Return the integers that a gathered dict, or list of pairs, has as keys.

    If each comes once, they are numbers of samples.
    """
    if not isinstance(gathered, dict | list) or len(gathered) > MAX_GATHERED_ITEMS:
        return []
    keys = list(gathered)
    if isinstance(gathered, list):
        keys = [item[0] for item in gathered if isinstance(item, list | tuple) and item]
    are_numbers = all(isinstance(key, int) for key in keys)
    return keys if are_numbers and len(set(keys)) == len(keys) else []
