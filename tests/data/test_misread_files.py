"""Files that could be misread in silence: each is read right, or refused with its name."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepladder.core.errors import InputError
from stepladder.data.readers.open_data import open_data


def write_tar(path: Path, members: dict[str, bytes]) -> None:
    """Write a tar file with these members."""
    with tarfile.open(path, "w") as archive:
        for name, contents in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(contents)
            archive.addfile(info, io.BytesIO(contents))


def write_mds(folder: Path, values: list[Any]) -> None:
    """Write a shard of MDS with one column of JSON."""
    samples = [json.dumps(value).encode() for value in values]
    samples = [len(sample).to_bytes(4, "little") + sample for sample in samples]
    begins = 4 * (len(samples) + 2) + np.cumsum([0, *map(len, samples)])
    data = np.array([len(samples), *begins], "<u4").tobytes() + b"".join(samples)
    folder.mkdir()
    (folder / "shard.00000.mds").write_bytes(data)
    shard = {
        "column_encodings": ["json"],
        "column_names": ["x"],
        "column_sizes": [None],
        "samples": len(samples),
        "raw_data": {"basename": "shard.00000.mds", "bytes": len(data), "hashes": {}},
    }
    (folder / "index.json").write_text(json.dumps({"shards": [shard]}))


def save_npy(value: Any) -> bytes:
    """Return the bytes of a .npy file."""
    stream = io.BytesIO()
    np.save(stream, value)
    return stream.getvalue()


def write_npy_tar(path: Path) -> None:
    values = [np.array([2**53 + 1]), np.array([0.5], np.float32)]
    write_tar(path, {f"{number}.npy": save_npy(value) for number, value in enumerate(values)})


def write_json_tar(path: Path) -> None:
    write_tar(path, {"0.json": b"16777217", "1.json": b"0.5"})


@pytest.mark.parametrize(
    ("name", "write", "column"),
    [
        ("a.tar", write_npy_tar, "npy"),
        ("a.tar", write_json_tar, "json"),
        ("a", lambda path: write_mds(path, [16777217, 0.5]), "x"),
        ("a", lambda path: write_mds(path, [1, "b"]), "x"),
    ],
)
def test_a_column_has_one_type_whatever_the_batch(
    name: str, write: Callable[[Path], None], column: str, tmp_path: Path
) -> None:
    write(tmp_path / name)
    data = open_data(tmp_path / name, columns=[column])
    assert data.read(np.array([0]))[0].dtype == np.int64
    for batch in ([1], [0, 1]):
        with pytest.raises(InputError, match=rf"record 1: column {column} is .*, and int64 in"):
            data.read(np.array(batch))
    assert [damage.first for damage in data.find_damage()] == [1]


def test_whole_numbers_among_fractions_are_fractions_in_any_batch(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", {"0.json": b"0.5", "1.json": b"2"})
    data = open_data(tmp_path / "a.tar", columns=["json"])
    assert data.read(np.array([1]))[0].dtype == data.read(np.arange(2))[0].dtype == np.float32


def test_a_number_that_is_too_large_is_named_with_its_record(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", {"0.cls": b"1", "1.cls": str(2**63).encode()})
    with pytest.raises(InputError, match=r"a\.tar: record 1: column cls: "):
        open_data(tmp_path / "a.tar", columns=["cls"]).read(np.arange(2))


def write_tsv(path: Path, *rows: str) -> None:
    path.write_text("".join(f"{row}\n" for row in rows))


def test_a_line_of_tsv_is_a_record_whatever_quotes_it_has(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    write_tsv(path, "text\ty", '"Hello, he said\t0', 'bye bye"\t1', '"so" he said\t2', '"it is"\t3')
    data = open_data(path).read(np.arange(4))
    assert data["y"].tolist() == [0, 1, 2, 3]
    assert data["text"] == ['"Hello, he said', 'bye bye"', '"so" he said', '"it is"']


def test_quotes_around_the_names_of_a_tsv_file_are_those_of_csv(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    write_tsv(path, '"text"\ty', '"a ""b""\n\tc"\t0', "d\t1")
    for options in ({}, {"header": ["text", "y"]}):
        assert open_data(path, **options).read(np.arange(2))["text"] == ['a "b"\n\tc', "d"]


@pytest.mark.parametrize("row", ['"a ""b"""\t0', '"a\nb"\t0', '"a\tb"\t0'])
def test_quotes_of_csv_in_a_tsv_file_without_them_around_its_names_are_refused(
    row: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.tsv"
    write_tsv(path, "text\ty", "c\t1", row)
    data = open_data(path)
    with pytest.raises(InputError, match=r"record 1: it has .* HINT: quotation marks around the n"):
        data.read(np.arange(2))
    assert next(data.find_damage()).first == 1


def test_a_quotation_mark_that_csv_does_not_write_is_refused_in_plain_words(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('x,t\n1,5" disk\n2,b\n')
    with pytest.raises(InputError, match=r"record 0: a quotation mark in it .* HINT: quotation"):
        open_data(path)
