"""Counting what a movielens-small folder or zip holds."""

from __future__ import annotations

import csv
import io
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from stepladder.core.errors import InputError
from stepladder.data.formats.archive import ARCHIVE_ERRORS

FOLDER = "ml-latest-small"
NAME = "ratings.csv"
HINT = "stepladder data get movielens-small"


def is_zip(path: Path) -> bool:
    """Whether path is a zip archive, by its content."""
    try:
        return zipfile.is_zipfile(path)
    except OSError:
        return False


def is_folder(path: Path) -> bool:
    """Whether there is a ratings.csv in the folder, or where `data get` unpacks it."""
    return locate(path) is not None


def locate(folder: Path) -> Path | None:
    candidates = (folder / NAME, folder / FOLDER / NAME, folder / f"{FOLDER}.zip")
    return next((path for path in candidates if path.is_file()), None)


def describe_ratings(path: Path) -> dict[str, Any]:
    """Ratings (rows), users and rated items, and the size in bytes of the file that was read.

    InputError names the file when it is no ratings table or cannot be read.
    """
    file = path if path.is_file() else locate(path)
    if file is None:
        raise InputError(f"{path} holds no {NAME}", HINT)
    try:
        with open_ratings(file) as lines:
            counts = count(lines)
    except (*ARCHIVE_ERRORS, csv.Error, ValueError) as error:
        raise InputError(f"cannot use the ratings in {file}: {error}", HINT) from error
    return {"dataset": "movielens-small", "path": str(path), **counts, "bytes": file.stat().st_size}


def open_ratings(path: Path) -> AbstractContextManager[Iterable[str]]:
    """The lines of ratings.csv, from the file itself or from the zip that holds it."""
    return open_member(path, NAME)


@contextmanager
def open_member(path: Path, wanted: str) -> Iterator[Iterable[str]]:
    """The lines of a text file, or of the member `wanted` of a zip."""
    if not is_zip(path):
        with path.open(encoding="utf-8", newline="") as lines:
            yield lines
        return
    with zipfile.ZipFile(path) as archive:
        member = next((name for name in archive.namelist() if Path(name).name == wanted), None)
        if member is None:
            raise InputError(f"{path} holds no {wanted}", HINT)
        with archive.open(member) as stream:
            yield io.TextIOWrapper(stream, encoding="utf-8", newline="")


def count(lines: Iterable[str]) -> dict[str, int]:
    """Rows and distinct users and items. ValueError when a column or a value is missing."""
    table = csv.reader(lines)
    header = next(table, [])
    if not {"userId", "movieId"} <= set(header):
        raise ValueError("the header names no userId and movieId")
    user, item = header.index("userId"), header.index("movieId")
    users, items, rows = set(), set(), 0
    for rows, row in enumerate(table, 1):
        if len(row) != len(header):
            raise ValueError(f"row {rows} has {len(row)} columns, the header {len(header)}")
        users.add(row[user])
        items.add(row[item])
    return {"rows": rows, "users": len(users), "items": len(items)}
