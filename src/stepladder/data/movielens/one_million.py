"""MovieLens 1M as leave-one-out files: each user's latest film is ranked among 99 others.

The files and the indices are those that He et al. publish: users by UserID, items in the order of
their first appearance. The negatives are drawn here, by a key of each user, so they are not the
published ones. Of two films of the same time, the latest may be another one than theirs.
"""

from __future__ import annotations

import gzip
import io
from pathlib import Path

import numpy as np

from stepladder.core import durable
from stepladder.core.errors import InputError, as_input_error
from stepladder.core.order import derive_seed, make_permutation
from stepladder.data.local_files import FULL_DISK_HINT, Feedback
from stepladder.data.movielens.leave_one_out import find_latest_rows
from stepladder.data.movielens.ratings import Ints

NAMES_1M = (
    "ml-1m.train.pairs.gz",
    "ml-1m.test.rating.gz",
    "ml-1m.test.negative.gz",
    "ml-1m.item_ids.tsv",
)
NEGATIVES_1M = 99
GET_1M_HINT = "stepladder data get movielens-1m"


def write_1m_files(folder: Path, feedback: Feedback = Feedback()) -> list[Path]:  # noqa: B008 - frozen
    """Write the leave-one-out files of `folder`/ml-1m/ratings.dat, unless all of them exist.

    Args:
        folder: The folder for the files.
        feedback: Shows what is done.

    Returns:
        The paths of the training pairs, the held-out items with rating and time, the negatives, and
        the ids of the items.

    Raises:
        InputError: A line of the ratings is broken, or ids have gaps.
    """
    paths = [folder / name for name in NAMES_1M]
    if all(path.is_file() for path in paths):
        feedback.on_message("leave-one-out pairs: here already")
        return paths
    ratings = _read_1m_ratings(folder / "ml-1m" / "ratings.dat")
    for path, text in zip(paths, _format_files(ratings), strict=True):
        data = text.encode()
        if path.suffix == ".gz":
            data = gzip.compress(data, 6, mtime=0)
        with durable.name_write_errors(path, FULL_DISK_HINT):
            durable.write(path, data)
    feedback.on_message(
        f"leave-one-out pairs: {', '.join(NAMES_1M)}; the {NEGATIVES_1M} negatives per user are our"
        " own draw"
    )
    return paths


def _read_1m_ratings(path: Path) -> Ints:
    """Return UserID, MovieID, rating and time in the order of the file, shape (rows, 4)."""
    with as_input_error(f"cannot read {path}", GET_1M_HINT):
        lines = path.read_bytes().splitlines()
    rows = [line.split(b"::") for line in lines]
    broken = [number for number, row in enumerate(rows, 1) if not _is_rating(row)]
    if broken or not rows:
        line = broken[0] if broken else 1
        raise InputError(
            f"{path}, line {line}: not UserID::MovieID::Rating::Timestamp", GET_1M_HINT
        )
    return np.array(rows).astype(np.int64)


def _is_rating(fields: list[bytes]) -> bool:
    return len(fields) == 4 and all(field.isdigit() for field in fields)


def _format_files(ratings: Ints) -> list[str]:
    """Return the contents of the four files.

    Args:
        ratings: As `_read_1m_ratings` returns them.
    """
    item_ids, items = _index_items(ratings[:, 1])
    users = ratings[:, 0] - 1
    _validate_users(users)
    held_out = find_latest_rows(users, ratings[:, 3])
    train = np.delete(np.arange(len(ratings)), held_out)
    train = train[np.argsort(users[train], kind="stable")]
    test = np.column_stack([users[held_out], items[held_out], ratings[held_out, 2:]])
    return [
        _format_table(np.column_stack([users[train], items[train]])),
        _format_table(test),
        _format_negatives(users, items, test, len(item_ids)),
        _format_table(np.column_stack([np.arange(len(item_ids)), item_ids])),
    ]


def _index_items(movie_ids: Ints) -> tuple[Ints, Ints]:
    """Return the ids of the items in the order of their first appearance, and each row's index."""
    item_ids, first_rows = np.unique(movie_ids, return_index=True)
    item_ids = item_ids[np.argsort(first_rows)]
    index = np.zeros(item_ids.max() + 1, np.int64)
    index[item_ids] = np.arange(len(item_ids))
    return item_ids, index[movie_ids]


def _validate_users(users: Ints) -> None:
    """Raise InputError unless users are numbered without gaps and each has two ratings."""
    counts = np.zeros(1, np.int64)
    if users.min() >= 0:
        counts = np.bincount(users, minlength=1)
    has_too_few = counts < 2
    if has_too_few.any():
        user = int(np.argmax(has_too_few))
        raise InputError(
            f"UserID {user + 1} has {counts[user]} ratings, at least 2 are needed (IDs: 1, 2, ..."
            " without gaps)",
            GET_1M_HINT,
        )


def _format_negatives(users: Ints, items: Ints, test: Ints, num_items: int) -> str:
    """Return a line for each user: (user,item) of the held-out item, and the negatives."""
    counts = np.bincount(users)
    items_by_user = items[np.argsort(users, kind="stable")]
    rated_by_user = np.split(items_by_user, np.cumsum(counts)[:-1])
    lines = []
    held_out = test[:, :2].tolist()
    for (user, item), rated in zip(held_out, rated_by_user, strict=True):
        unrated = np.setdiff1d(np.arange(num_items), rated)
        order = make_permutation(len(unrated), derive_seed("leave-one-out", user))
        negatives = unrated[order[:NEGATIVES_1M]]
        lines.append(f"({user},{item})\t" + "\t".join(map(str, negatives)) + "\n")
    return "".join(lines)


def _format_table(table: np.ndarray) -> str:
    text = io.StringIO()
    np.savetxt(text, table, fmt="%d", delimiter="\t")
    return text.getvalue()
