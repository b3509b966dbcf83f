"""Activations that must not stand before a loss, as the graphs of real losses show them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from stepladder.tools.check.probe.loss_graph import activation_of
from stepladder.tools.check.probe_settings import NO_LOGARITHM

SCORES = torch.linspace(-1, 1, 48).reshape(8, 6).requires_grad_()
IMAGES = torch.linspace(-1, 1, 2 * 6 * 9).reshape(2, 6, 3, 3).requires_grad_()
KINDS = torch.arange(8) % 6
PIXELS = torch.arange(18).reshape(2, 3, 3) % 6
FLAGS = torch.ones(8, 6)


def focal(scores: Tensor) -> Tensor:
    losses = F.cross_entropy(scores, KINDS, reduction="none")
    return ((1 - torch.exp(-losses)) ** 2 * losses).mean()


def picked(scores: Tensor) -> Tensor:
    """Return the score of each kind, for which some scripts call nll_loss."""
    return -F.nll_loss(scores, KINDS, reduction="none")


CASES = {
    "scores": (F.cross_entropy(SCORES, KINDS), ""),
    "a ReLU": (F.cross_entropy(SCORES.relu(), KINDS), "relu"),
    "a ReLU, smoothed labels": (F.cross_entropy(SCORES.relu(), KINDS, label_smoothing=0.1), "relu"),
    "a ReLU of tokens": (
        F.cross_entropy(IMAGES.relu().flatten(2).mT.reshape(-1, 6), PIXELS.flatten()),
        "relu",
    ),
    "a ReLU before a mean": (F.cross_entropy(IMAGES.relu().mean((2, 3)), KINDS[:2]), ""),
    "a ReLU that is fitted": (F.mse_loss(SCORES.relu(), FLAGS), ""),
    "a ReLU before a sigmoid": (F.binary_cross_entropy_with_logits(SCORES.relu(), FLAGS), "relu"),
    "features of a larger net": (
        F.kl_div(SCORES.relu().log_softmax(1), FLAGS / 6, reduction="batchmean"),
        "",
    ),
    "softmax": (F.cross_entropy(SCORES.softmax(1), KINDS), "softmax"),
    "softmax in a focal loss": (focal(SCORES.softmax(1)), "softmax"),
    "logarithms": (F.nll_loss(SCORES.log_softmax(1), KINDS), ""),
    "logarithms in half precision": (F.nll_loss(SCORES.bfloat16().log_softmax(1), KINDS), ""),
    "logarithms of pixels": (F.nll_loss(IMAGES.log_softmax(1), PIXELS), ""),
    "scores as logarithms": (F.nll_loss(SCORES, KINDS, reduction="none").mean(), NO_LOGARITHM),
    "scores of pixels": (F.nll_loss(IMAGES, PIXELS) * 0.5, NO_LOGARITHM),
    "probabilities": (F.nll_loss(SCORES.softmax(1), KINDS) + SCORES.square().mean(), NO_LOGARITHM),
    "picked scores": (F.mse_loss(picked(SCORES), FLAGS[:, 0]), ""),
    "picked probabilities": (-torch.log(picked(SCORES.softmax(1))).mean(), ""),
}


@pytest.mark.parametrize("name", CASES)
def test_what_stands_before_a_loss_is_read_from_its_graph(name: str) -> None:
    loss, expected = CASES[name]
    assert activation_of(loss) == expected
