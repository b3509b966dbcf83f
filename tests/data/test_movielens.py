"""Ratings and leave-one-out files: what is read, what is drawn, and each way in which files may be
bad.
"""

from __future__ import annotations

import gzip
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ratings_files import EACH, ITEMS, NEGATIVES, USERS, leave_one_out, ratings_csv, tastes
from stepladder.core.errors import InputError
from stepladder.data.movielens.leave_one_out import (
    draw_unrated_items,
    hold_out_latest,
    read_leave_one_out,
    split_validation,
)
from stepladder.data.movielens.ratings import read_ratings, read_titles


def draw(seed: int = 3) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_ratings_come_from_a_folder_a_file_or_a_zip(tmp_path: Path) -> None:
    folder = ratings_csv(tmp_path / "small")
    with zipfile.ZipFile(tmp_path / "ml-latest-small.zip", "w") as archive:
        for name in ("ratings.csv", "movies.csv"):
            archive.write(folder / name, f"ml-latest-small/{name}")
    (tmp_path / "zipped").mkdir()
    (tmp_path / "ml-latest-small.zip").rename(tmp_path / "zipped" / "ml-latest-small.zip")
    for path in (folder, folder / "ratings.csv", tmp_path / "zipped"):
        ratings = read_ratings(path)
        assert (len(ratings.users), len(ratings.user_ids), len(ratings.item_ids)) == (
            540,
            USERS,
            ITEMS,
        )
        assert ratings.user_ids[ratings.users[0]] == 7
        assert ratings.item_ids[ratings.items[0]] == 1000 + 3 * tastes()[0, 0]
    for path in (folder, tmp_path / "zipped", folder / "movies.csv"):
        assert read_titles(path)[1000] == "Film, The 0"
    assert read_titles(tmp_path) == {}


def test_the_latest_rating_is_held_out_and_ties_go_to_the_last_line(tmp_path: Path) -> None:
    (tmp_path / "ratings.csv").write_text(
        "userId,movieId,rating,timestamp\n"
        "1,10,4,50\n1,20,3,90\n1,30,3,20\n"
        "2,10,1,7\n2,40,1,7\n"
        "3,50,1,7\n3,60,1,8\n"
    )
    data = hold_out_latest(read_ratings(tmp_path), 2, draw())
    assert data.item_ids[data.held_out].tolist() == [20, 40, 60]
    assert data.rated_matrix().sum() == len(data.users) == 4
    for user, negatives in enumerate(data.negatives):
        rated = {*data.items[data.users == user], data.held_out[user]}
        assert not rated & {*negatives} and len({*negatives}) == 2


def test_leave_one_out_files_are_read(tmp_path: Path) -> None:
    data = read_leave_one_out(leave_one_out(tmp_path))
    assert data.rated_matrix().shape == (USERS, ITEMS) and data.rated_matrix().sum() == USERS * (
        EACH - 1
    )
    assert (data.held_out == tastes()[:, -1]).all()
    assert data.negatives.shape == (USERS, NEGATIVES)
    assert data.item_ids[2] == 1006


def test_the_validation_split_uses_training_pairs_only_and_not_their_order(tmp_path: Path) -> None:
    data = read_leave_one_out(leave_one_out(tmp_path))
    split = split_validation(data, draw())
    assert len(split.users) == len(data.users) - USERS
    before = data.rated_matrix()
    after = split.rated_matrix()
    assert (before[np.arange(USERS), split.held_out] == 1).all()
    assert (after[np.arange(USERS), split.held_out] == 0).all()
    assert (np.take_along_axis(before, split.negatives, 1) == 0).all()
    positions = [
        int(np.flatnonzero(tastes()[user] == split.held_out[user])[0]) for user in range(USERS)
    ]
    assert len(set(positions)) == EACH - 1, "every path of the file is held out for someone"
    repeated = split_validation(data, draw())
    assert (repeated.held_out == split.held_out).all() and (
        repeated.negatives == split.negatives
    ).all()


def test_a_user_without_enough_unrated_items_is_named() -> None:
    rated = np.zeros((3, 5), dtype=bool)
    rated[1, :4] = True
    with pytest.raises(InputError, match="user number 1 has rated 4 of 5 items: 2 unrated"):
        draw_unrated_items(rated, 2, draw())


