"""Batch norm's running statistics move once per step, by the mean over all microbatches, weighted
by samples.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stepladder.train.batch_norm import RunningStatistics, find_batch_norms

CUTS = [[8], [4, 4], [2, 6], [3, 3, 2], [2, 2, 2, 2]]


def model_of(momentum: float | None = 0.1, **flags: bool) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv1d(2, 3, 1),
        nn.BatchNorm1d(3, momentum=momentum, **flags),
        nn.Flatten(),
        nn.Linear(12, 2),
        nn.BatchNorm1d(2, momentum=momentum, **flags),
    )


def data_of(step: int, samples: int = 8) -> torch.Tensor:
    return torch.randn(samples, 2, 4, generator=torch.Generator().manual_seed(step)) * 3 + step


def take_step(model: nn.Module, statistics: RunningStatistics, batches: list[torch.Tensor]) -> None:
    """One step as the trainer makes it: captured per microbatch, weighted by samples, applied once."""
    statistics.begin()
    total = torch.zeros(statistics.size)
    for batch in batches:
        model(batch)
        total += statistics.capture(len(batch))
    statistics.finish(total)


def statistics_of(model: nn.Module, x: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Mean and unbiased variance that each batch norm sees for `x`."""
    calls = []
    layers = [m for m in model.modules() if isinstance(m, nn.BatchNorm1d)]
    hooks = [m.register_forward_pre_hook(lambda _, args: calls.append(args[0])) for m in layers]
    model(x)
    for hook in hooks:
        hook.remove()
    flat = [h.transpose(0, 1).reshape(h.shape[1], -1) for h in calls]
    return [(h.mean(1), h.var(1)) for h in flat]


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("momentum", [0.1, 0.5, None])
def test_after_a_step_the_running_statistics_are_the_count_weighted_mean_of_its_microbatches(
    cut: list[int], momentum: float | None
) -> None:
    model = model_of(momentum)
    reference = model_of(momentum)
    batches = list(data_of(0).split(cut))
    take_step(model, RunningStatistics(model), batches)
    parts = [statistics_of(reference, batch) for batch in batches]
    weight = 1.0 if momentum is None else momentum
    for number, layer in enumerate(find_batch_norms(model)):
        for which, before, now in ((0, 0.0, layer.running_mean), (1, 1.0, layer.running_var)):
            mean = (
                sum(part[number][which] * len(b) for part, b in zip(parts, batches, strict=True))
                / 8
            )
            torch.testing.assert_close(now, (1 - weight) * before + weight * mean)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_with_one_microbatch_per_step_nothing_differs_from_plain_batch_norm(
    momentum: float | None,
) -> None:
    model = model_of(momentum)
    plain = model_of(momentum)
    statistics = RunningStatistics(model)
    for step in range(4):
        take_step(model, statistics, [data_of(step)])
        plain(data_of(step))
    torch.testing.assert_close(model.state_dict(), plain.state_dict())


def test_momentum_none_is_the_plain_mean_over_steps_however_they_were_cut() -> None:
    model = model_of(None)
    reference = model_of(None)
    statistics = RunningStatistics(model)
    for step, cut in enumerate(CUTS):
        take_step(model, statistics, list(data_of(step).split(cut)))
    means = [
        sum(statistics_of(reference, b)[0][0] * len(b) for b in data_of(step).split(cut)) / 8
        for step, cut in enumerate(CUTS)
    ]
    torch.testing.assert_close(find_batch_norms(model)[0].running_mean, torch.stack(means).mean(0))


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_a_step_counts_as_one_batch(cut: list[int]) -> None:
    model = model_of()
    statistics = RunningStatistics(model)
    for step in range(3):
        take_step(model, statistics, list(data_of(step).split(cut)))
    assert [int(layer.num_batches_tracked) for layer in find_batch_norms(model)] == [3, 3]


def test_a_rank_without_microbatches_moves_by_what_the_others_saw() -> None:
    model = model_of()
    peer = model_of()
    statistics = RunningStatistics(model)
    of_other = RunningStatistics(peer)
    statistics.begin()
    of_other.begin()
    model(data_of(0))
    total = statistics.capture(8)
    statistics.finish(total)
    of_other.finish(total)
    torch.testing.assert_close(peer.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_each_layers_momentum_comes_back() -> None:
    model = model_of(0.3)
    statistics = RunningStatistics(model)
    take_step(model, statistics, [data_of(0)])
    assert [layer.momentum for layer in find_batch_norms(model)] == [0.3, 0.3]


def test_a_layer_that_the_user_froze_keeps_its_statistics() -> None:
    model = model_of()
    take_step(model, RunningStatistics(model), [data_of(0)])
    frozen = find_batch_norms(model)[0].eval()
    before = {name: value.clone() for name, value in frozen.state_dict().items()}
    take_step(model, RunningStatistics(model), list(data_of(1).split([3, 3, 2])))
    changed = [
        name for name, value in frozen.state_dict().items() if not torch.equal(value, before[name])
    ]
    assert changed == []
    assert int(find_batch_norms(model)[1].num_batches_tracked) == 2


def test_a_layer_that_some_microbatches_skip_moves_by_the_mean_over_the_others() -> None:
    model = model_of()
    only = model_of()
    statistics = RunningStatistics(model)
    statistics.begin()
    total = torch.zeros(statistics.size)
    for step in range(3):
        if step == 1:
            model(data_of(step))
        total += statistics.capture(8)
    statistics.finish(total)
    take_step(only, RunningStatistics(only), [data_of(1)])
    torch.testing.assert_close(model.state_dict(), only.state_dict())


def test_a_layer_that_all_microbatches_skip_keeps_its_statistics() -> None:
    model = model_of()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    statistics = RunningStatistics(model)
    statistics.begin()
    statistics.finish(statistics.capture(8))
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_layers_without_running_statistics_are_left_alone() -> None:
    assert find_batch_norms(model_of(track_running_stats=False)) == []
    assert (
        len(find_batch_norms(nn.Sequential(nn.BatchNorm2d(3), nn.GroupNorm(1, 3), nn.LayerNorm(3))))
        == 1
    )
