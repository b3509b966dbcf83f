"""MovieLens in memory: ratings.csv with its titles, and the leave-one-out files of He et al. (2017).

ratings.csv (or the zip that holds it)     userId, movieId, rating, timestamp; ids may be sparse
NAME.train.pairs or NAME.train.rating      user, item, ...; indices from 0, tab-separated, .gz too
NAME.test.rating                           user, item, ...: the held-out item of user 0, 1, ...
NAME.test.negative                         (user,item), then the items it is ranked against
NAME.item_ids.tsv                          item index, movieId (optional; for titles)
"""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stepladder.core.errors import InputError
from stepladder.data.formats.archive import ARCHIVE_ERRORS
from stepladder.data.movielens.count import HINT, locate, open_member, open_ratings

Ints = NDArray[np.int64]
LEAVE_ONE_OUT_HINT = "--data-dir DIR with ml-1m.train.pairs.gz, ml-1m.test.rating.gz and ml-1m.test.negative.gz"


@dataclass(frozen=True)
class Ratings:
    """n ratings in the order of the file. users, items: indices; user_ids, item_ids: the file's ids by index."""

    users: Ints
    items: Ints
    ratings: NDArray[np.float32]
    times: Ints
    user_ids: Ints
    item_ids: Ints


@dataclass(frozen=True)
class LeaveOneOut:
    """Training pairs, and per user one held-out item and the items that it is ranked against.

    users, items (n,): training pairs.  held_out (num_users,).  negatives (num_users, candidates): the held-out
    item itself may be among them.  user_ids, item_ids: the ids that people know, by index.
    """

    users: Ints
    items: Ints
    held_out: Ints
    negatives: Ints
    user_ids: Ints
    item_ids: Ints

    def rated(self) -> NDArray[np.uint8]:
        """1 where a user has a training item, shape (users, items): a byte a cell, 22 MB for MovieLens 1M."""
        rated = np.zeros((len(self.user_ids), len(self.item_ids)), dtype=np.uint8)
        rated[self.users, self.items] = 1
        return rated


def is_leave_one_out(folder: Path) -> bool:
    return bool(list(folder.glob("*.test.negative*")))


# -- ratings.csv ------------------------------------------------------------------------------------------


