"""Ranking metrics as sums over users, and EASE, the closed-form ranking that a trained one has to
beat.

Each user counts once, so the metrics are the same on any number of processes.

A score that is NaN is a miss: compared with NaN everything counts as better. A tie counts against
the model."""

from __future__ import annotations

import torch
from torch import Tensor

MetricSums = dict[str, tuple[Tensor, int]]


def rank_among(scores: Tensor, held_out: Tensor, others: Tensor) -> Tensor:
    """How many of the others (users, n) are not scored below the held-out item (users,): its rank
    from 0.

    scores (users, items). The held-out item's own appearance among the others costs no rank: 156
    rows of the MovieLens 1M file have one, which the authors' evaluation does not see either."""
    own = scores.gather(1, held_out[:, None])
    return (~(scores.gather(1, others) < own) & (others != held_out[:, None])).sum(1)


def rank_in_catalogue(scores: Tensor, held_out: Tensor, rated: Tensor) -> Tensor:
    """The held-out item's rank from 0 among all items that the user has not rated in training."""
    own = scores.gather(1, held_out[:, None])
    better = ~(scores < own) & (rated == 0)
    return better.scatter(1, held_out[:, None], False).sum(1)


def hit_rate(ranks: Tensor, k: int) -> tuple[Tensor, int]:
    """Users whose held-out item is among the first k, and all users."""
    return (ranks < k).sum(), len(ranks)


def ndcg(ranks: Tensor, k: int) -> tuple[Tensor, int]:
    """NDCG@k with one relevant item: ln 2 / ln(rank + 2), 0 from rank k on (He et al. 2017)."""
    gains = 1 / torch.log2(ranks.double() + 2)
    return torch.where(ranks < k, gains, 0.0).sum(), len(ranks)


def ranking_metrics(scores: Tensor, held_out: Tensor, others: Tensor, rated: Tensor) -> MetricSums:
    """hr@10 and ndcg@10 among the given others; `_all`: among the whole catalogue without training
    items.
    """
    sampled = rank_among(scores, held_out, others)
    full = rank_in_catalogue(scores, held_out, rated)
    return {
        "hr@10": hit_rate(sampled, 10),
        "ndcg@10": ndcg(sampled, 10),
        "hr@10_all": hit_rate(full, 10),
        "ndcg@10_all": ndcg(full, 10),
        "hr@50_all": hit_rate(full, 50),
    }


def fit_ease(rated: Tensor, regulariser: float = 1000.0) -> Tensor:
    """Item weights (items, items) that best rebuild rated (users, items), with a zero diagonal.

    Steck (WWW 2019), equation 8. Scores are rated @ weights. On one thread: another number gives
    other bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    x = rated.float()
    gram = (x.T @ x).double()
    gram.diagonal().add_(regulariser)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(gram))
    torch.set_num_threads(threads)
    return (-inverse / inverse.diagonal()).fill_diagonal_(0).float()
