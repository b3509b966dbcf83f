"""Blocks: the modules of a model that repeat. --shard full gathers the weights of one at a time."""

from __future__ import annotations

from collections import defaultdict

from torch import nn

from stepladder.core.errors import InputError
from stepladder.train.job import Job

OUTSIDE_BLOCKS = "the model outside of its blocks"


def find_blocks(job: Job) -> list[nn.Module]:
    """The modules whose weights are gathered together: the job's `blocks`, or those that repeat in
    a list.

    Of each nn.ModuleList, and of each nn.Sequential, with one kind of module the children; of those
    in one another the outer ones. Recurrent cells are no blocks. What is in none of them is
    gathered with the whole model."""
    found: list[nn.Module] = []

    def look(module: nn.Module) -> None:
        repeats = (
            isinstance(module, (nn.ModuleList, nn.Sequential))
            and len({type(m) for m in module}) == 1
        )
        for child in module.children():
            # A cell is called for each step of a sequence, and would be gathered each time: five
            # times as slow.
            is_repeated = repeats and not isinstance(child, nn.RNNCellBase)
            is_block = isinstance(child, job.blocks) if job.blocks else is_repeated
            has_forward = not isinstance(child, (nn.ModuleList, nn.ModuleDict))
            if is_block and has_forward and list(child.parameters()):
                found.append(child)
            else:
                look(child)

    look(job.model)
    return list(dict.fromkeys(found))


def validate_fully_shardable(job: Job) -> None:
    """Raises InputError for a weight that fully_shard does not take.

    That is one without rows, one whose rows do not lie one after the other in memory, or one of two
    blocks."""
    block_of = {
        id(module): number
        for number, block in enumerate(find_blocks(job))
        for module in block.modules()
    }
    owners: dict[int, set[int]] = defaultdict(set)
    for module in job.model.modules():
        for param in module.parameters(recurse=False):
            owners[id(param)].add(block_of.get(id(module), -1))
    for name, param in job.model.named_parameters():
        if param.ndim == 0:
            raise InputError(
                f"--shard full: the weight {name} is a single number", "torch.ones(1) in its place"
            )
        if not param.is_contiguous():
            raise InputError(
                f"--shard full: the weight {name} does not lie in memory row by row (as in channels_last)",
                "leave memory_format=torch.channels_last out of build, or --shard optimizer",
            )
        if len(owners[id(param)]) > 1:
            raise InputError(
                f"--shard full: the weight {name} is used in two blocks, which are gathered apart",
                "blocks=(A,) in the Job, of a class whose modules hold all that they share",
            )
