"""Exact evaluation: each sample once, on any number of processes; sums and counts, never a mean of
means.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import torch

from stepladder.data.source import Source
from stepladder.rank.progress import PASS
from stepladder.train.comm import Comm
from stepladder.train.return_values import find_doubtful_counts, validate_counts, validate_metrics

Metrics = Callable[[torch.nn.Module, Any], dict[str, tuple[torch.Tensor, int]]]


@torch.no_grad()
def evaluate(
    model: torch.nn.Module,
    source: Source,
    metrics: Metrics,
    comm: Comm,
    batch_size: int,
    together: bool = False,
    doubt: Callable[[list[str]], None] = lambda _: None,
) -> dict[str, float]:
    """Each metric's sum over count, over all samples of `source`; {} where it has none. A
    collective.

    Batches have fixed boundaries and every rank takes each world_size-th. Their sums meet as
    float64 in a table with one row per batch, where each entry comes from one rank and all others
    add zero; the rows are then added in order. So the result has the same bits on any number of
    processes.

    together: all ranks make as many passes, since each gathers weights with the others.  doubt:
    gets lines on what the counts may mean, on each rank."""
    edges = list(range(0, len(source), batch_size))
    if not edges:
        return {}
    mine = list(range(comm.world.rank, len(edges), comm.world.world_size))
    own = len(mine)
    if together:
        mine += [0] * (-(-len(edges) // comm.world.world_size) - own)
    requests = ((0, np.arange(edges[i], min(edges[i] + batch_size, len(source)))) for i in mine)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    results = []
    with closing(source.batches(requests)) as batches:  # ends the workers of a map-style Dataset
        for i, (_, batch) in zip(mine, batches, strict=True):
            comm.progress.words[PASS] += 1  # so that a long evaluation is not taken for a hang
            seed_generators(
                i, comm.device
            )  # for metrics that draw: by the batch, not by who happens to evaluate it
            results.append(metrics(model, batch))
            validate_metrics(results[-1], list(results[0]) if len(results) > 1 else None)
    for module, training in modes:  # each its own: some may be frozen
        module.training = training
    names = json.loads(
        comm.broadcast_bytes(json.dumps(list(results[0])).encode() if results else None)
    )
    if results:
        validate_metrics(results[0], names)
    table = np.zeros((len(edges), len(names), 2))
    for i, result in zip(mine[:own], results[:own], strict=True):
        table[i] = [
            [float(total), float(count)] for total, count in (result[name] for name in names)
        ]
    table = comm.sum(table)
    validate_counts(table[:, :, 1], names)
    sizes = [min(batch_size, len(source) - edge) for edge in edges]
    doubt(find_doubtful_counts(table[:, :, 1], sizes, names))
    sums = np.add.reduce(table, axis=0)
    return {name: float(s / n) if n else math.nan for name, (s, n) in zip(names, sums, strict=True)}


def seed_generators(number: int, device: torch.device) -> None:
    """The generators that a model on `device` draws from. torch.manual_seed takes up to a
    millisecond.
    """
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.manual_seed(number)
