"""Evaluation sees each sample once and gives the same bits on any number of processes."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import cycle, islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from ranks import run_ranks
from stepladder.core.world import World
from stepladder.data.sources import TensorSource, open_source
from stepladder.rank.progress import PASS
from stepladder.train.comm import Comm
from stepladder.train.evaluation import evaluate

SIZES = [
    (1, 4),
    (4, 4),
    (10, 4),
    (23, 5),
    (101, 7),
]  # samples, batch size: also fewer batches than ranks
ALONE = Comm(World(), torch.device("cpu"))
Batch = tuple[torch.Tensor, torch.Tensor]
Metrics = dict[str, tuple[torch.Tensor, int]]


def data_of(samples: int) -> Batch:
    generator = torch.Generator().manual_seed(samples)
    return torch.randn(samples, 6, generator=generator), torch.arange(samples)


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))


def mixed(model: nn.Module, batch: Batch) -> Metrics:
    """A float sum, an integer sum, one over another count, a float64 that must round, and one not
    counted.
    """
    x, numbers = batch
    out = model(x)
    return {
        "loss": (out.square().sum(), len(x)),
        "accuracy": ((out.argmax(1) == 0).sum(), len(x)),
        "per_output": (out.exp().sum(), out.numel()),
        "always_one": (torch.ones(len(x)).sum(), len(x)),
        "mean_number": (numbers.sum(), len(x)),
        "rounded": ((numbers.double() + 1 / 3).pow(9).sum(), len(x)),
        "uncounted": (torch.zeros(()), 0),
    }


def evaluate_sizes(
    comm: Comm, sizes: list[tuple[int, int]]
) -> list[tuple[dict[str, float], list[int]]]:
    """Per size the metrics, and the samples that this rank's model was given."""
    results = []
    for samples, batch_size in sizes:
        read: list[int] = []

        def metrics(model: nn.Module, batch: Batch, read: list[int] = read) -> Metrics:
            read.extend(batch[1].tolist())
            return mixed(model, batch) | {"drawn": (torch.rand(len(batch[0])).sum(), len(batch[0]))}

        source = open_source(data_of(samples), comm.device, seed=0)
        results.append((evaluate(model_of(), source, metrics, comm, batch_size), read))
    return results


@pytest.fixture(scope="module")
def alone() -> list[tuple[dict[str, float], list[int]]]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    results = evaluate_sizes(ALONE, SIZES)
    torch.set_num_threads(before)
    return results


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [2, 3])
def test_any_number_of_ranks_gives_the_bits_of_one_process_and_reads_each_sample_once(
    alone: list[tuple[dict[str, float], list[int]]], world_size: int
) -> None:
    by_rank = run_ranks(evaluate_sizes, world_size, SIZES)
    for number, (samples, batch_size) in enumerate(SIZES):
        expected = {name: value.hex() for name, value in alone[number][0].items()}
        for rank in range(world_size):
            result = {name: value.hex() for name, value in by_rank[rank][number][0].items()}
            assert result == expected, f"rank {rank}, {samples} samples in batches of {batch_size}"
        read = [sample for rank in range(world_size) for sample in by_rank[rank][number][1]]
        assert sorted(read) == list(range(samples))


def evaluate_in_equal_passes(comm: Comm) -> list[tuple[dict[str, float], int]]:
    """Per size the metrics, and how often this rank's model was called."""
    results = []
    for samples, batch_size in SIZES:
        model = model_of()
        calls = []
        model.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        source = open_source(data_of(samples), comm.device, seed=0)
        result = evaluate(model, source, mixed, comm, batch_size, equal_passes=True)
        results.append((result, len(calls)))
    return results


