"""`--checkpoint-blocks`: the activations of a block are recomputed in backward instead of stored.

The method is Chen et al., 2016, "Training deep nets with sublinear memory cost", with the model's
blocks as segments. torch's own checkpoint function computes the same operations on the same
numbers, from the same state of the random generators, so the bits are the same.
"""

from __future__ import annotations

from functools import partial

from torch.utils.checkpoint import checkpoint

from stepladder.core.errors import InputError
from stepladder.train.job import Job
from stepladder.train.model_blocks import find_blocks


def checkpoint_blocks(job: Job) -> None:
    """Make each block's forward store only its inputs. A second call changes nothing."""
    for block in find_blocks(job):
        if not isinstance(block.forward, partial):
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def validate_checkpointable(job: Job) -> None:
    """Raise InputError if the model has no blocks, or if forward changes statistics in a block."""
    blocks = find_blocks(job)
    if not blocks:
        raise InputError(
            "--checkpoint-blocks: the model has no modules that repeat in a list",
            "blocks=(Block,) in the Job, of classes; or leave --checkpoint-blocks out",
        )
    names = {module: name for name, module in job.model.named_modules()}
    for block in blocks:
        for module in block.modules():
            if getattr(module, "track_running_stats", False):
                raise InputError(
                    f"--checkpoint-blocks: {names[module]} is a {type(module).__name__}, which"
                    " would count each batch twice",
                    "blocks without it, or leave --checkpoint-blocks out",
                )
