"""Collectives in the order in which a rank comes to them, and the group's beginning and end."""

from __future__ import annotations

import os
import sys
import time
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from stepladder.tools.check.probe import digests
from stepladder.tools.check.probe.patching import argument, careful, wrap
from stepladder.tools.check.probe.recorder import here

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
SMALL = 64
means: dict[
    int, tuple[Any, int]
] = {}  # tensors that are means, by id, with how many values went in
depth = 0


def attach() -> None:
    if not dist.is_available():
        return
    for name in COLLECTIVES:
        wrap([c10d, dist], name, collective(name))
    wrap([c10d, dist], "init_process_group", init)
    wrap(c10d, "_update_default_pg", group_is_set)
    wrap([c10d, dist], "destroy_process_group", destroy)
    wrap([torch.Tensor], "mean", mean)
    wrap([torch], "mean", mean)
    wrap(
        [sys.modules["torch.multiprocessing.spawn"], torch.multiprocessing],
        "start_processes",
        spawning,
    )
    wrap(sys.modules["torch.multiprocessing.spawn"], "_wrap", spawned)
    from torch.distributed.algorithms.join import Join

    wrap(Join, "__enter__", joining)


def joining(original: Any, *args: Any, **kwargs: Any) -> Any:
    here().at("join")
    return original(*args, **kwargs)


def spawned(original: Any, function: Any, number: int, *args: Any) -> Any:
    """In a process that the script has made: its number is its rank until a group says otherwise."""
    recorder = here()
    recorder.rank = number
    recorder.write("start", rank=number, world=-1)
    return original(function, number, *args)


def spawning(original: Any, *args: Any, **kwargs: Any) -> Any:
    is_not_torchruns()
    return original(*args, **kwargs)


def is_not_torchruns() -> None:
    """The script makes its ranks itself: the checker starts it anew, alone."""
    recorder = here()
    if recorder.settings.torchrun:
        recorder.write("spawns")
        while True:  # until the checker has read it, and ends this process
            time.sleep(1)


def init(original: Any, *args: Any, **kwargs: Any) -> Any:
    recorder = here()
    parent = sys.modules.get("multiprocessing.process")
    if parent is not None and parent.parent_process() is not None:
        is_not_torchruns()
    backend = argument(args, kwargs, 0, "backend")
    method = argument(args, kwargs, 1, "init_method")
    recorder.at(
        "init",
        backend=str(backend),
        method=str(method),
        direct=recorder.direct(),
        port=os.environ.get("MASTER_PORT"),
    )
    return original(*args, **kwargs)


def group_is_set(original: Any, group: Any) -> Any:
    """Note the default group also where torch makes it itself, as `init_device_mesh` does."""
    done = original(group)
    if isinstance(group, dist.ProcessGroup):
        note_rank()
    return done


def note_rank() -> None:
    recorder = here()
    recorder.rank = dist.get_rank()
    recorder.world = dist.get_world_size()
    recorder.write("who", rank=recorder.rank, world=recorder.world)


def destroy(original: Any, *args: Any, **kwargs: Any) -> Any:
    here().at("destroy")
    return original(*args, **kwargs)


def collective(name: str) -> Any:
    def around(original: Any, *args: Any, **kwargs: Any) -> Any:
        global depth
        if depth:
            return original(*args, **kwargs)
        about = described(name, args, kwargs)
        here().at("coll", op=name, way=here().stack(), **about)
        depth += 1
        try:
            done = original(*args, **kwargs)
        finally:
            depth -= 1
        here().write("did", op=name)
        return done

    return around


@careful(lambda: {"group": "?"})
def described(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Shape and kind of the tensor, and its value where it is small."""
    group = kwargs.get("group") or next((a for a in args if isinstance(a, dist.ProcessGroup)), None)
    tensor = next((a for a in [*args, *kwargs.values()] if isinstance(a, torch.Tensor)), None)
    found: dict[str, Any] = {
        "group": "" if group is None else str(dist.get_process_group_ranks(group))
    }
    if name in ("all_gather_object", "gather_object"):
        found["numbers"] = numbers_in(
            argument(args, kwargs, int(name == "all_gather_object"), "obj")
        )
    if tensor is None:
        return found
    found |= {
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype),
        "ptr": tensor.data_ptr(),
        "count": tensor.numel(),
    }
    if tensor.numel() <= SMALL and not tensor.is_complex():
        found["value"] = tensor.detach().reshape(-1).double().tolist()
    if (known := means.get(id(tensor))) is not None and known[0]() is tensor:
        found["mean_of"] = known[1]
    if tensor.numel() > SMALL:
        found["digest"] = digests.digest(tensor) if tensor.numel() < 1_000_000 else ""
    if "op" in kwargs or (name in ("all_reduce",) and len(args) > 1):
        found["red"] = str(argument(args, kwargs, 1, "op"))
    return found


def numbers_in(value: Any) -> list[int]:
    """Whole numbers that a gathered dict or list of pairs has as keys: of samples, where each comes
    once.
    """
    if not isinstance(value, (dict, list)) or len(value) > 10_000:
        return []
    firsts = (
        list(value)
        if isinstance(value, dict)
        else [v[0] for v in value if isinstance(v, (list, tuple)) and v]
    )
    return (
        firsts
        if all(isinstance(first, int) for first in firsts) and len(set(firsts)) == len(firsts)
        else []
    )


def mean(original: Any, *args: Any, **kwargs: Any) -> Any:
    """A scalar mean remembers of how many values: for means of means."""
    done = original(*args, **kwargs)
    if (
        isinstance(done, torch.Tensor)
        and done.dim() == 0
        and args
        and isinstance(args[0], torch.Tensor)
    ):
        if len(means) > 64:
            means.clear()
        means[id(done)] = (weakref.ref(done), args[0].numel())
    return done
