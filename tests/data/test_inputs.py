"""What shards are made from: what `open_data` reads, NPZ, IDX, HDF5; and inputs that are broken."""

from __future__ import annotations

import gzip
import io
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_files import make_rows, to_npy, write_arrow, write_jsonl, write_mds, write_tar
from stepladder import InputError, Shards
from stepladder.data.local_files import Feedback
from stepladder.data.shards.inputs import open_tables
from stepladder.data.shards.reader import ShardReader
from stepladder.data.shards.writer import write_table

ROWS = 10_000
IMAGES = np.random.default_rng(0).integers(0, 256, (ROWS, 3, 2), dtype=np.uint8)


def shards_of(path: Path, columns: tuple[str, ...]) -> Path:
    return path.parent / "-".join(("out", *columns))


def sharded(
    path: Path, columns: tuple[str, ...] = (), dtypes: dict[str, str] | None = None
) -> dict[str, Any]:
    """The input's rows, after a way through shards."""
    out = shards_of(path, columns)
    write_table(open_tables(str(path), columns, dtypes)[""], out, chunk_rows=100)
    shards = Shards(out)
    with ShardReader(shards) as reader:
        return reader.read(np.arange(len(shards)))


def refused(path: Path, *parts: str, columns: tuple[str, ...] = (), dtypes: Any = None) -> None:
    with pytest.raises(InputError) as caught:
        sharded(path, columns, dtypes)
    for part in (*parts, "HINT: "):
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (shards_of(path, columns) / "index.json").exists()


def csv(path: Path, text: str) -> Path:
    path.write_bytes(text.encode())
    return path


# -- CSV -------------------------------------------------------------------------------------------


def test_csv(tmp_path: Path) -> None:
    lines = "".join(f"{i},{i / 2},{i * 10**12}\r\n" for i in range(ROWS))
    rows = sharded(csv(tmp_path / "r.csv", "\ufeffuser,rating,time\r\n" + lines))
    assert {name: array.dtype.name for name, array in rows.items()} == {
        "user": "int64", "rating": "float32", "time": "int64",
    }  # fmt: skip
    np.testing.assert_array_equal(rows["time"], np.arange(ROWS) * 10**12)
    np.testing.assert_array_equal(rows["rating"], (np.arange(ROWS) / 2).astype(np.float32))


def test_csv_columns_types_quotes_and_tabs(tmp_path: Path) -> None:
    path = csv(tmp_path / "r.tsv", 'id\t"na me"\tx\n1\t"a\tb\nc"\t2\n2\tq\t3\n')
    rows = sharded(path, ("x", "id"), {"x": "float64"})
    assert list(rows) == ["x", "id"]
    assert (rows["x"].tolist(), rows["x"].dtype.name, rows["id"].tolist()) == (
        [2.0, 3.0],
        "float64",
        [1, 2],
    )


LONG = "a,b\n" + "1,2\n" * 5000
BAD_CSV = {
    "columns": (LONG + "1,2,3\n", "record 5000: it has 3 values, the header 2"),
    "short line": ("a,b\n1,2\n1\n3,4\n", "record 1: it has 1 values, the header 2"),
    "type": (LONG + "1,2.5\n", "record 5000: b: '2.5' is no whole number (rows 4,096 to 5,000"),
    "too large": ("a,b\n1,2\n1,-1e39\n", "record 1: b: '-1e39' is too large for float32"),
    "infinite": ("a,b\n1,2\n1,1e400\n", "record 1: b: '1e400' is too large for float32"),
    "text": ("a,b\n1,2\n1,two\n", "record 1: b: 'two' is no number"),
    "empty value": ("a,b\n1,2\n1,\n", "record 1: b: '' is no number"),
    "large": (
        LONG + "1,99999999999999999999\n",
        "record 5000: b: '99999999999999999999' is too large for int64",
    ),
    "quote": ('a,b\n1,2\n"1,2\n', "record 1: a quotation mark in it is not one of CSV"),
    "no header": ("1,2\n3,4\n", "its first line has '1', a value and no name of a column"),
    "twice": ("a,a\n1,2\n", "2 columns of its first line are called 'a'"),
    "empty": ("", "r.csv: its first line has no names"),
    "no rows": ("a,b\n", "r.csv has no samples"),
    "line breaks of old": ("a,b\r1,2\r", "its lines end with CR alone"),
}