def read_ratings(data_dir: Path) -> Ratings:
    """The ratings of a folder, CSV or zip. Raises InputError naming the file, and the line that is broken."""
    path = data_dir if data_dir.is_file() else locate(data_dir)
    if path is None:
        raise InputError(f"{data_dir} holds no ratings.csv", f"{HINT} --data-dir {data_dir}")
    try:
        with open_ratings(path) as lines:
            text = "".join(lines)
    except (*ARCHIVE_ERRORS, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the ratings in {path}: {error}", HINT) from error
    header = text.partition("\n")[0].strip().split(",")
    names = ["userId", "movieId", "rating"]
    if missing := [name for name in names if name not in header]:
        raise InputError(
            f"{path} has the columns {', '.join(header)}, and not {', '.join(missing)}",
            f"a header line with {','.join([*names, 'timestamp'])}",
        )
    table = numbers(text, path, [header.index(name) for name in names], len(header), skip=1, delimiter=",")
    has_time = "timestamp" in header
    times = (
        numbers(text, path, [header.index("timestamp")], len(header), 1, ",")[:, 0] if has_time else table[:, 0]
    )
    if not len(table):
        raise InputError(f"{path} holds no rating", HINT)
    user_ids, users = np.unique(table[:, 0].astype(np.int64), return_inverse=True)
    item_ids, items = np.unique(table[:, 1].astype(np.int64), return_inverse=True)
    order = times.astype(np.int64) if has_time else np.arange(len(table))
    return Ratings(users, items, table[:, 2].astype(np.float32), order, user_ids, item_ids)


def numbers(
    text: str, path: Path, columns: list[int], width: int | None, skip: int = 0, delimiter: str | None = "\t"
) -> NDArray[np.float64]:
    """The columns of a table of finite numbers, shape (rows, columns). InputError names the first bad line."""
    if not any(line.strip() for line in text.splitlines()[skip:]):
        return np.empty((0, len(columns)))
    try:
        with io.StringIO(text) as lines:
            table = np.loadtxt(lines, delimiter=delimiter, skiprows=skip, ndmin=2, comments=None)
        if (width in (None, table.shape[1])) and np.isfinite(table[:, columns]).all():
            return table[:, columns]
    except ValueError:
        pass  # the lines are looked at one by one, to name the first bad one
    return refuse_first_bad(text, path, columns, width, skip, delimiter)


def refuse_first_bad(
    text: str, path: Path, columns: list[int], width: int | None, skip: int, delimiter: str | None
) -> NDArray[np.float64]:
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        if number <= skip or not line.strip():
            continue
        parts = line.split(delimiter)
        width = width or len(parts)
        try:
            if len(parts) != width:
                raise ValueError(f"{len(parts)} columns instead of {width}")
            row = [float(parts[column]) for column in columns]
            if not np.isfinite(row).all():
                raise ValueError("a value that is not finite")
        except (ValueError, IndexError) as error:
            raise InputError(
                f"{path}, line {number} is broken: {error}", "mend the line, or fetch it again"
            ) from None
        rows.append(row)
    return np.array(rows, dtype=np.float64).reshape(-1, len(columns))


def latest_left_out(ratings: Ratings, negatives: int, generator: np.random.Generator) -> LeaveOneOut:
    """Each user's latest rating held out (of equal times the last in the file), and unrated items drawn.

    Raises InputError for a user with a single rating: nothing would be left to train on.
    """
    order = np.lexsort((np.arange(len(ratings.users)), ratings.times, ratings.users))
    last = order[np.flatnonzero(np.diff(ratings.users[order], append=-1))]
    counts = np.bincount(ratings.users)
    if counts.min() < 2:
        user = ratings.user_ids[counts.argmin()]
        raise InputError(f"user {user} has a single rating, which leaves none to train on", "leave such users out")
    train = np.setdiff1d(np.arange(len(ratings.users)), last)
    rated = np.zeros((len(counts), len(ratings.item_ids)), dtype=bool)
    rated[ratings.users, ratings.items] = True
    drawn = unrated_items(rated, negatives, generator)
    return LeaveOneOut(
        ratings.users[train], ratings.items[train], ratings.items[last], drawn, ratings.user_ids, ratings.item_ids
    )


def unrated_items(rated: NDArray[np.bool_], count: int, generator: np.random.Generator) -> Ints:
    """`count` different unrated items per user, uniform, (users, count). InputError where there are fewer."""
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


def damped_means(
    num_users: int, num_items: int, users: Ints, items: Ints, stars: NDArray[np.float32]
) -> tuple[float, NDArray[np.float64], NDArray[np.float64]]:
    """Overall mean, user and item biases: alternating means, drawn to zero by 5 imagined ratings."""
    mean, damping = float(stars.mean()), 5.0
    of_users, of_items = np.zeros(num_users), np.zeros(num_items)
    user_counts, item_counts = np.bincount(users, minlength=num_users), np.bincount(items, minlength=num_items)
    for _ in range(10):
        of_items = np.bincount(items, stars - mean - of_users[users], num_items) / (item_counts + damping)
        of_users = np.bincount(users, stars - mean - of_items[items], num_users) / (user_counts + damping)
    return mean, of_users, of_items


# -- leave-one-out files ----------------------------------------------------------------------------------


def read_leave_one_out(folder: Path) -> LeaveOneOut:
    """The files of He et al. Raises InputError for a missing file, a broken line, ids with gaps, empty users."""
    prefix = sorted(folder.glob("*.test.negative*"))[0].name.split(".test.negative")[0]
    train_path = find(folder, f"{prefix}.train.pairs", f"{prefix}.train.rating")
    test_path, negative_path = find(folder, f"{prefix}.test.rating"), find(folder, f"{prefix}.test.negative")
    train = read_integers(train_path)[:, :2]
    test = read_integers(test_path)[:, :2]
    candidates = read_integers(negative_path, lambda text: text.translate(str.maketrans("(,)", "   ")))
    users = np.arange(len(test))
    if wrong := np.flatnonzero(test[:, 0] != users).tolist():
        raise InputError(
            f"{test_path}, line {wrong[0] + 1}: user {test[wrong[0], 0]}", "one line a user, from 0 on"
        )
    if candidates.shape[0] != len(test) or (candidates[:, :2] != test).any():
        raise InputError(f"{negative_path} is not of the same users and items as {test_path}", LEAVE_ONE_OUT_HINT)
    ids = find(folder, f"{prefix}.item_ids.tsv", optional=True)
    item_ids = read_integers(ids)[:, 1] if ids else None
    used = np.concatenate([train[:, 1], candidates[:, 1:].reshape(-1)])
    num_items = len(item_ids) if item_ids is not None else int(used.max()) + 1
    refuse_gaps("user", train[:, 0], len(test), train_path)
    refuse_gaps("item", used, num_items, train_path)
    return LeaveOneOut(
        train[:, 0], train[:, 1], test[:, 1], candidates[:, 2:], users,
        item_ids if item_ids is not None else np.arange(num_items),
    )  # fmt: skip


def find(folder: Path, *names: str, optional: bool = False) -> Path:
    paths = [folder / f"{name}{end}" for name in names for end in (".gz", "")]
    found = next((path for path in paths if path.is_file()), None)
    if found is None and not optional:
        raise InputError(f"{paths[0]} is missing", LEAVE_ONE_OUT_HINT)
    return found  # type: ignore[return-value]


def read_integers(path: Path, clean: Callable[[str], str] = str) -> Ints:
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    except (*ARCHIVE_ERRORS, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}", "fetch it again") from error
    text = clean(text)
    width = len(text.partition("\n")[0].split())
    if width < 2:
        raise InputError(f"{path}, line 1 is broken: {width} columns, at least 2 belong here", LEAVE_ONE_OUT_HINT)
    table = numbers(text, path, list(range(width)), width, delimiter=None)
    if (table != np.floor(table)).any() or table.min() < 0:
        line = int(np.flatnonzero(((table != np.floor(table)) | (table < 0)).any(1))[0]) + 1
        raise InputError(f"{path}, line {line} is broken: ids are whole numbers from 0", LEAVE_ONE_OUT_HINT)
    return table.astype(np.int64)


def refuse_gaps(what: str, used: Ints, count: int, path: Path) -> None:
    """InputError where ids are not those from 0 to count - 1, each of them used."""
    if used.max() >= count:
        raise InputError(
            f"{path}: {what} {used.max()}, but there are {count} {what}s", f"number the {what}s 0 to {count - 1}"
        )
    missing = np.flatnonzero(np.bincount(used, minlength=count) == 0)
    if len(missing):
        raise InputError(
            f"{path}: {len(missing)} of {count} {what}s have no row, the first is {what} {missing[0]}",
            f"leave them out and number the {what}s without gaps",
        )


def validation_split(data: LeaveOneOut, generator: np.random.Generator) -> LeaveOneOut:
    """A further leave-one-out split of the training pairs: one item of each user, at random, and new negatives.

    At random, for the file's order is not one of time: each user's items come in nearly the same order of
    movies, and the last one is the same few movies for all. The test items play no part, neither as negatives
    that are left out nor otherwise. A user with one item keeps it, and is ranked on it.
    """
    counts = np.bincount(data.users, minlength=len(data.user_ids))
    order = np.argsort(data.users, kind="stable")
    first = np.cumsum(counts) - counts
    chosen = order[first + (generator.random(len(counts)) * counts).astype(np.int64)]
    keep = np.setdiff1d(np.arange(len(data.users)), chosen[counts > 1])
    drawn = unrated_items(data.rated().astype(bool), data.negatives.shape[1], generator)
    return LeaveOneOut(data.users[keep], data.items[keep], data.items[chosen], drawn, data.user_ids, data.item_ids)


# -- titles -----------------------------------------------------------------------------------------------


def read_titles(path: Path) -> dict[int, str]:
    """Titles by movieId, from a movies.csv, or a zip or folder with one. {} where a folder has none."""
    if path.is_dir():
        near = (path / "movies.csv", path / "ml-latest-small" / "movies.csv", path / "ml-latest-small.zip")
        found = next((place for place in near if place.is_file()), None)
        if found is None:
            return {}
        path = found
    try:
        with open_member(path, "movies.csv") as lines:
            return {int(row["movieId"]): row["title"] for row in csv.DictReader(lines)}
    except (*ARCHIVE_ERRORS, KeyError, ValueError, TypeError, csv.Error) as error:
        raise InputError(
            f"cannot read titles from {path}: {type(error).__name__}: {error}", "--titles PATH/TO/movies.csv"
        ) from error
