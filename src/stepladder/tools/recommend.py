"""What a trained run of recipe movielens would show a user: the newest good snapshot's model, and
titles.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from stepladder.core.errors import InputError
from stepladder.data.movielens.leave_one_out import LeaveOneOut
from stepladder.data.movielens.ratings import Ratings, read_titles
from stepladder.recipes import movielens
from stepladder.storage.run_config import read_recipe_config
from stepladder.storage.snapshot import read_newest_snapshot

HINT = "stepladder train movielens, then stepladder recipe recommend runs/movielens --user 42"


def recommend(
    run_dir: Path, user: int, top: int, titles: Path | None, data_dir: Path | None
) -> dict[str, Any]:
    """The `top` items that the user has not rated, best first, as `--json` has them. user: as in
    the data's files.

    popular: the user has no training rating: these are what most users rated, and a score is how
    many did. titles: a movies.csv, or a folder or zip with one; None: beside the data. data_dir:
    where the data is now. Raises InputError for a run of another recipe, an unknown user, a missing
    snapshot or missing data."""
    if top < 1:
        raise InputError(f"--top {top}", "--top 10")
    config = read_recipe_config(run_dir, "movielens", movielens.Config, "recommends nothing", HINT)
    if data_dir is not None:
        config.data_dir = str(data_dir)
    snapshot = read_newest_snapshot(run_dir)
    data = movielens.load(config)
    known = np.flatnonzero(data.user_ids == user)
    if not len(known):
        raise InputError(
            f"there is no user {user} among the {len(data.user_ids)} of {config.data_dir}",
            f"--user {data.user_ids.min()} to {data.user_ids.max()}",
        )
    job = movielens.build(config, data)
    snapshot.restore_model(job.model)
    counts, in_training, rated = items_of(data, job.train_data, known[0])
    popular = not in_training.any()
    if popular:
        scores = counts.float()
    else:
        job.model.eval()
        with torch.no_grad():
            scores = job.model(torch.tensor([known[0]]), in_training[None]).squeeze(0)
    scores[rated] = -torch.inf
    best = scores.nan_to_num(-torch.inf).topk(min(top, int((scores > -torch.inf).sum())))
    names = read_titles(titles or Path(config.data_dir))
    ids = [int(data.item_ids[item]) for item in best.indices.tolist()]
    items = [
        {"movie_id": movie, "title": names.get(movie), "score": score}
        for movie, score in zip(ids, best.values.tolist(), strict=True)
    ]
    return {"schema": 1, "user": user, "step": snapshot.step, "popular": popular, "items": items}


def items_of(data: Ratings | LeaveOneOut, train_data: Any, user: int) -> tuple[torch.Tensor, ...]:
    """How many training users have each item, and 1 where this user has it: both of shape (items,).

    Then the numbers of all items that the user is known to have rated, held-out ones too.
    """
    rated = data.items[data.users == user]
    if isinstance(data, LeaveOneOut):
        training = torch.from_numpy(data.rated_matrix())
        return (
            training.sum(0),
            training[user],
            torch.from_numpy(np.append(rated, data.held_out[user])),
        )
    users, items = train_data[:2]
    counts, own = (
        torch.bincount(some, minlength=len(data.item_ids)) for some in (items, items[users == user])
    )
    return counts, own, torch.from_numpy(rated)
