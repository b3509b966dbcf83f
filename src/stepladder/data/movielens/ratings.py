"""MovieLens: ratings.csv, or the zip that holds it (userId, movieId, rating, timestamp); titles."""

from __future__ import annotations

import csv
import io
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stepladder.core.errors import InputError, as_input_error
from stepladder.core.numbers import MAX_INTEGER
from stepladder.data.disk import refuse_no_file
from stepladder.data.formats.archive import ARCHIVE_ERRORS

Ints = NDArray[np.int64]
FOLDER = "ml-latest-small"
NAME, TITLES = "ratings.csv", "movies.csv"
MOST_TEXT = 2 << 30  # bytes: all of MovieLens has half of it
UNREADABLE = (*ARCHIVE_ERRORS, UnicodeDecodeError)
HINT = "stepladder data get movielens-small"


@dataclass(frozen=True)
class Ratings:
    """n ratings in the order of the file. users, items: indices; user_ids, item_ids: the file's ids
    by index.
    """

    users: Ints
    items: Ints
    ratings: NDArray[np.float32]
    times: Ints
    user_ids: Ints
    item_ids: Ints


def locate(folder: Path, name: str = NAME) -> Path | None:
    """The file of that name in the folder, or where `data get` unpacks it, or the zip that holds
    it.
    """
    candidates = (folder / name, folder / FOLDER / name, folder / f"{FOLDER}.zip")
    return next((path for path in candidates if path.is_file()), None)


def read_text(path: Path, wanted: str = NAME) -> str:
    """A text file, or the member `wanted` of a zip."""
    refuse_no_file(path, MOST_TEXT)
    if not zipfile.is_zipfile(path):
        return path.read_bytes().decode()
    with zipfile.ZipFile(path) as archive:
        member = next((name for name in archive.namelist() if Path(name).name == wanted), None)
        if member is None:
            raise InputError(f"{path} holds no {wanted}", HINT)
        if (size := archive.getinfo(member).file_size) > MOST_TEXT:
            raise InputError(
                f"{wanted} in {path} has {size:,} bytes, more than {MOST_TEXT:,}", HINT
            )
        return archive.read(member).decode()


def read_ratings(data_dir: Path) -> Ratings:
    """The ratings of a folder, CSV or zip. Raises InputError naming the file, and the line that is
    broken.
    """
    path = data_dir if data_dir.is_file() else locate(data_dir)
    if path is None:
        raise InputError(f"{data_dir} holds no ratings.csv", f"{HINT} --data-dir {data_dir}")
    with as_input_error(f"cannot read the ratings in {path}", HINT, UNREADABLE):
        text = read_text(path)
    header = text.partition("\n")[0].strip().split(",")
    names = ["userId", "movieId", "rating"]
    if missing := [name for name in names if name not in header]:
        raise InputError(
            f"{path} has the columns {', '.join(header)}, and not {', '.join(missing)}",
            f"a header line with {','.join([*names, 'timestamp'])}",
        )
    names += ["timestamp"] if "timestamp" in header else []
    table = numbers(
        text, path, [header.index(name) for name in names], len(header), skip=1, delimiter=","
    )
    if not len(table):
        raise InputError(f"{path} holds no rating", HINT)
    user_ids, users = np.unique(table[:, 0].astype(np.int64), return_inverse=True)
    item_ids, items = np.unique(table[:, 1].astype(np.int64), return_inverse=True)
    times = table[:, 3].astype(np.int64) if "timestamp" in header else np.arange(len(table))
    return Ratings(users, items, table[:, 2].astype(np.float32), times, user_ids, item_ids)


def numbers(
    text: str,
    path: Path,
    columns: list[int],
    width: int,
    skip: int = 0,
    delimiter: str | None = None,
) -> NDArray[np.float64]:
    """The columns of a table of finite numbers, shape (rows, columns). InputError names the first
    bad line.
    """
    if not any(line.strip() for line in text.splitlines()[skip:]):
        return np.empty((0, len(columns)))
    try:
        table = np.loadtxt(
            io.StringIO(text), delimiter=delimiter, skiprows=skip, ndmin=2, comments=None
        )
        if table.shape[1] == width and (np.abs(table[:, columns]) <= MAX_INTEGER).all():
            return table[:, columns]
    except ValueError:
        pass  # the lines are looked at one by one, to name the first bad one
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        if number <= skip or not line.strip():
            continue
        parts = line.split(delimiter)
        try:
            if len(parts) != width:
                raise ValueError(f"{len(parts)} columns instead of {width}")
            rows.append([float(parts[column]) for column in columns])
            if not (np.abs(rows[-1]) <= MAX_INTEGER).all():
                raise ValueError("a value that is not finite, or beyond 2**53")
        except ValueError as error:
            hint = "mend the line, or fetch it again"
            raise InputError(f"{path}, line {number} is broken: {error}", hint) from None
    return np.array(rows)  # a word in a column that is not asked for


def damped_means(
    num_users: int, num_items: int, users: Ints, items: Ints, stars: NDArray[np.float32]
) -> tuple[float, NDArray[np.float64], NDArray[np.float64]]:
    """Overall mean, user and item biases: alternating means, drawn to zero by 5 imagined ratings."""
    mean, damping = float(stars.mean()), 5.0
    of_users, of_items = np.zeros(num_users), np.zeros(num_items)
    user_counts, item_counts = (
        np.bincount(users, minlength=num_users),
        np.bincount(items, minlength=num_items),
    )
    for _ in range(10):
        of_items = np.bincount(items, stars - mean - of_users[users], num_items) / (
            item_counts + damping
        )
        of_users = np.bincount(users, stars - mean - of_items[items], num_users) / (
            user_counts + damping
        )
    return mean, of_users, of_items


def read_titles(path: Path) -> dict[int, str]:
    """Titles by movieId, from a movies.csv, or a zip or folder with one. {} where a folder has
    none.
    """
    found = locate(path, TITLES) if path.is_dir() else path
    if found is None:
        return {}
    try:
        rows = csv.DictReader(io.StringIO(read_text(found, TITLES), newline=""))
        return {int(row["movieId"]): row["title"] for row in rows}
    except InputError as error:
        raise InputError(error.problem, "--titles PATH/TO/movies.csv") from error
    except (*ARCHIVE_ERRORS, KeyError, ValueError, TypeError, csv.Error) as error:
        raise InputError(
            f"cannot read titles from {found}: {type(error).__name__}: {error}",
            "--titles PATH/TO/movies.csv",
        ) from error
