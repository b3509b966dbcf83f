"""gloo's threads and Python's lock: a thread that drops a tensor of Python's needs the lock.

What joins such a thread and holds the lock waits for ever. What ends the interpreter first aborts
(docs/log.md)."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from functools import wraps
from pathlib import Path
from types import FunctionType
from typing import Any


def spare_gloo_the_gil() -> None:
    """Without a GPU, keep torch 2.13 from giving gloo's threads a Python object with each backward
    pass.

    They need the GIL to drop it, and a DDP model that is freed meanwhile waits for them with the
    GIL held: a script that had done its work hung at its end (docs/log.md). The object is for the
    threads of GPUs."""
    torch = sys.modules.get("torch")
    give = getattr(getattr(torch, "_C", None), "_stash_obj_in_tls", None)
    if (
        torch is None or give is None or isinstance(give, FunctionType)
    ):  # no such torch, or done already
        return
    # To ask whether there is a GPU would fix CUDA_VISIBLE_DEVICES, which a script may still set.
    in_use = torch.cuda.is_initialized
    torch._C._stash_obj_in_tls = lambda key, value: (
        give(key, value) if key != "context" or in_use() else None
    )


def rest_before_groups_end() -> None:
    """From now on in this process, where torch is loaded: a group is destroyed when its threads
    have come to rest.

    Whoever frees the last model of a destroyed group waits for its threads, with the GIL held.
    """
    group: Any = sys.modules.get("torch.distributed.distributed_c10d")
    destroy = getattr(group, "destroy_process_group", None)
    if destroy is None or hasattr(destroy, "__wrapped__"):  # no such torch, or done already
        return

    @wraps(destroy)
    def rest_and_destroy(*args: Any, **options: Any) -> None:
        until_gloo_rests()
        destroy(*args, **options)

    for module in (group, sys.modules["torch.distributed"]):
        vars(module)["destroy_process_group"] = rest_and_destroy


def until_gloo_rests() -> None:
    """Let gloo's threads drop the tensors of the last collectives; five seconds at most.

    They need the GIL for it, and outlive their group where torch._dynamo was imported (torch 2.13).
    One that gets no core until the interpreter ends finds the GIL gone for good, and aborts a
    process that had done its work."""
    end, rest = time.monotonic() + 5, 0
    while rest < 3 and time.monotonic() < end:
        time.sleep(0.001)  # the GIL is theirs
        rest = 0 if "R" in _states_of_gloo() else rest + 1


def _states_of_gloo() -> set[str]:
    """Linux's letters for what these threads do; R: they have work. Nothing where there is no
    /proc.
    """
    states = set()
    for stat in Path("/proc/self/task").glob("*/stat"):
        with suppress(OSError):  # a thread that has ended meanwhile
            name, _, rest = (
                stat.read_text(encoding="utf-8", errors="replace").partition("(")[2].rpartition(")")
            )
            states |= {rest.split()[0]} if "gloo" in name else set()
    return states
