"""SyncBatchNorm on CPU ranks: torch 2.11 to 2.15 have it for GPUs alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

_original_all_reduce = c10d.all_reduce  # who wraps it later, to record it, means those of a script


class _SumOverRanks(torch.autograd.Function):
    """The sum of a tensor over the ranks of a group, and of its gradient likewise."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = tensor.clone()
        _original_all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        total = gradients[0].contiguous().clone()
        _original_all_reduce(total, group=ctx.group)
        return total, None


def _sum_over_ranks(tensor: Tensor, group: Any) -> Any:
    return _SumOverRanks.apply(tensor, group)  # type: ignore[no-untyped-call]


def synchronize_on_cpus(announce: Callable[[], None] = lambda: None) -> None:
    """Let SyncBatchNorm exchange its statistics between CPU ranks.

    Args:
        announce: Called in the first pass that does so.
    """
    original = torch.nn.SyncBatchNorm.forward

    @wraps(original)
    def forward(layer: Any, input: Tensor) -> Any:
        if input.is_cuda:
            return original(layer, input)
        group = None
        if layer.training and dist.is_initialized():
            group = layer.process_group or dist.group.WORLD
        if group is None or dist.get_world_size(group) == 1:
            return super(torch.nn.SyncBatchNorm, layer).forward(input)
        announce()
        return _normalize(layer, input, group)

    original_handle: Any = DistributedDataParallel._passing_sync_batchnorm_handle

    def require_gpus(wrapper: Any, module: Any) -> None:
        if wrapper.device_type != "cpu":
            original_handle(wrapper, module)

    torch.nn.SyncBatchNorm.forward = forward  # type: ignore[method-assign, assignment]
    DistributedDataParallel._passing_sync_batchnorm_handle = require_gpus  # type: ignore[method-assign]


def _normalize(layer: Any, samples: Tensor, group: Any) -> Any:
    """Return samples that are normalized by the mean and variance over all ranks."""
    layer._check_input_dim(samples)
    has_few_digits = samples.dtype in (torch.float16, torch.bfloat16)
    values = samples.float() if has_few_digits else samples
    rows = values.transpose(1, -1).flatten(0, -2)  # (values of a channel, channels)
    own_count = rows.new_tensor([rows.size(0)])
    count = _sum_over_ranks(own_count, group)
    mean = _sum_over_ranks(rows.sum(0), group) / count
    centered = rows - mean
    variance = _sum_over_ranks(centered.square().sum(0), group) / count
    if layer.track_running_stats:
        _update_running_statistics(layer, mean.detach(), variance.detach(), float(count))
    normalized = centered * torch.rsqrt(variance + layer.eps)
    if layer.weight is not None:
        normalized = normalized * layer.weight
    if layer.bias is not None:
        normalized = normalized + layer.bias
    result = normalized.view_as(values.transpose(1, -1)).transpose(1, -1)
    return result.to(samples.dtype).contiguous()


def _update_running_statistics(layer: Any, mean: Tensor, variance: Tensor, count: float) -> None:
    layer.num_batches_tracked.add_(1)
    momentum = layer.momentum
    if momentum is None:  # the mean over all batches
        momentum = 1 / float(layer.num_batches_tracked)
    unbiased = variance * (count / max(count - 1, 1))
    for running, value in ((layer.running_mean, mean), (layer.running_var, unbiased)):
        running.lerp_(value.to(running.dtype), momentum)
