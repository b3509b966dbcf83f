"""Files that `open_data` cannot use, and what was replaced or damaged since: one line, and no hang."""

from __future__ import annotations

import io
import json
import math
import os
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_files import write_arrow, write_mds, write_parquet
from processes import refused, run
from stepladder import InputError, Shards, open_data, write_shards
from stepladder.data.readers import arrow_stream
from stepladder.data.readers.block_cache import BlockCache
from stepladder.data.readers.files import LocalFile, open_file
from stepladder.data.readers.parquet_files import OPEN_PARQUET_FILES
from stepladder.data.shards.reader import ShardReader


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "stepladder"


LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0a\nsize 12345\n"


def write_tensor(path: Path, shape: list[float]) -> None:
    entry = {"dtype": "U8", "shape": shape, "data_offsets": [0, 0]}
    write_header(path, json.dumps({"x": entry} if shape != [-1] else {}))


def write_tensors(*places: list[int]) -> Callable[[Path], None]:
    entries = [{"dtype": "U8", "shape": [2], "data_offsets": place} for place in places]
    return lambda path: write_header(path, json.dumps(dict(zip("xy", entries, strict=True))), 6)


def write_header(path: Path, header: str, size: int = 0) -> None:
    path.write_bytes(struct.pack("<Q", len(header)) + header.encode() + bytes(size))


def write_text(text: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(text)


def write_array(array: Any) -> Callable[[Path], None]:
    return lambda path: np.save(path, array)


@pytest.mark.parametrize(
    ("name", "write", "options", "message"),
    [
        ("a.csv", write_text("x,y,x\n1,2,3\n"), {}, "2 columns of its first line are called 'x'"),
        ("a.csv", write_text(LFS_POINTER), {}, "only tells Git LFS .* HINT: git lfs pull"),
        ("a.parquet", write_text("/annex/objects/MD5-s9--a.parquet\n"), {}, "or git-annex where"),
        ("a.csv", write_text("\n<!DOCTYPE html>\n<html>\n"), {}, "is a page of HTML"),
        ("a.npy", write_array(np.zeros(3, np.longdouble)), {}, r"holds float128 \[3\]"),
        ("a.npy", write_array(np.zeros((3, 0))), {}, "the rows of array hold nothing"),
        ("a.npy", write_array(np.arange(9)), {"block": 0}, r"block=0\. HINT: block= 1 or more"),
        ("a.bin", write_text("12345678"), {"block": 1, "dtype": "foo"}, "dtype='foo'"),
        ("a.bin", write_text("12345678"), {"block": 1, "dtype": "float32"}, "dtype='float32'"),
        ("a.npy", write_text("\x93NUMPY"), {}, "cannot be used: "),
        ("a.bin", write_text("12345678"), {"block": 1.5}, r"block=1\.5"),
        ("a.bin", write_text("12345678"), {"block": "8"}, "block='8'"),
        ("a.jsonl", write_text('{"x": 1}\n'), {"chunk_rows": -1}, "chunk_rows=-1"),
        ("a.jsonl", write_text('{"x": 1}\n'), {"chunk_rows": 1.5}, "chunk_rows=1.5"),
        ("a.jsonl", write_text('{"x": 1}\n'), {"columns": 5}, "columns=5: 'int' object is not"),
        ("a.jsonl", write_text('{"x": 1}\n'), {"columns": "x"}, r"HINT: columns=\['x'\]"),
        ("a.jsonl", write_text('{"x": 1}\n'), {"decode": 5}, "decode=5"),
        ("a.safetensors", lambda path: write_tensor(path, []), {}, "x is a single number"),
        ("a.safetensors", lambda path: write_tensor(path, [-3]), {}, "the rows of x hold nothing"),
        (
            "a.safetensors",
            write_tensors([0, 2], [4, 6]),
            {},
            "y begins at byte 132, .* ends at 130",
        ),
        (
            "a.safetensors",
            write_tensors([0, 2], [1, 3]),
            {},
            "y begins at byte 129, .* ends at 130",
        ),
        ("a.npy", write_array(np.zeros(9)), {"block": 4}, "holds float64, and tokens are whole"),
        ("a.safetensors", lambda path: write_tensor(path, [-1]), {}, "holds no tensors"),
        ("a.safetensors", lambda path: write_tensor(path, [math.inf]), {}, "infinity to integer"),
        ("a.safetensors", lambda path: write_header(path, "[" * 100_000), {}, "too deeply"),
        (
            "a.safetensors",
            lambda path: write_tensor(path, [3, 0]),
            {},
            "the rows of x hold nothing",
        ),
    ],
)
def test_what_cannot_be_used_is_one_line(
    name: str,
    write: Callable[[Path], object],
    options: dict[str, Any],
    message: str,
    tmp_path: Path,
) -> None:
    write(tmp_path / name)
    with pytest.raises(InputError, match=message):
        open_data(tmp_path / name, **options)


def test_a_file_that_would_be_left_out_of_a_list_is_named(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl", "c.csv"):
        (tmp_path / name).write_text('{"x": 1}\n')
    with pytest.raises(InputError, match=r"c\.csv is no file of jsonl"):
        open_data([tmp_path / "a.jsonl", tmp_path / "c.csv", tmp_path / "b.jsonl"])
    with pytest.raises(InputError, match=r"c\.csv is no file of jsonl"):
        open_data(tmp_path)


@pytest.mark.parametrize("rows", ['1 "a"', "1 [2]", "true 2"])
def test_a_column_of_several_types_is_refused_in_any_batch(rows: str, tmp_path: Path) -> None:
    """One batch of it would be numbers, and the next one texts."""
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"x": {value}}}\n' for value in rows.split()))
    with pytest.raises(InputError, match=r"column x .* has values of several types: "):
        open_data(path).read(np.arange(2))


