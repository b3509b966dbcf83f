"""Ranking metrics as sums over users, and EASE, a closed-form ranking to compare a model with.

Each user counts once, so the metrics are the same on any number of processes.

A score that is NaN is a miss: compared with NaN, every item counts as better. A tie counts against
the model.
"""

from __future__ import annotations

import torch
from torch import Tensor

MetricSums = dict[str, tuple[Tensor, int]]


def rank_among(scores: Tensor, held_out: Tensor, candidates: Tensor) -> Tensor:
    """Return how many candidates are not scored below the held-out item: its rank from 0.

    The held-out item among its own candidates costs no rank: 156 rows of the MovieLens 1M file have
    it there, and the evaluation of the authors does not count it either.

    Args:
        scores: Shape (users, items).
        held_out: The item of each user, shape (users,).
        candidates: The items to compare with, shape (users, n).
    """
    held_out = held_out[:, None]
    is_below = scores.gather(1, candidates) < scores.gather(1, held_out)
    is_ahead = ~is_below & (candidates != held_out)
    return is_ahead.sum(1)


def rank_in_catalogue(scores: Tensor, held_out: Tensor, rated: Tensor) -> Tensor:
    """Return the held-out item's rank from 0 among all items that the user has not rated.

    Args:
        scores: Shape (users, items).
        held_out: The item of each user, shape (users,).
        rated: Nonzero for the items rated in the training data, shape (users, items).
    """
    held_out = held_out[:, None]
    is_below = scores < scores.gather(1, held_out)
    is_ahead = ~is_below & (rated == 0)
    return is_ahead.scatter(1, held_out, False).sum(1)


def hit_rate(ranks: Tensor, k: int) -> tuple[Tensor, int]:
    """Return the number of users whose held-out item is among the first k, and of all users."""
    return (ranks < k).sum(), len(ranks)


def ndcg(ranks: Tensor, k: int) -> tuple[Tensor, int]:
    """Return the sum of NDCG@k over users, and the number of users.

    With one relevant item it is ln 2 / ln(rank + 2), and 0 from rank k on (He et al. 2017).
    """
    gains = 1 / torch.log2(ranks.double() + 2)
    return torch.where(ranks < k, gains, 0.0).sum(), len(ranks)


def ranking_metrics(
    scores: Tensor, held_out: Tensor, candidates: Tensor, rated: Tensor
) -> MetricSums:
    """Return hit rates and NDCG among the candidates, and among the catalogue as `..._all`.

    Args:
        scores: Shape (users, items).
        held_out: The item of each user, shape (users,).
        candidates: The items to compare with, shape (users, n).
        rated: Nonzero for the items rated in the training data, shape (users, items).
    """
    candidate_ranks = rank_among(scores, held_out, candidates)
    catalogue_ranks = rank_in_catalogue(scores, held_out, rated)
    return {
        "hr@10": hit_rate(candidate_ranks, 10),
        "ndcg@10": ndcg(candidate_ranks, 10),
        "hr@10_all": hit_rate(catalogue_ranks, 10),
        "ndcg@10_all": ndcg(catalogue_ranks, 10),
        "hr@50_all": hit_rate(catalogue_ranks, 50),
    }


def fit_ease(rated: Tensor, regulariser: float = 1000.0) -> Tensor:
    """Return the item weights of EASE, which best rebuild the ratings (Steck, WWW 2019, eq. 8).

    The scores are rated @ weights. This runs on one thread, since another number of threads gives
    other bits.

    Args:
        rated: Shape (users, items).
        regulariser: Of the squared weights.

    Returns:
        Shape (items, items), with a zero diagonal.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    x = rated.float()
    gram = (x.T @ x).double()
    gram.diagonal().add_(regulariser)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(gram))
    torch.set_num_threads(threads)
    weights = -inverse / inverse.diagonal()
    return weights.fill_diagonal_(0).float()
