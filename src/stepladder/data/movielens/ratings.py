"""MovieLens: ratings.csv, or the zip that has it, and the titles of films."""

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
from stepladder.data.fetch.archive import ARCHIVE_ERRORS
from stepladder.data.local_files import validate_readable

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
MOVIELENS_FOLDER = "ml-latest-small"
RATINGS_FILE = "ratings.csv"
TITLES_FILE = "movies.csv"
MAX_TEXT_BYTES = 2 << 30  # the largest file of MovieLens has half of it
TEXT_ERRORS = (*ARCHIVE_ERRORS, UnicodeDecodeError)
GET_RATINGS_HINT = "stepladder data get movielens-small"
TITLES_HINT = "--titles PATH/TO/movies.csv"
BIAS_DAMPING = 5.0  # ratings of the mean that each user and each item gets besides its own
BIAS_ROUNDS = 10


@dataclass(frozen=True)
class Ratings:
    """n ratings in the order of the file.

    Args:
        users: The index of each rating's user, shape (n,).
        items: The index of each rating's item, shape (n,).
        ratings: The stars, shape (n,).
        times: The times, shape (n,); the index where the file has no times.
        user_ids: The file's id of each user, shape (users,).
        item_ids: The file's id of each item, shape (items,).
    """

    users: Ints
    items: Ints
    ratings: NDArray[np.float32]
    times: Ints
    user_ids: Ints
    item_ids: Ints


def find_file(folder: Path, name: str = RATINGS_FILE) -> Path | None:
    """Return a file of MovieLens in a folder, or in the subfolder or the zip of `data get`."""
    candidates = (
        folder / name,
        folder / MOVIELENS_FOLDER / name,
        folder / f"{MOVIELENS_FOLDER}.zip",
    )
    return next((path for path in candidates if path.is_file()), None)


def read_text(path: Path, name: str = RATINGS_FILE) -> str:
    """Return a text file, or the member of that name of a zip."""
    validate_readable(path, MAX_TEXT_BYTES)
    if not zipfile.is_zipfile(path):
        return path.read_bytes().decode()
    with zipfile.ZipFile(path) as archive:
        member = next((m for m in archive.namelist() if Path(m).name == name), None)
        if member is None:
            raise InputError(f"{path} holds no {name}", GET_RATINGS_HINT)
        size = archive.getinfo(member).file_size
        if size > MAX_TEXT_BYTES:
            problem = f"{name} in {path} has {size:,} bytes, more than {MAX_TEXT_BYTES:,}"
            raise InputError(problem, GET_RATINGS_HINT)
        return archive.read(member).decode()


def read_ratings(data_dir: Path) -> Ratings:
    """Read the ratings of a folder, a file or a zip.

    Returns:
        The ratings, whose users and items are numbered from 0 in the order of their ids.

    Raises:
        InputError: There are no ratings, a column is missing, or a line is broken.
    """
    path = data_dir if data_dir.is_file() else find_file(data_dir)
    if path is None:
        raise InputError(
            f"{data_dir} holds no ratings.csv", f"{GET_RATINGS_HINT} --data-dir {data_dir}"
        )
    with as_input_error(f"cannot read the ratings in {path}", GET_RATINGS_HINT, TEXT_ERRORS):
        text = read_text(path)
    header = text.partition("\n")[0].strip().split(",")
    names = ["userId", "movieId", "rating"]
    missing = [name for name in names if name not in header]
    if missing:
        raise InputError(
            f"{path} has the columns {', '.join(header)}, and not {', '.join(missing)}",
            f"a header line with {','.join([*names, 'timestamp'])}",
        )
    has_times = "timestamp" in header
    if has_times:
        names.append("timestamp")
    columns = [header.index(name) for name in names]
    table = parse_table(text, path, columns, len(header), skip=1, delimiter=",")
    if not len(table):
        raise InputError(f"{path} holds no rating", GET_RATINGS_HINT)
    user_ids, users = np.unique(table[:, 0].astype(np.int64), return_inverse=True)
    item_ids, items = np.unique(table[:, 1].astype(np.int64), return_inverse=True)
    times = table[:, 3].astype(np.int64) if has_times else np.arange(len(table))
    return Ratings(users, items, table[:, 2].astype(np.float32), times, user_ids, item_ids)


