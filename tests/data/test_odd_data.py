"""Data that cannot be used: one line, nothing made, and never all of it in memory first."""

from __future__ import annotations

import gzip
import json
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from processes import refused, run, started

pytestmark = pytest.mark.ranks

LARGE = 2**32 - 1


def text(name: str, content: str) -> Callable[[Path], None]:
    return lambda folder: Path(folder / name).write_text(content) and None


def array(value: Any) -> Callable[[Path], None]:
    return lambda folder: np.savez(folder / "x.npz", x=value)


def idx(*numbers: int) -> Callable[[Path], None]:
    return lambda folder: (
        (folder / "x").write_bytes(struct.pack(f">{len(numbers)}I", *numbers)) and None
    )


def two_columns(folder: Path) -> None:
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
    pq.write_table(table, folder / "x.parquet")


def sparse(folder: Path) -> None:
    with h5py.File(folder / "x.h5", "w") as file:
        file.create_virtual_dataset("x", h5py.VirtualLayout((10**12,), np.float64))


class Evil:
    """What unpickles it leaves a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> object:
        return Path.touch, (self.mark,)


def objects(folder: Path) -> None:
    np.savez(folder / "x.npz", x=np.array([Evil(folder / "mark")], dtype=object))


# What makes the file, its name, flags of `data shard`, and what the line must hold.
ODD: dict[str, tuple[Callable[[Path], Any], str, tuple[str, ...], str]] = {
    "lines of nothing": (text("x.csv", "\n\n"), "x.csv", (), "x.csv: its first line has no names"),
    "a header alone": (text("x.csv", "a,b\n"), "x.csv", (), "x.csv has no samples"),
    "a column that looks like a path": (text("x.csv", "a/b,a\n1,2\n"), "x.csv", (), "column 'a/b'"),
    "a column that is a folder": (text("x.csv", ".\n1\n"), "x.csv", (), "column '.'"),
    "a column of 300 characters": (text("x.csv", "x" * 300 + "\n1\n"), "x.csv", (), "column 'xxx"),
    "too large for its type": (
        text("x.csv", "a\n300\n"),
        "x.csv",
        ("--dtype", "a=uint8"),
        "record 0: a: '300' is too large for uint8",
    ),
    "neither 0 nor 1 for a bool": (
        text("x.csv", "a\n1\n2\n"),
        "x.csv",
        ("--dtype", "a=bool"),
        "record 1: a: '2' is too large for bool",
    ),
    "too large for a float": (
        text("x.csv", "a\n1e39\n"),
        "x.csv",
        (),
        "'1e39' is too large for float32 (rows 0 to 0",
    ),
    "a type that is a list": (
        text("x.csv", "a\n1\n"),
        "x.csv",
        ("--dtype", "a=,"),
        "--dtype a=, is not a type",
    ),
    "a type of 16 bytes": (
        text("x.csv", "a\n1\n"),
        "x.csv",
        ("--dtype", "a=float128"),
        "--dtype a=float128",
    ),
    "chunks beyond memory": (
        text("x.csv", "a\n1\n"),
        "x.csv",
        ("--chunk-rows", str(10**15)),
        "chunks of 1,000",
    ),
    "chunks beyond numbers": (
        text("x.csv", "a\n1\n"),
        "x.csv",
        ("--chunk-rows", str(10**18)),
        "--chunk-rows",
    ),
    "a number with an underscore": (
        text("x.csv", "a\n1_0\n"),
        "x.csv",
        (),
        "a: '1_0' is no number",
    ),
    "other digits": (
        text("x.csv", "a\n٣\n"),
        "x.csv",
        ("--dtype", "a=int8"),
        "a: '٣' is no whole number",
    ),
    "a choice of none": (
        text("x.csv", "a\n1\n"),
        "x.csv",
        ("--columns", ","),
        "--columns ',' names no column",
    ),
    "a column named twice": (
        text("x.csv", "a\n1\n"),
        "x.csv",
        ("--columns", "a,a"),
        "'a' of x.csv is named",
    ),
    "two columns of one name": (
        two_columns,
        "x.parquet",
        (),
        "2 columns are called 'a'. HINT: --set columns=",
    ),
    "numbers of 16 bytes": (
        array(np.zeros(3, np.longdouble)),
        "x.npz",
        (),
        "holds float128 [3], not rows",
    ),
    "Python objects": (objects, "x.npz", (), "x.npy holds object [1], not rows of numbers"),
    "one number": (array(3.0), "x.npz", (), "x.npy holds float64 [], not rows of numbers"),
    "rows of nothing": (array(np.zeros((3, 0))), "x.npz", (), "the rows of column x hold nothing"),
    "a row of 2 GiB": (
        array(np.broadcast_to(np.uint8(0), (1, 2 << 30))),
        "x.npz",
        (),
        "a row has 2,147,483,648",
    ),
    "a header of 10^28 bytes": (
        idx(2051, LARGE, LARGE, LARGE),
        "x",
        (),
        "more than 16 bytes of a file can hold",
    ),
    "rows for no disk": (sparse, "x.h5", (), "x.h5 has 8,000,000,000,000 bytes to write"),
    "no end of zeros": (lambda _: None, "/dev/zero", (), "it is not a file"),
    "a pipe that nobody writes": (
        lambda folder: os.mkfifo(folder / "x.csv"),
        "x.csv",
        (),
        "it is not a file",
    ),
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.slow if case == "a row of 2 GiB" else ())
        for case in ODD
    ],
)
def test_what_cannot_be_sharded_is_one_line_and_leaves_nothing(case: str, tmp_path: Path) -> None:
    make, name, flags, message = ODD[case]
    make(tmp_path)
    before = sorted(tmp_path.iterdir())
    refused(
        run("data", "shard", name, "--out", "o/deep", *flags, cwd=tmp_path, timeout=120), message
    )
    assert sorted(tmp_path.iterdir()) == before


def test_a_folder_that_was_there_stays_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "o").mkdir()
    (tmp_path / "x.csv").write_text("a\n")
    refused(run("data", "shard", "x.csv", "--out", "o", cwd=tmp_path), "no samples")
    assert not list((tmp_path / "o").iterdir())


@pytest.mark.parametrize(
    "command", [("data", "info"), ("data", "get", "mnist", "--data-dir", "o", "--from")]
)
def test_what_is_no_file_is_neither_waited_for_nor_read(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("/dev/zero", "pipe"):
        refused(
            run(*command, name, cwd=tmp_path, timeout=120), f"cannot read {name}: it is not a file"
        )


def test_no_more_is_unpacked_than_a_header_says(tmp_path: Path) -> None:
    """256 MB of zeros behind the header of one byte: the process needs no more memory than without
    them.
    """
    with gzip.open(tmp_path / "bomb.gz", "wb", compresslevel=1) as file:
        file.write(struct.pack(">4I", 2051, 1, 1, 1))
        for _ in range(256):
            file.write(bytes(1 << 20))
    with started("data", "info", "bomb.gz", cwd=tmp_path) as running:
        peak = 0
        while running.popen.poll() is None:
            peak = max(peak, memory(running.popen.pid))
        assert running.end() == 2
        assert "1 x 1 x 1 = 1 bytes of data but it holds more" in running.err.read_text()
        assert peak < 200 << 20


def memory(pid: int) -> int:
    """Bytes that are its own; those it shares with the process that it was forked from are left
    out.
    """
    try:
        return int(psutil.Process(pid).memory_full_info().uss)
    except psutil.Error:  # it has just ended
        return 0


def test_an_archive_says_how_much_it_would_unpack(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("ml-latest-small/ratings.csv", bytes(1 << 20))
        archive.filelist[0].file_size = 2049 << 20  # to compress as much takes seconds
    refused(
        run("data", "info", "bomb.zip", cwd=tmp_path),
        "ratings.csv in bomb.zip has 2,148,532,224 bytes",
    )


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "rows that are a list": lambda index: index["shards"][0].update(rows=[]),
    "chunks that are a list": lambda index: index.update(chunk_rows=[[]]),
    "chunks of no row": lambda index: index.update(chunk_rows=0),
    "chunks beyond all memory": lambda index: index.update(chunk_rows=2**60, rows=4),
    "a type of no numbers": lambda index: index["columns"]["a"].update(dtype="object"),
    "a shard elsewhere": lambda index: index["shards"][0].update(file="../x.h5"),
    "columns that are a list": lambda index: index.update(columns=["a"]),
    "checksums of other digits": lambda index: index["shards"][0]["checksums"].update(a="²" * 16),
}


@pytest.mark.parametrize("case", CHANGES)
@pytest.mark.parametrize(
    "command",
    [
        ("data", "info", "o"),
        pytest.param(("data", "shard", "o", "--out", "new"), marks=pytest.mark.slow),
    ],
    ids=["info", "shard"],
)
def test_an_index_of_other_values_is_one_line(
    case: str, command: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "x.csv").write_text("a\n" + "1\n" * 4)
    assert run("data", "shard", "x.csv", "--out", "o", cwd=tmp_path).returncode == 0
    index = json.loads((tmp_path / "o/index.json").read_text())
    CHANGES[case](index)
    (tmp_path / "o/index.json").write_text(json.dumps(index))
    refused(
        run(*command, cwd=tmp_path),
        "cannot use o/index.json",
        "stepladder data shard INPUT --out o",
    )
    assert not (tmp_path / "new").exists()


def test_a_zip_with_a_file_of_no_name_is_no_source(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("a", "text")
    data = (tmp_path / "x.zip").read_bytes().replace(b"a", b"\0")  # which ends the name
    (tmp_path / "x.zip").write_bytes(data)
    refused(
        run("data", "get", "mnist", "--from", "x.zip", cwd=tmp_path),
        "x.zip does not hold train-images",
    )
