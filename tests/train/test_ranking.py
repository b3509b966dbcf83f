"""Ranks by hand: ties, NaN, the held-out item among its own negatives, what is rated already; and
EASE.
"""

from __future__ import annotations

import math

import pytest
import torch

from stepladder.train.metrics.ranking import (
    fit_ease,
    hit_rate,
    ndcg,
    rank_among,
    rank_in_catalogue,
    ranking_metrics,
)

NAN = math.nan


def among(scores: list[float], held_out: int, candidates: list[int]) -> int:
    return int(
        rank_among(torch.tensor([scores]), torch.tensor([held_out]), torch.tensor([candidates]))
    )


def test_a_rank_counts_the_others_that_are_not_below() -> None:
    assert among([0.1, 0.9, 0.5, 0.4], 2, [0, 1, 3]) == 1
    assert among([0.1, 0.9, 0.5, 0.5], 2, [0, 1, 3]) == 2, "a tie counts against the model"


def test_the_held_out_item_among_its_negatives_costs_no_rank() -> None:
    assert among([0.1, 0.9, 0.5, 0.4], 1, [0, 1, 3]) == 0


@pytest.mark.parametrize("scores", [[NAN] * 4, [0.1, NAN, 0.2, 0.3], [math.inf] * 4])
def test_a_score_that_says_nothing_is_last(scores: list[float]) -> None:
    assert among(scores, 1, [0, 2, 3]) == 3


def test_a_nan_elsewhere_counts_as_better() -> None:
    assert among([NAN, 0.9, 0.5, 0.4], 1, [0, 2, 3]) == 1


def test_the_catalogue_is_ranked_without_what_is_rated() -> None:
    scores = torch.tensor([[5.0, 4.0, 3.0, 2.0], [NAN, NAN, NAN, NAN]])
    rated = torch.tensor([[1, 0, 0, 0], [1, 0, 0, 0]], dtype=torch.uint8)
    assert rank_in_catalogue(scores, torch.tensor([2, 2]), rated).tolist() == [1, 2]


def test_hits_and_gains_are_sums_over_users() -> None:
    ranks = torch.tensor([0, 1, 9, 10])
    assert [int(n) for n in hit_rate(ranks, 10)] == [3, 4]
    total, count = ndcg(ranks, 10)
    assert count == 4
    assert float(total) == pytest.approx(
        sum(math.log(2) / math.log(rank + 2) for rank in (0, 1, 9))
    )


def test_a_broken_model_hits_nothing() -> None:
    users = 5
    items = 30
    candidates = torch.arange(1, 21).repeat(users, 1)
    sums = ranking_metrics(torch.full((users, items), NAN), torch.zeros(users, dtype=torch.long), candidates,
                           torch.zeros(users, items))  # fmt: skip
    assert {name: float(total) for name, (total, _) in sums.items()} == dict.fromkeys(sums, 0.0) | {
        "hr@50_all": users
    }, "with 30 items, the last is among the first 50"


def test_ease_solves_its_own_equation() -> None:
    """Its weights minimise |X - XB|^2 + r |B|^2 over B with a zero diagonal: off it, the gradient
    is zero.
    """
    rated = (torch.rand(50, 8, generator=torch.Generator().manual_seed(0)) < 0.4).to(torch.uint8)
    weights = fit_ease(rated, regulariser=3.0).double()
    x = rated.double()
    gradient = x.T @ (x @ weights - x) + 3.0 * weights
    assert weights.diagonal().abs().max() == 0
    assert (gradient - torch.diag(gradient.diagonal())).abs().max() < 1e-5
    assert weights.abs().max() > 0.05
