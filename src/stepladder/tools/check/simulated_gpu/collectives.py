"""Groups and collectives of NCCL on gloo, and wrappers of models that are given devices.

A function with a parameter `original` is called with the one that it replaces.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from stepladder.tools.check.simulated_gpu.refusal import SimulatedObject

# Collectives for which gloo compares the shapes of tensors, and NCCL their numbers of elements.
COMPARED_BY_SHAPE = (
    "all_gather_into_tensor",
    "all_gather_single",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
)
OPTIONS_OF_NCCL = ("device_id", "pg_options")
# No collectives of the script: the probe does not record them.
original_broadcast = c10d.broadcast
original_exchange = c10d.all_to_all_single


class CompletedWork(SimulatedObject):
    """The handle of an asynchronous collective that is complete."""

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class NcclOptions(SimulatedObject):
    """Options of NCCL, which gloo ignores."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.config = SimpleNamespace()


class ProcessGroupNCCL:
    """Stands for a class that a build without CUDA does not have. No group is of it."""

    Options = NcclOptions


def gloo_for_nccl(value: Any) -> Any:
    """Return gloo for a backend, or one backend for each device, that names nccl."""
    is_backend = isinstance(value, str) and "://" not in value
    if is_backend and "nccl" in value.lower():
        return "gloo"
    return value


def with_gloo(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Make a group of gloo in place of one of NCCL."""
    options = {
        name: gloo_for_nccl(value) for name, value in kwargs.items() if name not in OPTIONS_OF_NCCL
    }
    return original(*map(gloo_for_nccl, args), **options)


def split_group(
    parent_pg: Any = None,
    split_ranks: Sequence[Sequence[int]] | None = None,
    timeout: Any = None,
    **options: Any,
) -> Any:
    """Stand in for `dist.split_group`, which only NCCL has: make the group of this rank."""
    rank = dist.get_rank(parent_pg)
    for ranks in split_ranks or ():
        if rank in ranks:
            return dist.new_group(
                [global_rank(parent_pg, member) for member in ranks],
                timeout=timeout,
                use_local_synchronization=True,
            )
    return None


def global_rank(group: Any, rank: int) -> int:
    return rank if group is None else dist.get_global_rank(group, rank)


def flat_view(value: Any) -> Any:
    """Return a tensor, or each of a list, as one row of its elements."""
    if isinstance(value, Tensor):
        return value.view(-1) if value.is_contiguous() else value
    is_list = isinstance(value, list | tuple) and bool(value)
    if is_list and all(isinstance(item, Tensor) for item in value):
        return [flat_view(item) for item in value]
    return value


def compare_by_count(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a collective with tensors of other shapes, if they have as many elements."""
    named = {name: flat_view(value) for name, value in kwargs.items()}
    return original(*map(flat_view, args), **named)


def gather_unequal(
    original: Any, tensor_list: Any, tensor: Any, group: Any = None, async_op: bool = False
) -> Any:
    """Stand in for `all_gather`, with a tensor of another size from each rank, as NCCL does."""
    if len({output.numel() for output in tensor_list}) == 1:
        return original(flat_view(tensor_list), flat_view(tensor), group, async_op)
    tensor_list[dist.get_rank(group)].copy_(tensor)
    for rank, output in enumerate(tensor_list):
        original_broadcast(output, global_rank(group, rank), group)
    return CompletedWork() if async_op else None


def exchange_lists(
    _original: Any,
    output_tensor_list: Any,
    input_tensor_list: Any,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Stand in for `all_to_all`, which gloo has not in each version, by one exchange of rows."""
    sent = [tensor.reshape(-1) for tensor in input_tensor_list]
    sizes = [output.numel() for output in output_tensor_list]
    received = sent[0].new_empty(sum(sizes))
    original_exchange(received, torch.cat(sent), sizes, [row.numel() for row in sent], group)
    for output, row in zip(output_tensor_list, received.split(sizes), strict=True):
        output.copy_(row.view_as(output))
    return CompletedWork() if async_op else None


def reduce_to_mean(
    original: Any,
    tensor: Any,
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Stand in for `all_reduce`, with a mean: gloo has none in each version."""
    if op != dist.ReduceOp.AVG:
        return original(tensor, op, group, async_op)
    original(tensor, dist.ReduceOp.SUM, group)
    tensor.div_(dist.get_world_size(group))
    return CompletedWork() if async_op else None


def without_device_ids(
    original: Any, group: Any = None, async_op: bool = False, device_ids: Any = None
) -> Any:
    """Stand in for `barrier`, without devices."""
    return original(group, async_op)


def replace_arguments(
    replacements: dict[str, Any], original: Any, *args: Any, **kwargs: Any
) -> Any:
    """Call a function for which some arguments, if it has them, always have the same values."""
    signature = inspect.signature(original)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError:
        return original(*args, **kwargs)  # it says what is wrong
    known = replacements.keys() & signature.parameters
    bound.arguments.update((name, replacements[name]) for name in known)
    return original(*bound.args, **bound.kwargs)
