"""The leave-one-out split: who is held out, which indices, 99 that the user has not seen."""

from __future__ import annotations

import gzip
import hashlib
import zipfile
from pathlib import Path

import numpy as np
import pytest

from stepladder import InputError
from stepladder.data.fetch import download
from stepladder.data.fetch.catalog import MOVIELENS_1M, DataSet, RemoteFile
from stepladder.data.local_files import Feedback
from stepladder.data.movielens import one_million

RATINGS = [
    "1::50::5::30",
    "1::7::3::90",
    "2::7::4::10",
    "1::9::1::90",
    "2::300::2::5",
    "3::9::5::1",
    "3::50::1::0",
]


def ratings(folder: Path, lines: list[str]) -> Path:
    (folder / "ml-1m").mkdir()
    (folder / "ml-1m" / "ratings.dat").write_text("\n".join(lines) + "\n")
    return folder


def test_the_latest_is_held_out_and_indices_follow_the_file(tmp_path: Path) -> None:
    paths = one_million.write_1m_files(ratings(tmp_path, RATINGS))
    train, test, negatives, ids = (
        (gzip.decompress(p.read_bytes()) if p.suffix == ".gz" else p.read_bytes()).decode()
        for p in paths
    )
    assert ids == "0\t50\n1\t7\n2\t9\n3\t300\n"
    assert test == "0\t2\t1\t90\n1\t1\t4\t10\n2\t2\t5\t1\n"
    assert train == "0\t0\n0\t1\n1\t3\n2\t0\n"
    rows = [line.split("\t") for line in negatives.splitlines()]
    assert [(row[0], sorted(row[1:])) for row in rows] == [
        ("(0,2)", ["3"]), ("(1,1)", ["0", "2"]), ("(2,2)", ["1", "3"]),
    ]  # fmt: skip


def test_99_different_unseen_items_the_same_each_time(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    lines = [
        f"{u}::{m}::3::{t}"
        for u in (1, 2, 3, 4)
        for t, m in enumerate(rng.permutation(300)[:120] + 1)
    ]
    paths = one_million.write_1m_files(ratings(tmp_path, lines))
    first = [path.read_bytes() for path in paths]
    pairs = [line.split("\t") for line in gzip.decompress(first[0]).decode().splitlines()]
    for row in gzip.decompress(first[2]).decode().splitlines():
        pair, *drawn = row.split("\t")
        user, item = pair.strip("()").split(",")
        assert len(set(drawn)) == len(drawn) == 99
        assert not set(drawn) & {item, *(i for u, i in pairs if u == user)}
    for path in paths:
        path.unlink()
    assert [path.read_bytes() for path in one_million.write_1m_files(tmp_path)] == first


def test_files_that_are_there_stay(tmp_path: Path) -> None:
    """They may be the published ones."""
    for name in one_million.NAMES_1M:
        (tmp_path / name).write_bytes(b"published")
    messages: list[str] = []
    one_million.write_1m_files(tmp_path, Feedback(on_message=messages.append))
    assert messages == ["leave-one-out pairs: here already"]
    assert all((tmp_path / name).read_bytes() == b"published" for name in one_million.NAMES_1M)


BAD = {
    "columns": ([*RATINGS, "1::2::3"], "line 8: not UserID::MovieID::Rating::Timestamp"),
    "text": (["1::2::3::4", "1::x::3::4"], "line 2: not UserID"),
    "empty": ([], "line 1: not UserID"),
    "gap": (["1::2::3::4", "1::3::3::4", "3::2::3::4", "3::3::3::4"], "UserID 2 has 0 ratings"),
    "lone": ([*RATINGS, "4::7::3::1"], "UserID 4 has 1 ratings, at least 2 are needed"),
}


@pytest.mark.parametrize("lines, message", BAD.values(), ids=BAD)
def test_bad_ratings(tmp_path: Path, lines: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        one_million.write_1m_files(ratings(tmp_path, lines))
    assert [path.name for path in tmp_path.iterdir()] == ["ml-1m"]


def test_get_unpacks_and_builds(tmp_path: Path) -> None:
    """With an archive of the same form: the real one may not be passed on."""
    source = tmp_path / "ml-1m.zip"
    with zipfile.ZipFile(source, "w") as archive:
        archive.writestr("ml-1m/ratings.dat", "\n".join(RATINGS) + "\n")
    data = source.read_bytes()
    file = RemoteFile("ml-1m.zip", len(data), hashlib.sha256(data).hexdigest(), (), unpack=True)
    dataset = DataSet("tiny", (file,), "", "", MOVIELENS_1M.build)
    download.fetch_dataset(dataset, tmp_path / "data", source)
    assert {path.name for path in (tmp_path / "data").iterdir()} == {
        "ml-1m.zip",
        "ml-1m",
        *one_million.NAMES_1M,
    }
    assert "no passing on" in MOVIELENS_1M.licence
