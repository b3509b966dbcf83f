"""A loss that compares the samples of a batch with each other is told from a mean over them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from stepladder.tools.check.probe.coupled_samples import find_coupled

COUNT = 6


def dice(out: Tensor) -> Tensor:
    return 1 - (out.sigmoid() * TARGETS).sum() / (out.sigmoid() + TARGETS).sum()


def contrast(out: Tensor) -> Tensor:
    similar = functional.normalize(out) @ functional.normalize(out).T
    return functional.cross_entropy(similar, torch.arange(len(out)).roll(len(out) // 2))


TARGETS = torch.rand(COUNT, 4, generator=torch.Generator().manual_seed(0))
CLASSES = torch.tensor([0, 1, -100, 3, 2, 1])
WEIGHTS = torch.tensor([1.0, 2.0, 3.0, 4.0])
MEANS: dict[str, Callable[[Tensor], Tensor]] = {
    "squares": lambda out: functional.mse_loss(out, TARGETS),
    "a sum": lambda out: functional.l1_loss(out, TARGETS, reduction="sum"),
    "a critic": lambda out: -out.mean(),
    "class weights": lambda out: functional.cross_entropy(out, CLASSES, WEIGHTS),
    "an integer": lambda out: (out.argmax(1) == CLASSES).float().mean(),
}
COUPLED: dict[str, Callable[[Tensor], Tensor]] = {
    "a ratio of sums": dice,
    "pairs": contrast,
    "a root": lambda out: functional.mse_loss(out, TARGETS).sqrt(),
    "a correlation": lambda out: torch.corrcoef(torch.stack([out[:, 0], TARGETS[:, 0]]))[0, 1],
}


def outputs(rows: int = COUNT) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, 4, generator=generator).requires_grad_()


@pytest.mark.parametrize("name", MEANS)
def test_a_mean_over_samples_is_none(name: str) -> None:
    out = outputs()
    assert not find_coupled(MEANS[name](out), [out], COUNT)


@pytest.mark.parametrize("name", COUPLED)
def test_what_depends_on_several_samples_at_once_is_one(name: str) -> None:
    out = outputs()
    loss = COUPLED[name](out)
    assert find_coupled(loss, [out], COUNT)
    loss.backward()  # the graph is still there
    assert out.grad is not None


def test_views_of_one_sample_may_be_compared_with_each_other() -> None:
    out = outputs(2 * COUNT)
    for first, second in ((out[:COUNT], out[COUNT:]), (out[::2], out[1::2])):
        loss = (functional.cosine_similarity(first, second) ** 2).mean()
        assert not find_coupled(loss, [out], COUNT)
    assert find_coupled(contrast(out), [out], COUNT)


def test_batch_norm_of_a_model_that_gets_an_output_compares_nothing() -> None:
    first = outputs()
    second = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))(first.relu())
    assert not find_coupled(second.square().mean(), [first, second], COUNT)
    assert find_coupled(contrast(second), [first, second], COUNT) == [1]


def test_the_outputs_of_two_models_belong_together() -> None:
    first, second = outputs(), outputs()
    loss = contrast(torch.cat([first, second]))
    assert find_coupled(loss, [first, second], COUNT)
    assert not find_coupled((first * second).square().mean(), [first, second], COUNT)


def test_a_loss_without_a_second_derivative_is_not_judged() -> None:
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx: torch.autograd.function.FunctionCtx, out: Tensor) -> Tensor:
            return out.sum().square()

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:
            return grad * torch.ones(COUNT, 4)

    out = outputs()
    assert not find_coupled(Once.apply(out), [out], COUNT)