# -- bad files -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, message",
    [
        (
            "user,movie,stars\n1,2,3\n",
            "has the columns user, movie, stars, and not userId, movieId, rating",
        ),
        (
            "userId,movieId,rating,timestamp\n1,2,3,4\n1,x,3,4\n",
            "line 3 is broken: could not convert",
        ),
        (
            "userId,movieId,rating,timestamp\n1,2,3,4\n1,2,3,4\n1,2\n",
            "line 4 is broken: 2 columns instead of 4",
        ),
        (
            "userId,movieId,rating,timestamp\n1,2,3,1e30\n",
            "is broken: a value that is not finite, or beyond",
        ),
        (
            "userId,movieId,rating,timestamp\n1,2,nan,4\n",
            "line 2 is broken: a value that is not finite",
        ),
        ("userId,movieId,rating,timestamp\n", "holds no rating"),
        ("", "has the columns"),
    ],
)
def test_bad_ratings_are_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "ratings.csv").write_text(text)
    with pytest.raises(InputError) as refused:
        read_ratings(tmp_path)
    assert (
        message in str(refused.value)
        and "ratings.csv" in str(refused.value)
        and "HINT" in str(refused.value)
    )


def test_a_folder_without_ratings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds no ratings\.csv"):
        read_ratings(tmp_path)


def test_a_single_rating_cannot_be_left_out(tmp_path: Path) -> None:
    (tmp_path / "ratings.csv").write_text(
        "userId,movieId,rating,timestamp\n1,2,3,4\n1,3,3,5\n9,2,3,4\n"
    )
    with pytest.raises(InputError, match="user 9 has a single rating"):
        hold_out_latest(read_ratings(tmp_path), 1, draw())


Change = Callable[[str], str]


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("train.pairs", lambda text: text + "3\tx\n", "line 421 is broken"),
        (
            "train.pairs",
            lambda text: text.replace("0\t", "0\t1\t", 1),
            "is broken: 2 columns instead of 3",
        ),
        ("train.pairs", lambda text: text + "-3\t1\n", "line 421 is broken: ids are whole numbers"),
        ("train.pairs", lambda text: text + "60\t1\n", "user 60, but there are 60 users"),
        ("train.pairs", lambda text: text + "1\t40\n", "item 40, but there are 40 items"),
        (
            "train.pairs",
            lambda text: "\n".join(line for line in text.split("\n") if line[:3] != "17\t"),
            "1 of 60 users have no row, the first is user 17",
        ),
        ("test.rating", lambda text: text.split("\n", 1)[1], "line 1: user 1"),
        (
            "test.negative",
            lambda text: text.replace("(5,", "(6,"),
            "is not of the same users and items",
        ),
        (
            "item_ids.tsv",
            lambda text: text + "40\t9\n41\t9\n",
            "2 of 42 items have no row, the first is item 40",
        ),
    ],
)
def test_bad_leave_one_out_files_are_refused(
    name: str, change: Change, message: str, tmp_path: Path
) -> None:
    leave_one_out(tmp_path)
    path = next(tmp_path.glob(f"toy.{name}*"))
    packed = path.suffix == ".gz"
    text = change((gzip.decompress(path.read_bytes()) if packed else path.read_bytes()).decode())
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    with pytest.raises(InputError) as refused:
        read_leave_one_out(tmp_path)
    assert message in str(refused.value) and path.name.split(".")[0] in str(refused.value)


@pytest.mark.parametrize("name", ["train.pairs", "test.rating"])
def test_a_missing_file_is_named(name: str, tmp_path: Path) -> None:
    leave_one_out(tmp_path)
    (tmp_path / f"toy.{name}.gz").unlink()
    with pytest.raises(InputError, match=f"toy.{name}.gz is missing"):
        read_leave_one_out(tmp_path)


def test_a_damaged_archive_is_named(tmp_path: Path) -> None:
    leave_one_out(tmp_path)
    path = tmp_path / "toy.train.pairs.gz"
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(InputError, match=r"cannot read .*toy\.train\.pairs\.gz"):
        read_leave_one_out(tmp_path)
