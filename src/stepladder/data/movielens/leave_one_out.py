"""Leave-one-out data: each user's held-out item is ranked among other items.

This is the evaluation of He et al. (WWW 2017, section 4.1). The files of a data set NAME are:

    NAME.train.pairs or NAME.train.rating   user, item, ...; indices from 0, separated by tabs
    NAME.test.rating                        user, item, ...; the held-out items of users 0, 1, ...
    NAME.test.negative                      (user,item), then the items it is ranked against
    NAME.item_ids.tsv                       item index, movieId; optional, for titles

Each of them may be compressed, as NAME.train.pairs.gz.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stepladder.core.errors import InputError, as_input_error
from stepladder.data.idx import open_decompressed
from stepladder.data.local_files import find_gzip_or_plain
from stepladder.data.movielens.ratings import (
    MAX_TEXT_BYTES,
    TEXT_ERRORS,
    Ints,
    Ratings,
    parse_table,
)

LEAVE_ONE_OUT_HINT = (
    "--data-dir DIR with ml-1m.train.pairs.gz, ml-1m.test.rating.gz and ml-1m.test.negative.gz"
)
USERS_AT_ONCE = 500  # for which items are drawn; each takes 8 bytes an item
PARENTHESES_TO_SPACES = str.maketrans("(,)", "   ")


@dataclass(frozen=True)
class LeaveOneOut:
    """Training pairs, and for each user a held-out item and the items that it is ranked against.

    Args:
        users: The user of each training pair, shape (n,).
        items: The item of each training pair, shape (n,).
        held_out: The held-out item of each user, shape (users,).
        negatives: The items that it is ranked against, shape (users, candidates). The held-out item
            itself may be among them.
        user_ids: The data set's id of each user, shape (users,).
        item_ids: The data set's id of each item, shape (items,).
    """

    users: Ints
    items: Ints
    held_out: Ints
    negatives: Ints
    user_ids: Ints
    item_ids: Ints

    def rated_matrix(self) -> NDArray[np.uint8]:
        """Return 1 for each training pair, else 0, shape (users, items): 22 MB for MovieLens 1M."""
        rated = np.zeros((len(self.user_ids), len(self.item_ids)), dtype=np.uint8)
        rated[self.users, self.items] = 1
        return rated


def has_leave_one_out_files(folder: Path) -> bool:
    return bool(list(folder.glob("*.test.negative*")))


# -- from ratings ----------------------------------------------------------------------------------


def hold_out_latest(
    ratings: Ratings, num_negatives: int, generator: np.random.Generator
) -> LeaveOneOut:
    """Hold out each user's latest rating, and draw unrated items to rank it against.

    Args:
        ratings: All ratings.
        num_negatives: The number of items to draw for each user.
        generator: Draws the items.

    Returns:
        All other ratings as training pairs, and the held-out and the drawn items of each user.

    Raises:
        InputError: A user has a single rating, which leaves none to train on.
    """
    latest = find_latest_rows(ratings.users, ratings.times)
    counts = np.bincount(ratings.users)
    if counts.min() < 2:
        user = ratings.user_ids[counts.argmin()]
        raise InputError(
            f"user {user} has a single rating, which leaves none to train on", "omit such users"
        )
    train = np.setdiff1d(np.arange(len(ratings.users)), latest)
    is_rated = np.zeros((len(counts), len(ratings.item_ids)), dtype=bool)
    is_rated[ratings.users, ratings.items] = True
    return LeaveOneOut(
        users=ratings.users[train],
        items=ratings.items[train],
        held_out=ratings.items[latest],
        negatives=draw_unrated_items(is_rated, num_negatives, generator),
        user_ids=ratings.user_ids,
        item_ids=ratings.item_ids,
    )


def find_latest_rows(users: Ints, times: Ints) -> Ints:
    """Return the row of each user's latest rating; of equal times, the last row. Shape (users,)."""
    order = np.lexsort((np.arange(len(users)), times, users))
    is_last_of_user = np.diff(users[order], append=-1)
    return order[np.flatnonzero(is_last_of_user)]


