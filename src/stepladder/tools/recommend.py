"""Recommend items to a user with the model of a run of recipe movielens."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stepladder.core.errors import InputError
from stepladder.data.movielens.leave_one_out import LeaveOneOut
from stepladder.data.movielens.ratings import Ratings, read_titles
from stepladder.recipes import movielens
from stepladder.storage.run_config import read_recipe_config
from stepladder.storage.snapshot import read_newest_snapshot

RECOMMEND_HINT = (
    "stepladder train movielens, then stepladder recipe recommend runs/movielens --user 42"
)


def recommend(
    run_dir: Path, user: int, top: int, titles: Path | None, data_dir: Path | None
) -> dict[str, Any]:
    """Return the best items that the user has not rated, best first, as `--json` prints them.

    A user without ratings in the training data gets the items with the most ratings; then "popular"
    is true, and a score is a number of ratings.

    Args:
        run_dir: The run of recipe movielens.
        user: The user's number in the files of the data.
        top: The number of items.
        titles: A movies.csv, or a folder or zip that has one; None for that of the data.
        data_dir: The folder of the data, if it is not where it was in training.

    Raises:
        InputError: The run is of another recipe, or the user, a snapshot or the data is missing.
    """
    if top < 1:
        raise InputError(f"--top {top}", "--top 10")
    config = read_recipe_config(
        run_dir, "movielens", movielens.Config, "recommends nothing", RECOMMEND_HINT
    )
    if data_dir is not None:
        config.data_dir = str(data_dir)
    snapshot = read_newest_snapshot(run_dir)
    data = movielens.load(config)
    user_index = _find_user(data, user, config.data_dir)
    job = movielens.build(config, data)
    snapshot.restore_model(job.model)
    ratings = _get_user_ratings(data, job.train_data, user_index)
    popular = not ratings.in_training.any()
    if popular:
        scores = ratings.counts.float()
    else:
        job.model.eval()
        with torch.no_grad():
            users = torch.tensor([user_index])
            scores = job.model(users, ratings.in_training[None]).squeeze(0)
    scores[ratings.rated] = -torch.inf
    num_candidates = int((scores > -torch.inf).sum())
    best = scores.nan_to_num(-torch.inf).topk(min(top, num_candidates))
    title_of = read_titles(titles or Path(config.data_dir))
    items = []
    best_pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    for index, score in best_pairs:
        movie_id = int(data.item_ids[index])
        items.append({"movie_id": movie_id, "title": title_of.get(movie_id), "score": score})
    return {"schema": 1, "user": user, "step": snapshot.step, "popular": popular, "items": items}


def _find_user(data: Ratings | LeaveOneOut, user: int, data_dir: str) -> int:
    """Return the user's index in the data. Raises InputError if there is no such user."""
    indices = np.flatnonzero(data.user_ids == user)
    if not len(indices):
        raise InputError(
            f"there is no user {user} among the {len(data.user_ids)} of {data_dir}",
            f"--user {data.user_ids.min()} to {data.user_ids.max()}",
        )
    return int(indices[0])


class _UserRatings(NamedTuple):
    """The ratings of a user.

    Args:
        counts: The number of training users that rated each item, shape (items,).
        in_training: 1 for each item that this user rated in training, else 0, shape (items,).
        rated: The indices of all items that this user rated, also in the held-out data.
    """

    counts: Tensor
    in_training: Tensor
    rated: Tensor


def _get_user_ratings(
    data: Ratings | LeaveOneOut, train_data: Any, user_index: int
) -> _UserRatings:
    rated = data.items[data.users == user_index]
    if isinstance(data, LeaveOneOut):
        matrix = torch.from_numpy(data.rated_matrix())
        rated = np.append(rated, data.held_out[user_index])
        return _UserRatings(matrix.sum(0), matrix[user_index], torch.from_numpy(rated))
    users, items = train_data[:2]
    num_items = len(data.item_ids)
    counts = torch.bincount(items, minlength=num_items)
    in_training = torch.bincount(items[users == user_index], minlength=num_items)
    return _UserRatings(counts, in_training, torch.from_numpy(rated))
