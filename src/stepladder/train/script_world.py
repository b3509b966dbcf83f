"""The ranks of a process group that a script has made itself."""

from __future__ import annotations

import os

import torch.distributed as dist

from stepladder.core.numbers import read_env_number
from stepladder.core.world import World


def get_world_of_script() -> World:
    """Return the world of a process group that the calling script has made."""
    return World(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        local_rank=read_env_number(os.environ, "LOCAL_RANK", dist.get_rank()),
        ranks_per_node=read_env_number(os.environ, "LOCAL_WORLD_SIZE", dist.get_world_size()),
        source="the script's own process group",
    )
