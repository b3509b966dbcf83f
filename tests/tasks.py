"""Ranks that Slurm has started, without Slurm."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from processes import Started, started
from stepladder.core.address import find_free_port

RANKS = 3


@contextmanager
def tasks(folder: Path, *arguments: object, **env: str) -> Iterator[list[Started]]:
    """What `srun -n 3` starts on one machine. words: with {rank} where they differ."""
    step = {
        "SLURM_JOB_ID": str(find_free_port()),  # tells the port where they meet
        "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": str(RANKS),
        "SLURM_STEP_TASKS_PER_NODE": str(RANKS), "SLURM_STEP_NUM_NODES": "1",
    } | env  # fmt: skip
    ranks = []
    texts = [str(word) for word in arguments]
    with ExitStack() as stack:
        for rank in map(str, range(RANKS)):
            task_env = step | {"SLURM_PROCID": rank, "SLURM_LOCALID": rank}
            ranks.append(
                stack.enter_context(
                    started(*(w.replace("{rank}", rank) for w in texts), cwd=folder, env=task_env)
                )
            )
        yield ranks


def said_by(ranks: list[Started]) -> str:
    return "".join(rank.err.read_text() for rank in ranks)