def test_a_file_that_was_replaced_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"x": 1}\n')
    assert open_data(path).read(np.arange(1))["x"].tolist() == [1]
    newer = tmp_path / "b.jsonl"
    newer.write_text('{"x": 2}\n')
    newer.replace(path)
    assert open_data(path).read(np.arange(1))["x"].tolist() == [2]


def replace_by(path: Path, newer: Path) -> None:
    """Replace a file by another one of the same size, written a second later."""
    seconds = path.stat().st_mtime + 1
    os.utime(newer, (seconds, seconds))
    newer.replace(path)


def test_a_file_that_is_replaced_while_it_is_read_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n')
    source = open_data(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").write_text('{"x": 2}\n')
    replace_by(tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    assert source.read(np.arange(1))["x"].tolist() == [1], "it is open"
    open_file.cache_clear()
    with pytest.raises(InputError, match=r"a\.jsonl has changed since it was opened\. HINT: start"):
        source.read(np.arange(1))


def test_a_file_that_a_library_opens_again_is_the_same_one(tmp_path: Path) -> None:
    for number in range(OPEN_PARQUET_FILES + 1):
        pq.write_table(pa.table({"x": [number]}), tmp_path / f"{number:02}.parquet")
    source = open_data(tmp_path)
    (tmp_path / "new").mkdir()
    pq.write_table(pa.table({"x": [9]}), tmp_path / "new/00.parquet")
    replace_by(tmp_path / "00.parquet", tmp_path / "new/00.parquet")
    with pytest.raises(InputError, match=r"00\.parquet has changed since it was opened"):
        source.read(np.arange(1))


def test_a_file_of_hdf5_without_checksums_is_the_same_one(tmp_path: Path) -> None:
    for name, value in (("a.h5", 1), ("b.h5", 2)):
        with h5py.File(tmp_path / name, "w") as file:
            file["x"] = np.full(4, value)
    shards = Shards(tmp_path / "a.h5")
    replace_by(tmp_path / "a.h5", tmp_path / "b.h5")
    with (
        ShardReader(shards) as reader,
        pytest.raises(InputError, match=r"a\.h5 has changed since it was opened"),
    ):
        reader.read(np.arange(4))


@pytest.mark.parametrize(
    ("name", "damaged", "whole"), [("jsonl", "{", '{"x": 1}'), ("csv", '"', "1")]
)
def test_types_are_those_of_the_first_file_with_readable_records(
    name: str, damaged: str, whole: str, tmp_path: Path
) -> None:
    for file, row in (("a", damaged), ("b", whole)):
        (tmp_path / f"{file}.{name}").write_text(f"x\n{row}\n" if name == "csv" else f"{row}\n")
    source = open_data(tmp_path)
    assert source.read(np.array([1]))["x"].tolist() == [1]
    with pytest.raises(InputError, match="record 0"):
        source.read(np.array([0]))


def test_a_name_in_large_letters_has_tabs_too(tmp_path: Path) -> None:
    (tmp_path / "A.TSV").write_text("x\ty\n1\t2\n")
    assert list(open_data(tmp_path).columns) == ["x", "y"]


@pytest.mark.parametrize("path", ["", [""], 5, None, [5]])
def test_what_is_no_path_is_one_line(path: Any) -> None:
    with pytest.raises(InputError, match="HINT: a file, a folder, or a pattern"):
        open_data(path)


MDS_CHANGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no type": (lambda one: set_encoding(one, "ndarray:foo"), "'foo' is no type of numbers"),
    "objects": (lambda one: set_encoding(one, "ndarray:O:4"), "'O' is no type of numbers"),
    "letters": (
        lambda one: set_encoding(one, "ndarray:float32:a"),
        "'ndarray:float32:a', which is",
    ),
    "a negative shape": (lambda one: set_encoding(one, "ndarray:float32:-4"), "'-4' is no shape"),
    "sizes of texts": (lambda one: one.update(column_sizes=["8"] * 4), "not a whole number"),
    "negative sizes": (lambda one: one.update(column_sizes=[-8] * 4), "the columns of"),
    "no columns": (
        lambda one: one.update(column_sizes=[], column_names=[], column_encodings=[]),
        "the columns of",
    ),
    "one name for all": (lambda one: one.update(column_names=["x"] * 4), "the columns of"),
    "no samples": (lambda one: one.update(samples=-1), "has -1 samples"),
    "too many samples": (lambda one: one.update(samples=2**63), "has 9223372036854775808 samples"),
}


def set_encoding(shard: dict[str, Any], encoding: str) -> None:
    shard["column_encodings"][2] = encoding


@pytest.mark.parametrize("case", MDS_CHANGES)
def test_an_index_of_mds_with_nonsense_is_one_line(case: str, tmp_path: Path) -> None:
    write_mds(tmp_path)
    index = json.loads((tmp_path / "index.json").read_text())
    change, message = MDS_CHANGES[case]
    for shard in index["shards"]:
        change(shard)
    (tmp_path / "index.json").write_text(json.dumps(index))
    refused(run("data", "info", ".", cwd=tmp_path), message)


def test_folders_of_mds_have_the_same_columns(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_mds(tmp_path / name)
    index = tmp_path / "b/index.json"
    index.write_text(index.read_text().replace('"text"', '"words"'))
    with pytest.raises(InputError, match="has other columns than the first shard"):
        open_data([tmp_path / "a", tmp_path / "b"])


def test_a_hash_of_mds_without_a_length_is_left_out(tmp_path: Path) -> None:
    write_mds(tmp_path)
    index = tmp_path / "index.json"
    index.write_text(index.read_text().replace('"hashes": {}', '"hashes": {"shake_128": "0"}'))
    assert list(open_data(tmp_path).find_damage()) == []


@pytest.mark.parametrize(
    ("suffix", "contents"),
    [("npy", b""), ("npy", b"PK\3\4"), ("json", b"[" * 100_000), ("npy", b"huge")],
)
def test_a_member_that_cannot_be_decoded_is_named(
    suffix: str, contents: bytes, tmp_path: Path
) -> None:
    if contents == b"huge":
        out = io.BytesIO()
        shape = {"shape": (1 << 50,), "fortran_order": False, "descr": "<f8"}
        np.lib.format.write_array_header_1_0(out, shape)
        contents = out.getvalue()
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        member = tarfile.TarInfo(f"0.{suffix}")
        member.size = len(contents)
        tar.addfile(member, io.BytesIO(contents))
    with pytest.raises(InputError, match=r"a\.tar: record 0: "):
        open_data(tmp_path)


@pytest.mark.parametrize("write", [write_arrow, write_parquet])
def test_a_damaged_name_of_a_column_is_one_line(
    write: Callable[[Path], None], tmp_path: Path
) -> None:
    write(tmp_path)
    file = min(tmp_path.iterdir())
    file.write_bytes(file.read_bytes().replace(b"tags", b"t\xffgs"))
    with pytest.raises(InputError, match=f"{file.name} cannot be used?: |cannot use .*{file.name}"):
        open_data(file)


def test_a_damaged_text_in_an_arrow_file_is_named_and_found(tmp_path: Path) -> None:
    write_arrow(tmp_path)
    file = min(tmp_path.iterdir())
    file.write_bytes(file.read_bytes().replace(b'text "25"', b'text "\xff5"'))
    source = open_data(file, columns=["text"])
    with pytest.raises(InputError, match=r"data-0\.arrow: record 25: .* HINT: correct the file"):
        source.read(np.array([21, 25]))
    assert [damage.first for damage in source.find_damage()] == [25]


def test_a_damaged_first_record_is_listed_with_the_others(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"x":\n{"x": 1}\n{"x"\n')
    done = run("data", "check", "a.jsonl", cwd=tmp_path)
    assert done.returncode == 2
    assert [line.split(":")[1] for line in done.stdout.splitlines()] == [" record 0", " record 2"]
    with pytest.raises(InputError, match="record 0"):
        open_data(tmp_path / "a.jsonl").read(np.arange(3))


def test_check_of_shards_prints_json_when_asked(tmp_path: Path) -> None:
    write_shards([{"x": 1}], tmp_path / "shards")
    facts = json.loads(run("data", "check", "shards", "--json", cwd=tmp_path).stdout)
    assert facts["rows"] == len(Shards(tmp_path / "shards")) == 1


@pytest.mark.parametrize("command", ["check", "index"])
def test_no_path_is_not_the_current_folder(command: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n')
    refused(run("data", command, "", cwd=tmp_path), "PATH '' is not a path")


def test_a_format_that_is_not_known_by_its_name_can_be_typed(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text('{"x": 1}\n')
    refused(run("data", "check", "a.txt", cwd=tmp_path), "HINT: --set format=FORMAT, one of")


def test_a_reason_with_a_period_has_one(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"no parquet file" * 9)
    with pytest.raises(InputError, match=r"parquet file\. HINT: "):
        open_data(tmp_path / "a.parquet")


def test_a_file_in_the_place_of_a_folder_is_not_a_full_disk(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    with pytest.raises(InputError, match=r"File exists\. HINT: another folder"):
        write_shards([{"x": 1}], tmp_path / "a")
    with pytest.raises(InputError, match=r"Not a directory\. HINT: another folder"):
        write_shards([{"x": 1}], tmp_path / "a/b")
    with pytest.raises(InputError, match=r"No such file or directory\. HINT: another folder"):
        write_shards([{"x": 1}], Path("/proc/x"))


def test_an_index_beside_a_url_is_refused(tmp_path: Path) -> None:
    done = run("data", "index", "http://127.0.0.1:9/a.jsonl", "--beside", cwd=tmp_path)
    assert done.returncode == 2
    assert "--beside http://127.0.0.1:9/a.jsonl. HINT: stepladder data index" in done.stderr


def test_a_member_of_less_than_no_bytes_ends_the_search(tmp_path: Path) -> None:
    attributes = b"14 size=-1000\n"
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.USTAR_FORMAT) as archive:
        for name, kind, data in (("x", b"x", attributes), ("0.txt", b"0", b"text")):
            member = tarfile.TarInfo(name)
            member.type = kind
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    with pytest.raises(InputError, match=r"record 0: .*has -1000 bytes"):
        open_data(tmp_path / "a.tar")


def test_an_arrow_file_without_its_end_is_damaged(tmp_path: Path) -> None:
    """The record batches of a file behind a URL are found by their messages alone."""
    path = tmp_path / "a.arrow"
    table = pa.table({"x": range(10)})
    with pa.OSFile(str(path), "wb") as out, pa.ipc.new_file(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=5)
    whole = LocalFile(path)
    messages = list(arrow_stream.list_messages(whole))
    assert [message.rows for message in messages] == [0, 5, 5]
    path.write_bytes(path.read_bytes()[: messages[1].end])
    with pytest.raises(InputError, match=r"a\.arrow cannot be used: its message at byte"):
        list(arrow_stream.list_messages(LocalFile(path)))


def test_a_whole_file_stays_in_the_cache_that_it_fills(cache: Path) -> None:
    blocks = BlockCache(max_bytes=1000)
    blocks.read_blocks("other", [0], lambda _: [b"1" * 500])
    path = blocks.keep_whole("a", lambda: iter([b"2" * 1000]))
    assert path.read_bytes() == b"2" * 1000
    assert [file.name for file in cache.glob("blocks/other/*")] == ["lock"]