@pytest.mark.parametrize("text, message", BAD_CSV.values(), ids=BAD_CSV)
def test_broken_csv(tmp_path: Path, text: str, message: str) -> None:
    refused(csv(tmp_path / "r.csv", text), "r.csv", message)


def test_csv_that_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    path.write_bytes(b"a,b\n1,2\n\xff\xfe,3\n")
    refused(path, "r.csv: record 1: ", "can't decode byte 0xff")


def test_csv_unknown_columns_and_types(tmp_path: Path) -> None:
    path = csv(tmp_path / "r.csv", "a,b\n1,2\n")
    refused(path, "no column 'c'", "its columns are: a, b", columns=("c",))
    refused(path, "no column 'c'", dtypes={"c": "int8"})
    refused(path, "--dtype a=word is not a type of numbers", dtypes={"a": "word"})
    refused(path, "--dtype a=str is not a type of numbers", dtypes={"a": "str"})


def test_a_changed_input_is_not_gone_on_with(tmp_path: Path) -> None:
    path = csv(tmp_path / "r.csv", LONG + "1,2,3\n")
    for last, message in ("1,2,3\n", "record 5000"), ("1,2\n", "another source"):
        with pytest.raises(InputError, match=message):
            write_table(
                open_tables(str(csv(path, LONG + last)))[""], tmp_path / "out", rows_per_shard=1000
            )


# -- Parquet ---------------------------------------------------------------------------------------


def test_parquet(tmp_path: Path) -> None:
    lists = [list(range(i % 5)) for i in range(ROWS)]
    table = pa.table(
        {
            "id": np.arange(ROWS, dtype=np.uint16),
            "yes": [i % 3 == 0 for i in range(ROWS)],
            "tags": lists,
            "place": pa.FixedSizeListArray.from_arrays(np.arange(2.0 * ROWS), 2),
            "name": ["x"] * ROWS,
        }
    )
    pq.write_table(table, tmp_path / "r.parquet", row_group_size=3000)
    refused(tmp_path / "r.parquet", "column name is string, not numbers")
    assert list(sharded(tmp_path / "r.parquet", ("tags", "id"))) == ["tags", "id"], (
        "as the hint has it"
    )
    pq.write_table(table.drop(["name"]), tmp_path / "r.parquet", row_group_size=3000)
    rows = sharded(tmp_path / "r.parquet")
    np.testing.assert_array_equal(rows["id"], np.arange(ROWS, dtype=np.uint16))
    np.testing.assert_array_equal(rows["yes"], np.arange(ROWS) % 3 == 0)
    np.testing.assert_array_equal(rows["place"], np.arange(2.0 * ROWS).reshape(-1, 2))
    assert rows["tags"].values.tolist() == [v for row in lists for v in row]


def test_bad_parquet(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1, 2, None]}), tmp_path / "n.parquet")
    refused(tmp_path / "n.parquet", "n.parquet: record 2: column a has an empty value")
    (tmp_path / "junk.parquet").write_bytes(b"junk" * 10)
    refused(tmp_path / "junk.parquet", "cannot use")


# -- NPZ -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz(tmp_path: Path, save: Any) -> None:
    save(tmp_path / "d.npz", images=IMAGES, labels=np.arange(ROWS))
    rows = sharded(tmp_path / "d.npz")
    np.testing.assert_array_equal(rows["images"], IMAGES)
    np.testing.assert_array_equal(rows["labels"], np.arange(ROWS))


