"""Leave-one-out: each user's held-out item is to be found again among others (He et al., WWW 2017,
section 4.1).

NAME.train.pairs or NAME.train.rating      user, item, ...; indices from 0, tab-separated, .gz too
NAME.test.rating                           user, item, ...: the held-out item of user 0, 1, ...
NAME.test.negative                         (user,item), then the items it is ranked against
NAME.item_ids.tsv                          item index, movieId (optional; for titles)
"""

from __future__ import annotations

import gzip
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stepladder.core import durable
from stepladder.core.errors import InputError, as_input_error
from stepladder.core.order import derive_seed, make_permutation
from stepladder.data.disk import MAKE_ROOM, Feedback, gz_or_plain
from stepladder.data.formats.idx import open_plain
from stepladder.data.movielens.ratings import MOST_TEXT, UNREADABLE, Ints, Ratings, numbers

NAMES_1M = (
    "ml-1m.train.pairs.gz",
    "ml-1m.test.rating.gz",
    "ml-1m.test.negative.gz",
    "ml-1m.item_ids.tsv",
)
NEGATIVES_1M = 99
GET_1M = "stepladder data get movielens-1m"
HINT = "--data-dir DIR with ml-1m.train.pairs.gz, ml-1m.test.rating.gz and ml-1m.test.negative.gz"


@dataclass(frozen=True)
class LeaveOneOut:
    """Training pairs, and per user one held-out item and the items that it is ranked against.

    users, items (n,): training pairs.  held_out (num_users,).  negatives (num_users, candidates):
    the held-out item itself may be among them.  user_ids, item_ids: the ids that people know, by
    index."""

    users: Ints
    items: Ints
    held_out: Ints
    negatives: Ints
    user_ids: Ints
    item_ids: Ints

    def rated(self) -> NDArray[np.uint8]:
        """1 where a user has a training item, shape (users, items): a byte a cell, 22 MB for
        MovieLens 1M.
        """
        rated = np.zeros((len(self.user_ids), len(self.item_ids)), dtype=np.uint8)
        rated[self.users, self.items] = 1
        return rated


def is_leave_one_out(folder: Path) -> bool:
    return bool(list(folder.glob("*.test.negative*")))


# -- from ratings ----------------------------------------------------------------------------------


def latest_rows(users: Ints, times: Ints) -> Ints:
    """The row of each user's latest rating, of equal times the last one, in the order of users."""
    order = np.lexsort((np.arange(len(users)), times, users))
    return order[np.flatnonzero(np.diff(users[order], append=-1))]


def latest_left_out(
    ratings: Ratings, negatives: int, generator: np.random.Generator
) -> LeaveOneOut:
    """Each user's latest rating held out (of equal times the last in the file), and unrated items
    drawn.

    Raises InputError for a user with a single rating: nothing would be left to train on.
    """
    last = latest_rows(ratings.users, ratings.times)
    counts = np.bincount(ratings.users)
    if counts.min() < 2:
        user = ratings.user_ids[counts.argmin()]
        raise InputError(
            f"user {user} has a single rating, which leaves none to train on",
            "leave such users out",
        )
    train = np.setdiff1d(np.arange(len(ratings.users)), last)
    rated = np.zeros((len(counts), len(ratings.item_ids)), dtype=bool)
    rated[ratings.users, ratings.items] = True
    drawn = unrated_items(rated, negatives, generator)
    return LeaveOneOut(
        ratings.users[train],
        ratings.items[train],
        ratings.items[last],
        drawn,
        ratings.user_ids,
        ratings.item_ids,
    )


