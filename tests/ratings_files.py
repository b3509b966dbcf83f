"""Small made-up ratings in the formats of MovieLens: users of two tastes, each with its own half of
the items.
"""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np

USERS = 60
ITEMS = 40
EACH = 8
NEGATIVES = 15


def tastes(seed: int = 0) -> np.ndarray:
    """Items of each user in the order of rating, shape (USERS, EACH): odd users take odd items."""
    draw = np.random.default_rng(seed)
    return np.stack(
        [draw.permutation(np.arange(user % 2, ITEMS, 2))[:EACH] for user in range(USERS)]
    )


def leave_one_out(folder: Path) -> Path:
    """The files of He et al.: the last item of each user is held out."""
    folder.mkdir(parents=True, exist_ok=True)
    items = tastes()
    draw = np.random.default_rng(1)
    train = [f"{user}\t{item}" for user in range(USERS) for item in items[user, :-1]]
    test = [f"{user}\t{items[user, -1]}\t5\t100" for user in range(USERS)]
    negative = []
    for user in range(USERS):
        free = draw.permutation(np.setdiff1d(np.arange(ITEMS), items[user]))[:NEGATIVES]
        negative.append("\t".join([f"({user},{items[user, -1]})", *map(str, free)]))
    for name, lines in (("train.pairs", train), ("test.rating", test), ("test.negative", negative)):
        (folder / f"toy.{name}.gz").write_bytes(gzip.compress(("\n".join(lines) + "\n").encode()))
    ids = "".join(f"{item}\t{1000 + 3 * item}\n" for item in range(ITEMS))
    (folder / "toy.item_ids.tsv").write_text(ids)
    return folder


def ratings_csv(folder: Path) -> Path:
    """ratings.csv and movies.csv with sparse ids: 5 stars for the own taste, 2 for one item of the
    other.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["userId,movieId,rating,timestamp"]
    time = 0
    for user, tastes_of_user in enumerate(tastes()):
        for item in [*tastes_of_user, (user + 1) % 2]:
            time += 1
            lines.append(
                f"{10 * user + 7},{1000 + 3 * item},{5.0 if item % 2 == user % 2 else 2.0},{time}"
            )
    (folder / "ratings.csv").write_bytes(("\r\n".join(lines) + "\r\n").encode())
    titles = "".join(f'{1000 + 3 * item},"Film, The {item}",Drama\r\n' for item in range(ITEMS))
    (folder / "movies.csv").write_bytes(b"movieId,title,genres\r\n" + titles.encode())
    return folder