def parse_table(
    text: str,
    path: Path,
    columns: list[int],
    width: int,
    skip: int = 0,
    delimiter: str | None = None,
) -> Floats:
    """Parse columns of a table of finite numbers.

    Args:
        text: The table, one row a line.
        path: Its file, for messages.
        columns: The indices of the columns to return.
        width: The number of columns of each line.
        skip: The number of lines before the table.
        delimiter: What separates the columns; None for white space.

    Returns:
        Shape (rows, columns).

    Raises:
        InputError: A line is broken; it names the first one.
    """
    lines = text.splitlines()
    if not any(line.strip() for line in lines[skip:]):
        return np.empty((0, len(columns)))
    try:
        table = np.loadtxt(
            io.StringIO(text), delimiter=delimiter, skiprows=skip, ndmin=2, comments=None
        )
    except ValueError:
        table = None
    if table is not None and table.shape[1] == width and _is_finite(table[:, columns]):
        return table[:, columns]
    # NumPy does not name the bad line. There may be none: it also fails on words in the columns
    # that are not returned.
    return parse_lines(lines, path, columns, width, skip, delimiter)


def parse_lines(
    lines: list[str], path: Path, columns: list[int], width: int, skip: int, delimiter: str | None
) -> Floats:
    """Parse a table line by line, which is slow. Raises InputError for the first bad line."""
    rows = []
    for number, line in enumerate(lines, 1):
        if number > skip and line.strip():
            try:
                rows.append(_parse_line(line, columns, width, delimiter))
            except ValueError as error:
                raise InputError(
                    f"{path}, line {number} is broken: {error}",
                    "correct the line, or fetch it again",
                ) from None
    return np.array(rows)


def _parse_line(line: str, columns: list[int], width: int, delimiter: str | None) -> list[float]:
    fields = line.split(delimiter)
    if len(fields) != width:
        raise ValueError(f"{len(fields)} columns instead of {width}")
    values = [float(fields[column]) for column in columns]
    if not _is_finite(np.array(values)):
        raise ValueError("a value that is not finite, or beyond 2**53")
    return values


def _is_finite(values: np.ndarray) -> bool:
    """Return whether all values are finite, and exact as integers if they are integers."""
    return bool((np.abs(values) <= MAX_INTEGER).all())


def compute_biases(
    num_users: int, num_items: int, users: Ints, items: Ints, stars: NDArray[np.float32]
) -> tuple[float, Floats, Floats]:
    """Return the mean of the ratings, and how far each user's and each item's ratings are from it.

    The biases of users and items are computed in turn, each from the other. Each is a mean that is
    damped towards zero, by BIAS_DAMPING additional ratings.

    Args:
        num_users: The number of users.
        num_items: The number of items.
        users: The user of each rating, shape (n,).
        items: The item of each rating, shape (n,).
        stars: The ratings, shape (n,).
    """
    mean = float(stars.mean())
    user_bias = np.zeros(num_users)
    item_bias = np.zeros(num_items)
    user_counts = np.bincount(users, minlength=num_users) + BIAS_DAMPING
    item_counts = np.bincount(items, minlength=num_items) + BIAS_DAMPING
    for _ in range(BIAS_ROUNDS):
        item_sums = np.bincount(items, stars - mean - user_bias[users], num_items)
        item_bias = item_sums / item_counts
        user_sums = np.bincount(users, stars - mean - item_bias[items], num_users)
        user_bias = user_sums / user_counts
    return mean, user_bias, item_bias


def read_titles(path: Path) -> dict[int, str]:
    """Return the titles of films by movieId.

    Args:
        path: A movies.csv, or a zip or folder that has one. Of a folder without one, {} is
            returned.

    Raises:
        InputError: The file has no titles.
    """
    file = find_file(path, TITLES_FILE) if path.is_dir() else path
    if file is None:
        return {}
    try:
        text = read_text(file, TITLES_FILE)
        rows = csv.DictReader(io.StringIO(text, newline=""))
        return {int(row["movieId"]): row["title"] for row in rows}
    except InputError as error:
        raise InputError(error.problem, TITLES_HINT) from error
    except (*ARCHIVE_ERRORS, KeyError, ValueError, TypeError, csv.Error) as error:
        problem = f"cannot read titles from {file}: {type(error).__name__}: {error}"
        raise InputError(problem, TITLES_HINT) from error
