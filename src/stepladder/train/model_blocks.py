"""Blocks: the modules of a model that repeat. --shard full gathers the weights of one at a time."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import nn

from stepladder.core.errors import InputError
from stepladder.train.job import Job

OUTSIDE_BLOCKS = "the model outside of its blocks"


def find_blocks(job: Job) -> list[nn.Module]:
    """Return the modules whose weights are gathered together.

    These are the modules of the job's `blocks`; or else the children of each nn.ModuleList, and of
    each nn.Sequential, that has only one class of children. Blocks within a block do not count, nor
    do recurrent cells. Weights outside of all blocks are gathered with the model itself.
    """
    blocks: list[nn.Module] = []

    def search(module: nn.Module) -> None:
        is_list = isinstance(module, (nn.ModuleList, nn.Sequential))
        repeats = is_list and len({type(child) for child in module.children()}) == 1
        for child in module.children():
            # A cell is called for each step of a sequence, and would be gathered each time, which
            # is five times as slow.
            is_repeated = repeats and not isinstance(child, nn.RNNCellBase)
            is_block = isinstance(child, job.blocks) if job.blocks else is_repeated
            has_forward = not isinstance(child, (nn.ModuleList, nn.ModuleDict))
            if is_block and has_forward and list(child.parameters()):
                blocks.append(child)
            else:
                search(child)

    search(job.model)
    return list(dict.fromkeys(blocks))


def validate_unhooked(model: nn.Module) -> None:
    """Check hooks, since fully_shard calls none of a weight's gradient, and needs its own.

    Raises:
        InputError: A weight has such a hook, or the model is one of torch.jit, which takes none.
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise InputError(
            "--shard full: a model of torch.jit takes no hooks, which gather its weights",
            "the module itself, with --compile if you like, or --shard optimizer",
        )
    for name, param in model.named_parameters():
        if param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None):
            raise InputError(
                f"--shard full: the weight {name} has a hook for its gradient, which would not be"
                " called",
                "register_full_backward_hook of its module, or --shard optimizer",
            )


def validate_fully_shardable(job: Job) -> None:
    """Check that fully_shard accepts all weights of the model.

    Raises:
        InputError: A weight is a single number, is not stored row by row, has a gradient hook, or
            is used in two blocks.
    """
    validate_unhooked(job.model)
    block_of_module = {
        id(module): index
        for index, block in enumerate(find_blocks(job))
        for module in block.modules()
    }
    blocks_of_param: dict[int, set[int]] = defaultdict(set)
    for module in job.model.modules():
        for param in module.parameters(recurse=False):
            blocks_of_param[id(param)].add(block_of_module.get(id(module), -1))
    types_of_block: dict[int, torch.dtype] = {}
    for name, param in job.model.named_parameters():
        block = min(blocks_of_param[id(param)])
        block_type = types_of_block.setdefault(block, param.dtype)
        if param.dtype != block_type:
            raise InputError(
                f"--shard full: the weight {name} has the type {param.dtype}, others that are"
                f" gathered with it {block_type}",
                "one type for all weights of a block, blocks=(A,) in the Job; or --shard optimizer",
            )
        if param.ndim == 0:
            raise InputError(
                f"--shard full: the weight {name} is a single number", "torch.ones(1) in its place"
            )
        if not param.is_contiguous():
            raise InputError(
                f"--shard full: the weight {name} does not lie in memory row by row"
                " (as in channels_last)",
                "leave memory_format=torch.channels_last out of build, or --shard optimizer",
            )
        if len(blocks_of_param[id(param)]) > 1:
            raise InputError(
                f"--shard full: the weight {name} is used in two blocks, which are gathered apart",
                "blocks=(A,) in the Job, of a class whose modules hold all that they share",
            )