@pytest.mark.ranks
def test_where_a_pass_gathers_weights_all_ranks_make_as_many(
    alone: list[tuple[dict[str, float], list[int]]],
) -> None:
    by_rank = run_ranks(evaluate_in_equal_passes, 3)
    for number, (samples, batch_size) in enumerate(SIZES):
        batches = -(-samples // batch_size)
        for rank in range(3):
            result, calls = by_rank[rank][number]
            assert calls == -(-batches // 3)
            assert result["mean_number"] == alone[number][0]["mean_number"]


@pytest.mark.parametrize(
    "number", range(len(SIZES)), ids=[f"{n} in batches of {b}" for n, b in SIZES]
)
def test_a_metric_is_its_sum_over_its_count_never_a_mean_of_means(
    alone: list[tuple[dict[str, float], list[int]]], number: int
) -> None:
    samples = SIZES[number][0]
    result, read = alone[number]
    totals = mixed(model_of().eval(), data_of(samples))
    assert read == list(range(samples))
    assert result["always_one"] == 1.0
    assert result["mean_number"] == (samples - 1) / 2
    for name in ("loss", "accuracy", "per_output", "rounded"):
        total, count = totals[name]
        assert result[name] == pytest.approx(float(total.detach()) / count, rel=1e-6)
    assert math.isnan(result["uncounted"])


@pytest.mark.parametrize(
    "value", [torch.tensor(2**24 + 1), torch.tensor(2.0**24 + 1, dtype=torch.float64)]
)
def test_sums_over_batches_lose_no_integer_that_float32_would(value: torch.Tensor) -> None:
    source = open_source(torch.zeros(3), torch.device("cpu"), seed=0)
    result = evaluate(
        nn.Identity(), source, lambda model, batch: {"sum": (value, 1)}, ALONE, batch_size=1
    )
    assert result == {"sum": 2**24 + 1}


def test_a_small_batch_that_is_very_wrong_weighs_by_its_samples() -> None:
    source = open_source(torch.tensor([1.0, 1.0, 1.0, 101.0]), torch.device("cpu"), seed=0)
    metrics: Callable[..., Metrics] = lambda model, batch: {"mean": (batch.sum(), len(batch))}  # noqa: E731
    assert evaluate(nn.Identity(), source, metrics, ALONE, batch_size=3) == {"mean": 26.0}


def test_the_model_is_in_eval_mode_without_gradients_and_each_layers_mode_comes_back() -> None:
    model = model_of()
    frozen = model[1].eval()
    modes: list[Any] = []

    def metrics(model: nn.Module, batch: Batch) -> Metrics:
        modes.append((model.training, model[2].training, torch.is_grad_enabled()))
        return {"n": (torch.tensor(1.0), 1)}

    evaluate(
        model, open_source(data_of(2), torch.device("cpu"), seed=0), metrics, ALONE, batch_size=2
    )
    assert modes == [(False, False, False)]
    assert model.training and model[2].training and torch.is_grad_enabled()
    assert not frozen.training, "a layer that the user had frozen was set to train"


def test_evaluation_changes_no_weight_and_no_running_statistic() -> None:
    model = model_of()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    evaluate(
        model, open_source(data_of(9), torch.device("cpu"), seed=0), mixed, ALONE, batch_size=4
    )
    changed = [
        name for name, value in model.state_dict().items() if not torch.equal(value, before[name])
    ]
    assert changed == []


def test_a_metric_that_is_nan_twice_is_the_same_one() -> None:
    source = open_source(data_of(9), torch.device("cpu"), seed=0)
    metrics = evaluate(
        model_of(), source, lambda *_: {"x": (math.nan, 1)}, ALONE, batch_size=4, repeats=True
    )
    assert math.isnan(metrics["x"])


def test_without_samples_there_are_no_metrics() -> None:
    source = open_source(torch.zeros(0, 6), torch.device("cpu"), seed=0)
    assert evaluate(model_of(), source, mixed, ALONE, batch_size=4) == {}


def test_each_batch_counts_as_progress_so_that_a_long_evaluation_is_no_hang() -> None:
    comm = Comm(World(), torch.device("cpu"))
    before = comm.progress.slots[PASS]
    evaluate(model_of(), open_source(data_of(10), comm.device, seed=0), mixed, comm, batch_size=4)
    assert comm.progress.slots[PASS] == before + 3


def test_metrics_come_in_the_order_of_the_first_batch() -> None:
    names = iter((["b", "a"], ["a", "b"], ["a", "b"]))
    metrics: Callable[..., Metrics] = lambda *_: {name: (torch.ones(()), 1) for name in next(names)}  # noqa: E731
    result = evaluate(
        nn.Identity(), open_source(torch.zeros(3), ALONE.device, 0), metrics, ALONE, batch_size=1
    )
    assert list(result) == ["b", "a"]


@pytest.mark.parametrize(("given", "problem"), [(2, "shorter"), (4, "longer")])
def test_a_source_that_gives_another_number_of_batches_than_asked_for_is_an_error(
    given: int, problem: str
) -> None:
    class Odd(TensorSource):
        def batches(self, requests: Any) -> Any:
            yield from islice(cycle(super().batches(requests)), given)

    source = Odd(torch.zeros(3), ALONE.device)
    with pytest.raises(ValueError, match=problem):
        evaluate(nn.Identity(), source, lambda *_: {"n": (torch.ones(()), 1)}, ALONE, batch_size=1)


class Squares(Dataset):
    """A map-style Dataset, as a job may give."""

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> np.float64:
        return np.float64(index**2)


def test_a_dataset_is_evaluated_like_tensors() -> None:
    source = open_source(Squares(), torch.device("cpu"), seed=0)
    metrics: Callable[..., Metrics] = lambda model, batch: {"mean": (batch.sum(), len(batch))}  # noqa: E731
    assert evaluate(nn.Identity(), source, metrics, ALONE, batch_size=3) == {"mean": 91 / 7}