def unrated_items(rated: NDArray[np.bool_], count: int, generator: np.random.Generator) -> Ints:
    """`count` different unrated items per user, uniform, (users, count). InputError where there are
    fewer.
    """
    most = rated.sum(1)
    if most.max(initial=0) + count > rated.shape[1]:
        raise InputError(
            f"user number {most.argmax()} has rated {most.max()} of {rated.shape[1]} items: {count} unrated ones"
            " cannot be drawn",
            "a data set with more items",
        )
    parts = []
    for rows in np.array_split(rated, 1 + len(rated) // 500):  # 8 bytes a cell: in pieces
        keys = generator.random(rows.shape)
        keys[rows] = 2.0
        parts.append(np.sort(np.argpartition(keys, count, axis=1)[:, :count], axis=1))
    return np.concatenate(parts)


# -- from its files --------------------------------------------------------------------------------


def read_leave_one_out(folder: Path) -> LeaveOneOut:
    """The files of He et al. Raises InputError for a missing file, a broken line, ids with gaps,
    empty users.
    """
    prefix = sorted(folder.glob("*.test.negative*"))[0].name.split(".test.negative")[0]
    train_path = find(folder, f"{prefix}.train.pairs", f"{prefix}.train.rating")
    test_path, negative_path = (
        find(folder, f"{prefix}.test.rating"),
        find(folder, f"{prefix}.test.negative"),
    )
    train = read_integers(train_path)[:, :2]
    test = read_integers(test_path)[:, :2]
    candidates = read_integers(
        negative_path, lambda text: text.translate(str.maketrans("(,)", "   "))
    )
    users = np.arange(len(test))
    if wrong := np.flatnonzero(test[:, 0] != users).tolist():
        raise InputError(
            f"{test_path}, line {wrong[0] + 1}: user {test[wrong[0], 0]}",
            "one line a user, from 0 on",
        )
    if candidates.shape[0] != len(test) or (candidates[:, :2] != test).any():
        raise InputError(f"{negative_path} is not of the same users and items as {test_path}", HINT)
    ids = gz_or_plain(folder, f"{prefix}.item_ids.tsv")
    item_ids = read_integers(ids)[:, 1] if ids else None
    used = np.concatenate([train[:, 1], candidates[:, 1:].reshape(-1)])
    num_items = len(item_ids) if item_ids is not None else int(used.max()) + 1
    refuse_gaps("user", train[:, 0], len(test), train_path)
    refuse_gaps("item", used, num_items, train_path)
    return LeaveOneOut(
        train[:, 0],
        train[:, 1],
        test[:, 1],
        candidates[:, 2:],
        users,
        item_ids if item_ids is not None else np.arange(num_items),
    )


def find(folder: Path, *names: str) -> Path:
    found = gz_or_plain(folder, *names)
    if found is None:
        raise InputError(f"{folder / names[0]}.gz is missing", HINT)
    return found


def read_integers(path: Path, clean: Callable[[str], str] = str) -> Ints:
    with (
        as_input_error(f"cannot read {path}", "fetch it again", UNREADABLE),
        open_plain(path) as stream,
    ):
        data = stream.read(MOST_TEXT + 1)
        if len(data) > MOST_TEXT:
            raise InputError(f"{path} holds more than {MOST_TEXT:,} bytes", HINT)
        text = clean(data.decode())
    width = len(text.partition("\n")[0].split())
    if width < 2:
        raise InputError(f"{path}, line 1 is broken: {width} columns, at least 2 belong here", HINT)
    table = numbers(text, path, list(range(width)), width)
    if len(wrong := np.flatnonzero(((table != np.floor(table)) | (table < 0)).any(1))):
        raise InputError(
            f"{path}, line {wrong[0] + 1} is broken: ids are whole numbers from 0", HINT
        )
    return table.astype(np.int64)


def refuse_gaps(what: str, used: Ints, count: int, path: Path) -> None:
    """InputError where ids are not those from 0 to count - 1, each of them used."""
    if used.max() >= count:
        raise InputError(
            f"{path}: {what} {used.max()}, but there are {count} {what}s",
            f"number the {what}s 0 to {count - 1}",
        )
    missing = np.flatnonzero(np.bincount(used, minlength=count) == 0)
    if len(missing):
        raise InputError(
            f"{path}: {len(missing)} of {count} {what}s have no row, the first is {what} {missing[0]}",
            f"leave them out and number the {what}s without gaps",
        )


def validation_split(data: LeaveOneOut, generator: np.random.Generator) -> LeaveOneOut:
    """A further leave-one-out split of the training pairs: one item of each user, at random, and
    new negatives.

    At random, for the file's order is not one of time: each user's items come in nearly the same
    order of movies, and the last one is the same few movies for all. The test items play no part,
    neither as negatives that are left out nor otherwise. A user with one item keeps it, and is
    ranked on it."""
    counts = np.bincount(data.users, minlength=len(data.user_ids))
    order = np.argsort(data.users, kind="stable")
    first = np.cumsum(counts) - counts
    chosen = order[first + (generator.random(len(counts)) * counts).astype(np.int64)]
    keep = np.setdiff1d(np.arange(len(data.users)), chosen[counts > 1])
    drawn = unrated_items(data.rated().astype(bool), data.negatives.shape[1], generator)
    return LeaveOneOut(
        data.users[keep], data.items[keep], data.items[chosen], drawn, data.user_ids, data.item_ids
    )


# -- of MovieLens 1M: each user's latest film is to be found again among 99 others -----------------
#
# In the files and with the indices that He et al. publish: users by UserID, items in the order of their first
# appearance. The negatives are drawn here, keyed by user, and so are not the published ones; nor need the latest
# of two films of one time be.


def build_1m(folder: Path, feedback: Feedback = Feedback()) -> list[Path]:  # noqa: B008 - frozen
    """Write the four files beside `folder`/ml-1m/ratings.dat, unless they are all there. Their
    paths.

    Tab-separated text: train (user, item), test (user, item, rating, time), per user the 99
    negatives behind `(user,item)`, and item ids (index, MovieLens id). InputError names a broken
    line, or ids with gaps."""
    paths = [folder / name for name in NAMES_1M]
    if all(path.is_file() for path in paths):
        feedback.say("leave-one-out pairs: here already")
        return paths
    table = read_1m(folder / "ml-1m" / "ratings.dat")
    for path, text in zip(paths, texts(table), strict=True):
        data = text.encode()
        with durable.name_write_errors(path, MAKE_ROOM):
            durable.write(path, gzip.compress(data, 6, mtime=0) if path.suffix == ".gz" else data)
    feedback.say(
        f"leave-one-out pairs: {', '.join(NAMES_1M)}; the {NEGATIVES_1M} negatives per user are our own draw"
    )
    return paths


def read_1m(path: Path) -> np.ndarray:
    """UserID, MovieID, rating and time, shape (rows, 4), int64, as in the file."""
    with as_input_error(f"cannot read {path}", GET_1M):
        lines = path.read_bytes().splitlines()
    rows = [line.split(b"::") for line in lines]
    bad = (n for n, row in enumerate(rows, 1) if len(row) != 4 or not all(map(bytes.isdigit, row)))
    if number := next(bad, 0 if rows else 1):
        raise InputError(f"{path}, line {number}: not UserID::MovieID::Rating::Timestamp", GET_1M)
    return np.array(rows).astype(np.int64)


def texts(table: np.ndarray) -> list[str]:
    """The content of the four files, for a table as `read_1m` gives it."""
    ids, first = np.unique(table[:, 1], return_index=True)
    ids = ids[np.argsort(first)]
    index = np.zeros(ids.max() + 1, np.int64)
    index[ids] = np.arange(len(ids))
    users, items = table[:, 0] - 1, index[table[:, 1]]
    counts = np.bincount(users, minlength=1) if users.min() >= 0 else np.zeros(1, np.int64)
    if (counts < 2).any():
        user = int(np.argmax(counts < 2)) + 1
        raise InputError(
            f"UserID {user} has {counts[user - 1]} ratings, at least 2 are needed (IDs: 1, 2, ... without gaps)",
            GET_1M,
        )
    held_out = latest_rows(users, table[:, 3])
    train = np.delete(np.arange(len(table)), held_out)
    train = train[np.argsort(users[train], kind="stable")]
    test = np.column_stack([users[held_out], items[held_out], table[held_out, 2:]])
    by_user = np.split(items[np.argsort(users, kind="stable")], np.cumsum(counts)[:-1])
    negatives = []
    for (user, item), seen in zip(test[:, :2].tolist(), by_user, strict=True):
        unseen = np.setdiff1d(np.arange(len(ids)), seen)
        drawn = unseen[
            make_permutation(len(unseen), derive_seed("leave-one-out", user))[:NEGATIVES_1M]
        ]  # by the user alone
        negatives.append(f"({user},{item})\t" + "\t".join(map(str, drawn)))
    return [
        lines(np.column_stack([users[train], items[train]])),
        lines(test),
        "\n".join(negatives) + "\n",
        lines(np.column_stack([np.arange(len(ids)), ids])),
    ]


def lines(table: np.ndarray) -> str:
    text = io.StringIO()
    np.savetxt(text, table, fmt="%d", delimiter="\t")
    return text.getvalue()
