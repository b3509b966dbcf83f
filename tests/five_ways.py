"""Train small jobs with `--sync exact` in several ways, each of which must give the same weights.

A job is refused where the value of a way is the first line of its InputError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ranks import run_ranks
from stepladder import InputError, Job, Settings, Trainer, World
from stepladder.train.comm import Comm

STEPS = 10
EPOCH = 5
STOP = {"steps": 4}  # within an epoch
# Of each way: the processes and the settings of each of its attempts.
Attempts = list[tuple[int, dict[str, Any]]]
WAYS: dict[str, Attempts] = {
    "one": [(1, {})],
    "three": [(3, {})],
    "resumed": [(2, STOP), (1, {})],
    "optimizer": [(2, {"shard": "optimizer", **STOP}), (3, {"shard": "optimizer"})],
    "copies": [(2, {"shard": "optimizer", "shard_copies": 2})],
    "full": [(2, {"shard": "full", **STOP}), (3, {"shard": "full"})],
}
MakeJob = Callable[[str], Job]


class Net(nn.Module):
    """Blocks in a list, whose weights have more than one row for each of three processes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 12)
        self.blocks = nn.ModuleList(nn.Linear(12, 12) for _ in range(2))
        self.last = nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).relu()
        for block in self.blocks:
            x = F.gelu(block(x))
        return self.last(x)


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    """40 samples, 5 steps of 8."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(40, 6, generator=generator)
    return x, (x @ torch.randn(6, 4, generator=generator)).argmax(1)


def cross_entropy(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="sum"), len(x)


def fit(
    comm: Comm, make_job: MakeJob, kinds: Iterable[str], folder: Path, settings: dict[str, Any]
) -> dict[str, str]:
    """Train each kind of job; return the hash of its weights, or the line that refuses it."""
    base = {"epochs": 2, "global_batch": 8, "microbatch": 2, "sync": "exact", "progress": False}
    results = {}
    for kind in kinds:
        try:
            job = make_job(kind)
            trainer = Trainer(job, Settings(folder / kind, **{**base, **settings}), comm=comm)
            results[kind] = trainer.fit().weights_sha256
        except InputError as error:
            results[kind] = f"refused: {error}"
    return results


def train_in_ways(
    make_job: MakeJob, kinds: Iterable[str], folder: Path, ways: Iterable[str] = WAYS
) -> dict[str, dict[str, str]]:
    """Return the result of each kind, by way. make_job: at the top level of a module."""
    results = {}
    for way in ways:
        remaining = list(kinds)
        results[way] = dict.fromkeys(remaining, "")
        for processes, settings in WAYS[way]:
            if processes == 1:
                comm = Comm(World(), torch.device("cpu"))
                values = fit(comm, make_job, remaining, folder / way, settings)
            else:
                args = (make_job, remaining, folder / way, settings)
                by_rank = run_ranks(fit, processes, *args)
                values = by_rank[0]
                assert by_rank == [values] * processes
            results[way] |= values
            remaining = [kind for kind in remaining if not values[kind].startswith("refused")]
    return results
