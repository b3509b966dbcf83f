"""Exact evaluation: each sample counts once, on any number of processes.

Sums and counts are added over all samples; means are never averaged.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import nn

from stepladder.core.errors import InputError
from stepladder.core.numbers import format_ranks
from stepladder.data.sources import BatchSource
from stepladder.rank.progress import PASS
from stepladder.train.batch_reader import BatchReader
from stepladder.train.comm import Comm
from stepladder.train.fingerprints import find_minority, fingerprint
from stepladder.train.generators import seed_generators
from stepladder.train.return_values import find_doubtful_counts, validate_counts, validate_metrics

Metrics = Callable[[nn.Module, Any], dict[str, tuple[torch.Tensor, int]]]
EVALUATION_EPOCH = 0  # always the same: a Dataset then draws the same random numbers each time


@torch.no_grad()
def evaluate(
    model: nn.Module,
    source: BatchSource,
    metrics: Metrics,
    comm: Comm,
    batch_size: int,
    equal_passes: bool = False,
    repeats: bool = False,
    compares: bool = False,
    warn: Callable[[list[str]], None] = lambda _: None,
) -> dict[str, float]:
    """Return each metric's sum divided by its count, over all samples. A collective.

    Batches have fixed boundaries, and the ranks take them in turn. Their results go into a float64
    table with one row per batch. To a row, one rank adds its results and the others add zeros; then
    the rows are added in order. So the metrics have the same bits on any number of processes.

    Args:
        model: Evaluated in eval mode.
        source: The samples.
        metrics: Returns the sum and the count of each metric for a batch.
        comm: The ranks that share the batches.
        batch_size: Samples per batch.
        equal_passes: Whether all ranks make equally many passes, as collectives in a pass need.
        repeats: Whether the first batch is computed once more, and must give the same.
        compares: Whether all ranks compute the first batch, and must get the same. It must be equal
            on all ranks.
        warn: Called on each rank with lines about doubtful counts; there may be none.

    Returns:
        The metrics by name; {} if there are no samples.
    """
    num_samples = len(source)
    bounds = [
        (first, min(first + batch_size, num_samples)) for first in range(0, num_samples, batch_size)
    ]
    if not bounds:
        return {}
    own_numbers = range(comm.world.rank, len(bounds), comm.world.world_size)
    pass_numbers = list(own_numbers)  # for each pass, the number of its batch
    if equal_passes:  # idle passes compute batch 0, and their results are dropped
        max_passes = -(-len(bounds) // comm.world.world_size)  # rounded up
        pass_numbers += [0] * (max_passes - len(own_numbers))
    requests = ((EVALUATION_EPOCH, np.arange(*bounds[number])) for number in pass_numbers)
    with _eval_mode(model), closing(source.batches(requests)) as batches:
        numbered = zip(pass_numbers, batches, strict=True)
        results = _compute_metrics(model, metrics, comm, numbered, repeats and not equal_passes)
        if compares and not comm.alone:
            with closing(source.batches([(EVALUATION_EPOCH, np.arange(*bounds[0]))])) as batches:
                _validate_on_all_ranks(model, metrics, comm, next(batches)[1])
    names = _agree_on_names(results, comm)
    table = np.zeros((len(bounds), len(names), 2))
    for number, result in zip(own_numbers, results, strict=False):
        table[number] = [[float(value) for value in result[name]] for name in names]
    table = comm.sum(table)
    sizes = [end - first for first, end in bounds]
    validate_counts(table[:, :, 1], names)
    warn(find_doubtful_counts(table[:, :, 1], sizes, names))
    return _compute_means(table, names)


@torch.no_grad()
def compute_first_batch(
    model: nn.Module, reader: BatchReader, metrics: Metrics, batch_size: int
) -> dict[str, list[float]]:
    """Return the sum and the count of each metric for the first batch of an evaluation."""
    indices = np.arange(min(batch_size, len(reader.source)))
    batch = reader.read_request([(EVALUATION_EPOCH, indices)])
    with _eval_mode(model):
        return _compute_batch(model, metrics, batch, reader.comm.device)


def _compute_batch(
    model: nn.Module, metrics: Metrics, batch: Any, device: torch.device
) -> dict[str, list[float]]:
    """Return the sum and the count of each metric for the first batch, as plain numbers."""
    seed_generators(0, device)
    result = metrics(model, batch)
    return {name: [float(part) for part in value] for name, value in result.items()}


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    """Set a model to eval mode for the length of the block.

    Each module gets its own mode back, since the user may have frozen some of them.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, is_training in modes:
            module.training = is_training