def test_npz_with_columns_of_different_length(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", images=IMAGES, labels=np.arange(ROWS - 1))
    refused(
        tmp_path / "d.npz",
        "its arrays differ in length: images has 10000 rows, labels has 9999 rows",
    )
    np.testing.assert_array_equal(
        sharded(tmp_path / "d.npz", ("labels",))["labels"], np.arange(ROWS - 1)
    )


def test_bad_npz(tmp_path: Path) -> None:
    path = tmp_path / "d.npz"
    np.savez(path, names=np.array(["a", "b"]))
    refused(path, "names.npy holds <U1 [2], not rows of numbers")
    np.savez(path, x=np.asfortranarray(np.eye(3)))
    refused(path, "x.npy is in Fortran order", "ascontiguousarray")
    np.savez(path, x=np.arange(3, dtype=">i4"))
    refused(path, "x.npy holds >i4, in another order of bytes")
    np.savez(path)
    refused(path, "it holds no arrays")
    path.write_bytes(b"no zip")
    refused(path, "cannot use", "not a zip file")
    np.savez(path, x=np.arange(1000))
    data = bytearray(path.read_bytes())
    data[4000] ^= 1
    path.write_bytes(data)
    refused(path, "Bad CRC-32")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", b"\x93NUMPY junk")
    refused(path, "cannot use")


# -- IDX and HDF5 ----------------------------------------------------------------------------------


def idx_bytes(array: np.ndarray) -> bytes:
    return struct.pack(f">{1 + array.ndim}I", 2048 + array.ndim, *array.shape) + array.tobytes()


def test_the_four_mnist_files(tmp_path: Path) -> None:
    labels = (np.arange(ROWS) % 10).astype(np.uint8)
    for part, stop in (("train", ROWS), ("t10k", 50)):
        data = gzip.compress(idx_bytes(IMAGES[:stop]), 1)
        (tmp_path / f"{part}-images-idx3-ubyte.gz").write_bytes(data)
        (tmp_path / f"{part}-labels-idx1-ubyte").write_bytes(idx_bytes(labels[:stop]))
    for part, table in open_tables(str(tmp_path)).items():
        write_table(table, tmp_path / "out" / part)
    for part, stop in (("train", ROWS), ("test", 50)):
        with ShardReader(Shards(tmp_path / "out" / part)) as reader:
            rows = reader.read(np.arange(stop))
        np.testing.assert_array_equal(rows["images"], IMAGES[:stop])
        np.testing.assert_array_equal(rows["labels"], labels[:stop])


def test_a_single_idx_file(tmp_path: Path) -> None:
    (tmp_path / "any-name").write_bytes(gzip.compress(idx_bytes(IMAGES)))
    np.testing.assert_array_equal(sharded(tmp_path / "any-name")["images"], IMAGES)


def test_bad_idx(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(idx_bytes(IMAGES)[:-1])
    refused(tmp_path / "x", "the data of images, row 8192 and after ends early")
    (tmp_path / "x").write_bytes(idx_bytes(IMAGES) + b"1")
    refused(tmp_path / "x", "more follows after the last row of images")
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        rows = 8 if name.startswith("train-l") else 9
        array = IMAGES[:rows] if "images" in name else np.zeros(rows, np.uint8)
        (tmp_path / f"{name}-ubyte").write_bytes(idx_bytes(array))
    with pytest.raises(
        InputError, match="train-images-idx3-ubyte has 9 rows, train-labels-idx1-ubyte has 8 rows"
    ):
        open_tables(str(tmp_path))


def test_shards_are_cut_anew(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", images=IMAGES, labels=np.arange(ROWS))
    sharded(tmp_path / "d.npz")
    write_table(
        open_tables(str(tmp_path / "out"), ("labels",))[""], tmp_path / "new", chunk_rows=1000
    )
    resharded = Shards(tmp_path / "new")
    assert (list(resharded.columns), resharded.shards[0].chunk_rows) == (["labels"], 1000)
    with ShardReader(resharded) as reader:
        assert reader.read(np.arange(ROWS))["labels"].tolist() == list(range(ROWS))


# -- all else that open_data reads -----------------------------------------------------------------


class Stopped(Exception):
    """Raised in place of a kill after the first shard."""


def stop_after_first_shard(line: str) -> None:
    if line.startswith("shard-00000"):
        raise Stopped


@pytest.mark.parametrize(
    ("write", "columns"),
    [
        (write_arrow, ("id", "x", "y")),
        (write_jsonl, ("id", "x", "y")),
        (write_mds, ("id", "x", "y")),
        (write_tar, ("id.cls", "x.npy", "y.cls")),
    ],
    ids=["arrow", "jsonl", "mds", "tar"],
)
def test_what_open_data_reads_and_a_resume(
    write: Callable[[Path], None],
    columns: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "in"
    folder.mkdir()
    write(folder)
    with pytest.raises(
        InputError, match=r"column (text|text\.txt|__key__) is str(ing)?, not numbers"
    ):
        open_tables(str(folder))
    sizes = {"chunk_rows": 7, "rows_per_shard": 50}
    out = tmp_path / "out"
    with pytest.raises(Stopped):
        feedback = Feedback(on_message=stop_after_first_shard)
        write_table(open_tables(str(folder), columns)[""], out, **sizes, feedback=feedback)
    with pytest.raises(InputError, match="not finished"):
        Shards(out)
    said: list[str] = []
    feedback = Feedback(on_message=said.append)
    write_table(open_tables(str(folder), columns)[""], out, **sizes, feedback=feedback)
    assert said[0].endswith("going on after 56 rows in 1 shards")
    shards = Shards(out)
    with ShardReader(shards) as reader:
        rows = dict(
            zip(("id", "x", "y"), reader.read(np.arange(len(shards))).values(), strict=True)
        )
    expected = make_rows()
    assert rows["id"].tolist() == [row["id"] for row in expected]
    assert rows["y"].tolist() == [row["y"] for row in expected]
    np.testing.assert_array_equal(rows["x"], [row["x"] for row in expected])
    at_once = write_table(open_tables(str(folder), columns)[""], tmp_path / "whole", **sizes)
    assert at_once.read_bytes() == (out / "index.json").read_bytes()


BAD_JSON_LINES = {
    "type": ('{"n": 1}\n' * 5000 + '{"n": "one"}\n', "record 5000: n has another type"),
    "null": ('{"n": 1}\n{"n": null}\n', "has an empty value"),
    "columns": ('{"n": 1}\n{"m": 1}\n', "record 1 has no n"),
    "a torn line": ('{"n": 1}\n{"n"', "record 1: "),
    "texts": ('{"n": "one"}\n', "column n is str, not numbers"),
}


@pytest.mark.parametrize("text, message", BAD_JSON_LINES.values(), ids=BAD_JSON_LINES)
def test_broken_json_lines(tmp_path: Path, text: str, message: str) -> None:
    refused(csv(tmp_path / "r.jsonl", text), "r.jsonl", message)


def test_lists_of_json_lines(tmp_path: Path) -> None:
    lists = [[1] * (number % 3) for number in range(5000)]
    path = csv(tmp_path / "r.jsonl", "".join(f'{{"n": {value}}}\n' for value in lists))
    rows = sharded(path)["n"]
    assert np.diff(rows.offsets).tolist() == [len(value) for value in lists]


def test_samples_of_another_shape_are_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "r.tar", "w") as archive:
        for number in range(5000):
            data = to_npy(np.zeros(2 + number // 4500, np.float32))
            member = tarfile.TarInfo(f"{number}.npy")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    hint = "--columns NAME,NAME"
    refused(tmp_path / "r.tar", "column npy ", hint, columns=("npy",))


def test_a_pattern_of_files(tmp_path: Path) -> None:
    for number in range(3):
        csv(tmp_path / f"{number}.csv", f"a\n{number}\n")
    write_table(open_tables(f"{tmp_path}/[12].csv")[""], tmp_path / "out")
    with ShardReader(Shards(tmp_path / "out")) as reader:
        assert reader.read(np.arange(2))["a"].tolist() == [1, 2]


def test_unknown_kinds(tmp_path: Path) -> None:
    refused(
        csv(tmp_path / "r.txt", "a,b\n1,2\n"),
        "is of no kind that can be sharded",
        "parquet, arrow, webdataset",
    )
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "is of no kind")
    refused(tmp_path / "nowhere", "there is no")