def draw_unrated_items(
    is_rated: NDArray[np.bool_], count: int, generator: np.random.Generator
) -> Ints:
    """Draw `count` different unrated items for each user, uniformly.

    Args:
        is_rated: Shape (users, items).
        count: The number of items.
        generator: The source of randomness.

    Returns:
        Sorted items, shape (users, count).

    Raises:
        InputError: A user has fewer unrated items.
    """
    num_items = is_rated.shape[1]
    num_rated = is_rated.sum(1)
    if num_rated.max(initial=0) + count > num_items:
        raise InputError(
            f"user number {num_rated.argmax()} has rated {num_rated.max()} of {num_items} items:"
            f" {count} unrated ones cannot be drawn",
            "a data set with more items",
        )
    drawn = []
    for rows in np.array_split(is_rated, 1 + len(is_rated) // USERS_AT_ONCE):
        keys = generator.random(rows.shape)
        keys[rows] = 2.0  # greater than every random key
        smallest = np.argpartition(keys, count, axis=1)[:, :count]
        drawn.append(np.sort(smallest, axis=1))
    return np.concatenate(drawn)


def split_validation(data: LeaveOneOut, generator: np.random.Generator) -> LeaveOneOut:
    """Split the training pairs again: hold out one random item of each user, and draw negatives.

    The item is random, because the pairs of a user are not in the order of time in the files: they
    are in nearly the same order of films for all users, so the last ones are the same few films.
    The test items are not used. A user with one item keeps it for training too.

    Returns:
        The remaining training pairs, and as many negatives for each user as `data` has.
    """
    counts = np.bincount(data.users, minlength=len(data.user_ids))
    order = np.argsort(data.users, kind="stable")
    first = np.cumsum(counts) - counts
    chosen = order[first + (generator.random(len(counts)) * counts).astype(np.int64)]
    train = np.setdiff1d(np.arange(len(data.users)), chosen[counts > 1])
    is_rated = data.rated_matrix().astype(bool)
    return LeaveOneOut(
        users=data.users[train],
        items=data.items[train],
        held_out=data.items[chosen],
        negatives=draw_unrated_items(is_rated, data.negatives.shape[1], generator),
        user_ids=data.user_ids,
        item_ids=data.item_ids,
    )


# -- from files ------------------------------------------------------------------------------------


def read_leave_one_out(folder: Path) -> LeaveOneOut:
    """Read the leave-one-out files of a folder, whose form the text of this module describes.

    Returns:
        The training pairs, and for each user the held-out item and the items to rank it against.

    Raises:
        InputError: A file is missing, a line is broken, ids have gaps, or a user has no items.
    """
    negative_name = sorted(folder.glob("*.test.negative*"))[0].name
    prefix = negative_name.split(".test.negative")[0]
    train_path = _require_file(folder, f"{prefix}.train.pairs", f"{prefix}.train.rating")
    test_path = _require_file(folder, f"{prefix}.test.rating")
    negative_path = _require_file(folder, f"{prefix}.test.negative")
    train = _read_integers(train_path)[:, :2]
    test = _read_integers(test_path)[:, :2]
    candidates = _read_integers(negative_path, lambda text: text.translate(PARENTHESES_TO_SPACES))
    users = np.arange(len(test))
    wrong = np.flatnonzero(test[:, 0] != users)
    if len(wrong):
        line = wrong[0]
        raise InputError(
            f"{test_path}, line {line + 1}: user {test[line, 0]}", "one line a user, from 0 on"
        )
    if len(candidates) != len(test) or (candidates[:, :2] != test).any():
        raise InputError(
            f"{negative_path} is not of the same users and items as {test_path}", LEAVE_ONE_OUT_HINT
        )
    used_items = np.concatenate([train[:, 1], candidates[:, 1:].reshape(-1)])
    item_ids = _read_item_ids(folder, prefix)
    if item_ids is None:
        item_ids = np.arange(int(used_items.max()) + 1)
    _validate_indices("user", train[:, 0], len(test), train_path)
    _validate_indices("item", used_items, len(item_ids), train_path)
    return LeaveOneOut(
        users=train[:, 0],
        items=train[:, 1],
        held_out=test[:, 1],
        negatives=candidates[:, 2:],
        user_ids=users,
        item_ids=item_ids,
    )


def _read_item_ids(folder: Path, prefix: str) -> Ints | None:
    path = find_gzip_or_plain(folder, f"{prefix}.item_ids.tsv")
    return _read_integers(path)[:, 1] if path else None


def _require_file(folder: Path, *names: str) -> Path:
    path = find_gzip_or_plain(folder, *names)
    if path is None:
        raise InputError(f"{folder / names[0]}.gz is missing", LEAVE_ONE_OUT_HINT)
    return path


def _read_integers(path: Path, clean: Callable[[str], str] = str) -> Ints:
    """Read a table of indices.

    Args:
        path: The file, compressed or not.
        clean: Changes the text before it is parsed.

    Returns:
        Shape (lines, columns).

    Raises:
        InputError: A line is broken.
    """
    with as_input_error(f"cannot read {path}", "fetch it again", TEXT_ERRORS):
        with open_decompressed(path) as stream:
            data = stream.read(MAX_TEXT_BYTES + 1)
        if len(data) > MAX_TEXT_BYTES:
            raise InputError(f"{path} holds more than {MAX_TEXT_BYTES:,} bytes", LEAVE_ONE_OUT_HINT)
        text = clean(data.decode())
    width = len(text.partition("\n")[0].split())
    if width < 2:
        raise InputError(
            f"{path}, line 1 is broken: {width} columns, at least 2 belong here", LEAVE_ONE_OUT_HINT
        )
    table = parse_table(text, path, list(range(width)), width)
    is_wrong = (table != np.floor(table)) | (table < 0)
    wrong = np.flatnonzero(is_wrong.any(1))
    if len(wrong):
        raise InputError(
            f"{path}, line {wrong[0] + 1} is broken: ids are whole numbers from 0",
            LEAVE_ONE_OUT_HINT,
        )
    return table.astype(np.int64)


def _validate_indices(kind: str, used: Ints, count: int, path: Path) -> None:
    """Raise InputError unless the indices are those from 0 to count - 1, each of them used."""
    if used.max() >= count:
        raise InputError(
            f"{path}: {kind} {used.max()}, but there are {count} {kind}s",
            f"number the {kind}s 0 to {count - 1}",
        )
    missing = np.flatnonzero(np.bincount(used, minlength=count) == 0)
    if len(missing):
        raise InputError(
            f"{path}: {len(missing)} of {count} {kind}s have no row, the first is {kind}"
            f" {missing[0]}",
            f"omit them and number the {kind}s without gaps",
        )
