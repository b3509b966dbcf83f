"""The leave-one-out split of MovieLens 1M: each user's latest film is to be found again among 99 others.

The protocol of He et al., "Neural Collaborative Filtering", WWW 2017, section 4.1, in the files and with the
indices that its authors publish: users by UserID, items in the order of their first appearance. The negatives are
drawn here, keyed by user, and so are not the published ones; nor need the latest of two films of one time be.
"""

from __future__ import annotations

import gzip
import io
from pathlib import Path

import numpy as np

from stepladder.core import durable
from stepladder.core.errors import InputError, naming
from stepladder.core.order import key, permutation
from stepladder.data.disk import MAKE_ROOM, Feedback
from stepladder.data.movielens.leave_one_out import latest_rows

RATINGS = "ratings.dat"
NAMES = ("ml-1m.train.pairs.gz", "ml-1m.test.rating.gz", "ml-1m.test.negative.gz", "ml-1m.item_ids.tsv")
NEGATIVES = 99
HINT = "stepladder data get movielens-1m"


def build(folder: Path, feedback: Feedback = Feedback()) -> list[Path]:  # noqa: B008 - frozen
    """Write the four files beside `folder`/ml-1m/ratings.dat, unless they are all there. Their paths.

    Tab-separated text: train (user, item), test (user, item, rating, time), per user the 99 negatives behind
    `(user,item)`, and item ids (index, MovieLens id). InputError names a broken line, or ids with gaps.
    """
    paths = [folder / name for name in NAMES]
    if all(path.is_file() for path in paths):
        feedback.say("leave-one-out pairs: here already")
        return paths
    table = read_ratings(folder / "ml-1m" / RATINGS)
    for path, text in zip(paths, texts(table), strict=True):
        data = text.encode()
        with durable.writing(path, MAKE_ROOM):
            durable.write(path, gzip.compress(data, 6, mtime=0) if path.suffix == ".gz" else data)
    feedback.say(f"leave-one-out pairs: {', '.join(NAMES)}; the {NEGATIVES} negatives per user are our own draw")
    return paths


def read_ratings(path: Path) -> np.ndarray:
    """UserID, MovieID, rating and time, shape (rows, 4), int64, as in the file."""
    with naming(f"cannot read {path}", HINT):
        lines = path.read_bytes().splitlines()
    rows = [line.split(b"::") for line in lines]
    bad = (n for n, row in enumerate(rows, 1) if len(row) != 4 or not all(map(bytes.isdigit, row)))
    if number := next(bad, 0 if rows else 1):
        raise InputError(f"{path}, line {number}: not UserID::MovieID::Rating::Timestamp", HINT)
    return np.array(rows).astype(np.int64)


def texts(table: np.ndarray) -> list[str]:
    """The content of the four files, for a table as `read_ratings` gives it."""
    ids, first = np.unique(table[:, 1], return_index=True)
    ids = ids[np.argsort(first)]
    index = np.zeros(ids.max() + 1, np.int64)
    index[ids] = np.arange(len(ids))
    users, items = table[:, 0] - 1, index[table[:, 1]]
    refuse_gaps(users)
    held_out = latest_rows(users, table[:, 3])
    train = np.delete(np.arange(len(table)), held_out)
    train = train[np.argsort(users[train], kind="stable")]
    test = np.column_stack([users[held_out], items[held_out], table[held_out, 2:]])
    by_user = np.split(items[np.argsort(users, kind="stable")], np.cumsum(np.bincount(users))[:-1])
    negatives = [
        f"({user},{item})\t" + "\t".join(map(str, draw(user, len(ids), seen)))
        for (user, item), seen in zip(test[:, :2].tolist(), by_user, strict=True)
    ]
    return [
        lines(np.column_stack([users[train], items[train]])),
        lines(test),
        "\n".join(negatives) + "\n",
        lines(np.column_stack([np.arange(len(ids)), ids])),
    ]


def refuse_gaps(users: np.ndarray) -> None:
    counts = np.bincount(users, minlength=1) if users.min() >= 0 else np.zeros(1, np.int64)
    if (counts < 2).any():
        user = int(np.argmax(counts < 2)) + 1
        raise InputError(
            f"UserID {user} has {counts[user - 1]} ratings, at least 2 are needed (IDs: 1, 2, ... without gaps)",
            HINT,
        )


def draw(user: int, num_items: int, seen: np.ndarray) -> list[int]:
    """Up to 99 different items that the user has not seen; a function of the user alone."""
    unseen = np.setdiff1d(np.arange(num_items), seen)
    drawn: list[int] = unseen[permutation(len(unseen), key("leave-one-out", user))[:NEGATIVES]].tolist()
    return drawn


def lines(table: np.ndarray) -> str:
    text = io.StringIO()
    np.savetxt(text, table, fmt="%d", delimiter="\t")
    return text.getvalue()
