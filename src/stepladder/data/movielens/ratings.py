"""MovieLens in memory: ratings.csv, or the zip that holds it (userId, movieId, rating, timestamp); titles."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stepladder.core.errors import InputError
from stepladder.data.formats.archive import ARCHIVE_ERRORS
from stepladder.data.movielens.count import HINT, locate, open_member, open_ratings

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Ratings:
    """n ratings in the order of the file. users, items: indices; user_ids, item_ids: the file's ids by index."""

    users: Ints
    items: Ints
    ratings: NDArray[np.float32]
    times: Ints
    user_ids: Ints
    item_ids: Ints


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
