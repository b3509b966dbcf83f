"""The ranks of an observed script: which one this is, and their common end after a last step."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import NoReturn

from stepladder.core.waiting import wait_until
from stepladder.core.world import World
from stepladder.rank.lifecycle import exit_now

RANKS_TIMEOUT_S = 60.0


def get_rank_and_world_size() -> tuple[int, int]:
    """Return the rank and the number of ranks.

    If a script spawns its ranks itself, only its process group has these numbers.
    """
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    world = World.detect()
    return world.rank, world.world_size


def step_count_path(folder: Path, rank: int) -> Path:
    """Return the path of the file with the number of steps that a rank has made."""
    return folder / f"rank-{rank}.steps"


def write_step_count(folder: Path, rank: int, count: int) -> None:
    step_count_path(folder, rank).write_text(str(count), encoding="utf-8")


def read_step_counts(folder: Path, nproc: int) -> list[int]:
    """Return the steps of each rank that has written their number."""
    paths = [step_count_path(folder, rank) for rank in range(nproc)]
    return [int(path.read_bytes() or 0) for path in paths if path.exists()]


def end_script_after(folder: Path, world_size: int, last_step: int) -> NoReturn:
    """End the script once all ranks have made the last step and written their results.

    A rank that is still in its last collective would fail if another rank ended before.
    """
    last_steps = [last_step] * world_size
    wait_until(
        lambda: read_step_counts(folder, world_size) == last_steps, RANKS_TIMEOUT_S, poll_s=0.01
    )
    for child in multiprocessing.active_children():  # workers of a DataLoader
        child.kill()
    exit_now(0)