def _compute_metrics(
    model: nn.Module,
    metrics: Metrics,
    comm: Comm,
    numbered_batches: Iterable[tuple[int, Any]],
    repeats: bool,
) -> list[dict[str, Any]]:
    """Return what `metrics` returns for each batch.

    Args:
        model: The model.
        metrics: The function of the job.
        comm: The ranks, of which each has its own batches.
        numbered_batches: The number of each batch, with the indices of its samples and the batch.
        repeats: Whether the first batch is computed once more after all others.

    Returns:
        The results, in the order of the batches.

    Raises:
        InputError: The first batch has other metrics when it is computed again.
    """
    results: list[dict[str, Any]] = []
    first: tuple[int, Any] | None = None
    for number, (_indices, batch) in numbered_batches:
        if repeats and first is None:
            with suppress(TypeError, RuntimeError):  # some objects cannot be copied
                first = number, copy.deepcopy(batch)
            repeats = first is not None
        comm.progress.slots[PASS] += 1  # so that a long evaluation is not taken for a hang
        # For metrics that draw random numbers: these depend on the batch, not on the rank.
        seed_generators(number, comm.device)
        result = metrics(model, batch)
        expected_names = list(results[0]) if results else None
        validate_metrics(result, expected_names)
        results.append(result)
    if first is not None:
        number, batch = first
        seed_generators(number, comm.device)
        _validate_repeated(results[0], metrics(model, batch))
    return results


def _validate_on_all_ranks(model: nn.Module, metrics: Metrics, comm: Comm, batch: Any) -> None:
    """Raise InputError if a batch has other metrics on some rank. A collective."""
    values = _compute_batch(model, metrics, batch, comm.device)
    if different := find_minority(comm.gather_bytes(fingerprint(values))):
        raise InputError(
            f"--sync exact: metrics of the same batch are others on {format_ranks(different)} than"
            " on others",
            "nothing in metrics but the job's model may depend on what a rank was trained on",
        )


def _validate_repeated(first: dict[str, Any], second: dict[str, Any]) -> None:
    """Raise InputError if two results of one batch differ."""
    for name, values in first.items():
        # As texts, of which NaN equals NaN.
        if repr(list(map(float, values))) != repr(list(map(float, second[name]))):
            raise InputError(
                f"--sync exact: the metric {name} of a batch is another one when it is computed"
                " again, so it would depend on the number of processes and on a resume",
                "no state between calls, no generator of its own: sum and count of the batch alone",
            )


def _agree_on_names(results: list[dict[str, Any]], comm: Comm) -> list[str]:
    """Return the names of the metrics of rank 0, which always has a batch. A collective."""
    own_names = json.dumps(list(results[0])).encode() if comm.world.rank == 0 else None
    names: list[str] = json.loads(comm.broadcast_bytes(own_names))
    if results:
        validate_metrics(results[0], names)
    return names


def _compute_means(table: np.ndarray, names: list[str]) -> dict[str, float]:
    """Return sum / count of each metric, from a table of shape (batches, names, 2)."""
    means = {}
    sums = np.add.reduce(table, axis=0)
    for name, (total, count) in zip(names, sums, strict=True):
        means[name] = float(total / count) if count else math.nan
    return means
