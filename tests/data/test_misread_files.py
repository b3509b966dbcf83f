"""Files that could be misread in silence: each is read right, or refused with its name."""

from __future__ import annotations

import io
import json
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stepladder.core.errors import InputError
from stepladder.data.describe import describe_data
from stepladder.data.readers import remote
from stepladder.data.readers.batches import decode_image
from stepladder.data.readers.listing import list_names, relate
from stepladder.data.readers.open_data import open_data
from stepladder.data.shards.array_files import npz_table
from stepladder.data.shards.dataset import Shards


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


def test_an_arrow_stream_ends_with_its_mark_and_nothing_follows(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"x": [1, 2, 3, 4]})
    stream = io.BytesIO()
    with pa.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    whole = stream.getvalue()
    path = tmp_path / "a.arrow"
    path.write_bytes(whole)
    assert len(open_data(path)) == 4
    for data, message in (
        (whole[:-8], r"a\.arrow cannot be used: its message at byte 464 is damaged or missing"),
        (whole + whole, r"a\.arrow: 472 bytes follow the end of its stream"),
    ):
        path.write_bytes(data)
        with pytest.raises(InputError, match=message):
            open_data(path)


def make_png(kind: int, channels: int, bits: int) -> bytes:
    """Return a PNG of one black pixel."""
    header = struct.pack(">IIBBBBB", 1, 1, bits, kind, 0, 0, 0)
    pixels = zlib.compress(bytes(1 + channels * bits // 8))
    chunks = [(b"IHDR", header), (b"IDAT", pixels), (b"IEND", b"")]
    parts = [
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@pytest.mark.parametrize(("kind", "channels"), [(0, 1), (2, 3), (4, 2), (6, 4)])
def test_images_of_more_than_eight_bits_are_refused(kind: int, channels: int) -> None:
    pytest.importorskip("PIL")
    assert decode_image(make_png(kind, channels, 8)).tolist() == [[[0, 0, 0]]]
    with pytest.raises(ValueError, match="more than 8 bits"):
        decode_image(make_png(kind, channels, 16))


@pytest.mark.parametrize(
    ("maximum", "is_read"), [(100, True), (255, True), (256, False), (65535, False)]
)
def test_a_ppm_of_more_than_eight_bits_is_refused(maximum: int, is_read: bool) -> None:
    pytest.importorskip("PIL")
    data = f"P6 1 1 {maximum}\n".encode() + bytes(6)
    if is_read:
        assert decode_image(data).shape == (1, 1, 3)
        return
    with pytest.raises(ValueError, match="more than 8 bits"):
        decode_image(data)


def test_tokens_of_another_order_of_bytes_are_refused(tmp_path: Path) -> None:
    np.arange(40).astype(">u2").tofile(tmp_path / "a.bin")
    with pytest.raises(InputError, match=r"dtype='>u2'\. HINT: .*order of bytes"):
        open_data(tmp_path / "a.bin", block=8, dtype=">u2")


@pytest.mark.parametrize("first", [5, 128000])
def test_tokens_of_32_bits_are_not_taken_for_16(first: int, tmp_path: Path) -> None:
    tokens = np.arange(4000) % 500
    tokens[0] = first
    path = tmp_path / "a.bin"
    tokens.astype("<u4").tofile(path)
    with pytest.raises(InputError, match=r'a\.bin: each second token .* HINT: dtype="uint32"'):
        open_data(path, block=8)
    for dtype in ("uint32", "uint16"):
        assert len(open_data(path, block=8, dtype=dtype)) > 0


def test_tokens_of_64_bits_are_not_taken_for_32(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    tokens = np.arange(4000) * 701 % 50000
    tokens.tofile(path)
    for dtype in (None, "uint32", "<u4"):
        with pytest.raises(InputError, match=r'each second token of 32 .* HINT: dtype="int64"'):
            open_data(path, block=8, dtype=dtype)
    read = open_data(path, block=8, dtype="int64").read(np.array([1]))["tokens"]
    assert read.tolist() == [tokens[8:17].tolist()]
    assert len(open_data(path, block=8, dtype="int32")) == 999


@pytest.mark.parametrize("size", [2, 65, 50000])
def test_tokens_of_16_bits_are_read_as_such(size: int, tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, size, 4000)
    tokens.astype("<u2").tofile(tmp_path / "a.bin")
    assert open_data(tmp_path / "a.bin", block=8).read(np.array([0]))["tokens"].tolist() == [
        tokens[:9].tolist()
    ]


def write_parquet(path: Path, values: Any) -> None:
    """Write a column `t` of these values of Arrow, and a column `y` of numbers."""
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table({"t": values, "y": list(range(len(values)))}), path)


def test_tensors_in_parquet_are_refused_by_name_and_left_out_by_columns(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    path = tmp_path / "a.parquet"
    write_parquet(path, pa.FixedShapeTensorArray.from_numpy_ndarray(np.zeros((4, 2, 3))))
    with pytest.raises(InputError, match=r"a\.parquet: column t is extension.* HINT: columns="):
        open_data(path)
    assert open_data(path, columns=["y"]).read(np.array([2]))[0].tolist() == [2]


@pytest.mark.parametrize(
    ("unit", "zone", "values"),
    [
        ("us", "Europe/Berlin", [0, 253402300799000000]),
        ("ms", None, [0, 1700000000000000]),
        ("time", None, [1000, 1999]),
    ],
)
def test_times_that_python_cannot_hold_are_refused_by_name(
    unit: str, zone: str | None, values: list[int], tmp_path: Path
) -> None:
    pa = pytest.importorskip("pyarrow")
    path = tmp_path / "a.parquet"
    kind = pa.time64("ns") if unit == "time" else pa.timestamp(unit, zone)
    write_parquet(path, pa.array(values, kind))
    for options in ({}, {"decode": lambda row: row["y"]}):
        data = open_data(path, **options)
        data.read(np.array([0]))
        with pytest.raises(InputError, match=r"a\.parquet: record 1: column t: .*HINT: columns="):
            data.read(np.array([1, 0]))
        assert [damage.first for damage in data.find_damage()] == [1]


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64"])
def test_safetensors_without_a_sign_are_read(dtype: str, tmp_path: Path) -> None:
    numpy = pytest.importorskip("safetensors.numpy")
    values = np.array([0, 1, np.iinfo(dtype).max], dtype)
    numpy.save_file({"x": values}, tmp_path / "a.safetensors")
    assert open_data(tmp_path / "a.safetensors").read(np.arange(3))["x"].tolist() == values.tolist()


def test_safetensors_of_a_type_that_is_not_read_say_so(tmp_path: Path) -> None:
    header = json.dumps({"x": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}}).encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(InputError, match=r"a\.safetensors: x is of type F8_E4M3, .* HINT: tensors"):
        open_data(path)


def test_the_arrays_of_an_npz_file_are_described(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.arange(4.0), y=np.zeros((4, 2), np.float32))
    facts = describe_data(tmp_path / "a.npz")
    assert facts["rows"] == 4
    assert facts["columns"] == {"x": "float64", "y": "2 float32"}


def test_a_member_of_an_npz_file_that_is_no_array_is_not_left_out(tmp_path: Path) -> None:
    write_npz(tmp_path / "a.npz", np.arange(4.0))
    with zipfile.ZipFile(tmp_path / "a.npz", "a") as archive:
        archive.writestr("y.txt", "1")
    assert list(npz_table(tmp_path / "a.npz", ("x",)).columns) == ["x"]
    with pytest.raises(InputError, match=r"a\.npz: y\.txt is no array"):
        describe_data(tmp_path / "a.npz")


def test_arrays_of_several_names_in_a_folder_are_not_read_as_more_rows_of_one(
    tmp_path: Path,
) -> None:
    for name in ("part-1", "part-02", "y"):
        np.save(tmp_path / f"{name}.npy", np.arange(3.0))
    with pytest.raises(InputError, match=r"several names: part-1\.npy, y\.npy"):
        open_data(tmp_path)
    assert len(open_data(tmp_path / "part-*.npy")) == 6
    (tmp_path / "y.npy").unlink()
    assert len(open_data(tmp_path)) == 6


def test_an_image_without_bytes_is_named_in_plain_words() -> None:
    pytest.importorskip("PIL")
    with pytest.raises(ValueError, match=r"^no image in 0 bytes \(cannot identify image file\)$"):
        decode_image(b"")


def test_texts_in_hdf5_are_not_sent_to_the_command_that_refuses_them(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["s"] = ["a", "b"]
    with pytest.raises(
        InputError, match=r"a\.h5: s is of type object.* HINT: columns= without it"
    ) as caught:
        Shards(tmp_path / "a.h5")
    assert "data shard" not in caught.value.hint


HIDDEN_PATHS = ["._a.csv", ".x/a.csv", "b/.c.csv", "__MACOSX/a.csv"]


@pytest.mark.parametrize("pattern", ["", "**/*.csv"])
def test_hidden_files_are_left_out_behind_a_url_as_in_a_folder(
    pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [*HIDDEN_PATHS, "a.csv", "b/c.csv"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    url = "http://host/.folder/"
    monkeypatch.setattr(remote, "list_urls", lambda path: [f"{url}{name}" for name in names])
    assert relate(list_names(url + pattern), url) == ["a.csv", "b/c.csv"]
    assert relate(list_names(str(tmp_path)), str(tmp_path)) == ["a.csv", "b/c.csv"]


def test_an_answer_of_a_server_is_not_shown_in_an_error() -> None:
    class Refusal(Exception):
        status = 400
        message = "Bad status line:\n Expected HTTP/:\n\n b'secret,1'"

    with pytest.raises(InputError, match=r"x\.csv: HTTP 400 Bad status line\. HINT: ") as error:
        remote._raise_final("http://h/x.csv", Refusal(Refusal.message))
    assert "secret" not in str(error.value)


def write_ages(path: Path, *values: str) -> None:
    """Write a CSV file with a column of these ages, and one of numbers."""
    path.write_text("age,y\n" + "".join(f"{value},{row}\n" for row, value in enumerate(values)))


@pytest.mark.parametrize("word", ["n/a", "-", "unknown", "", "X"])
def test_a_column_that_is_text_because_of_a_word_is_named(
    word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.csv"
    write_ages(path, "20", word, "31.5", word, "7")
    for _ in range(2):
        data = open_data(path)
    assert data.columns == {"age": "str", "y": "int64"}
    line = capsys.readouterr().err
    assert line.startswith(f"stepladder: {path}: column age is read as text: most of its values")
    assert (
        f"but record 1 has {word!r}. HINT: correct the file; or open_data(PATH, columns=[NAMES]) "
        in line
    )
    assert line.count("\n") == 1


@pytest.mark.parametrize(
    "values",
    [("12", "12a", "14", "16"), ("00123", "45", "46"), ("1_000", "2", "3"), ("A", "7", "B")],
)
def test_a_column_that_is_text_by_its_values_is_not_named(
    values: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_ages(tmp_path / "a.csv", *values)
    assert open_data(tmp_path / "a.csv").columns["age"] == "str"
    assert not capsys.readouterr().err


def test_the_record_of_a_word_is_counted_with_damaged_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_ages(tmp_path / "a.csv", "20,0", "30", "n/a", "31")
    open_data(tmp_path / "a.csv")
    assert "record 2 has 'n/a'" in capsys.readouterr().err


def test_a_word_is_named_once_and_only_of_the_columns_that_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_ages(tmp_path / "a.csv", "20", "n/a", "30")
    open_data(tmp_path / "a.csv", columns=["y"])
    open_data(tmp_path / "a.csv", decode=dict)
    monkeypatch.setenv("RANK", "1")
    open_data(tmp_path / "a.csv")
    assert not capsys.readouterr().err
    monkeypatch.setenv("RANK", "0")
    open_data(tmp_path / "a.csv")
    assert "record 1 has 'n/a'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("values", "is_named"),
    [
        (["0.5", "1700000001"], True),
        (["0.5", "1700000002.5"], True),
        (["NaN", "123456789"], True),
        (["0.5", "1700000000123456789"], True),
        (["0.5", "16777216"], False),
        (["0.5", "6.02e23"], False),
        (["1", "1700000001"], False),
    ],
)
@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_a_time_or_an_identifier_that_float32_rounds_is_named(
    values: list[str],
    is_named: bool,
    suffix: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / f"a.{suffix}"
    lines = ["t", *values] if suffix == "csv" else [f'{{"t": {value}}}' for value in values]
    path.write_text("\n".join(lines))
    open_data(path, columns=["t"])
    line = capsys.readouterr().err
    assert f"{path}: column t is read as float32, which rounds " in line or not is_named
    assert line.count("in record 1. HINT: decode=FUNCTION") == is_named
    open_data(path, decode=dict)
    assert not capsys.readouterr().err


def test_files_may_differ_in_whether_they_say_that_no_value_is_empty(tmp_path: Path) -> None:
    for name, is_nullable in (("a", True), ("b", False)):
        schema = pa.schema([pa.field("x", pa.int64(), nullable=is_nullable)])
        pq.write_table(pa.table({"x": [1]}, schema=schema), tmp_path / f"{name}.parquet")
    assert open_data(tmp_path).read(np.arange(2))["x"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (b"a,b\nx,y\na,b\n", "record 1: it is the begin of another file"),
        (b"a,b\nx,y\n\xef\xbb\xbfa,b\n", "record 1: it is the begin of another file"),
        (b"a\nx\n" + bytes(9), "record 1: it has bytes that are no text"),
        (b"a\nx\n\x1a", "record 1: it has bytes that are no text"),
    ],
    ids=["joined", "joined with a mark", "never written", "end mark of DOS"],
)
def test_a_record_of_csv_that_is_none_is_refused(
    tmp_path: Path, lines: bytes, problem: str
) -> None:
    (tmp_path / "a.csv").write_bytes(lines)
    with pytest.raises(InputError, match=problem):
        open_data(tmp_path / "a.csv").read(np.arange(2))


def test_a_byte_order_mark_is_no_part_of_the_first_value(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbf1,x\n2,y\n")
    data = open_data(tmp_path / "a.csv", header=["number", "text"])
    assert data.read(np.arange(2))["number"].tolist() == [1, 2]


def test_what_follows_an_array_in_a_tar_file_is_not_left_out(tmp_path: Path) -> None:
    array = save_npy(np.ones((2, 3)))
    write_tar(tmp_path / "a.tar", {"0.npy": array, "1.npy": array + array})
    with pytest.raises(
        InputError, match=r"record 1: float64 \[2, 3\] has 176 bytes, and it has 352"
    ):
        open_data(tmp_path / "a.tar").read(np.arange(2))


def test_an_offset_of_arrow_that_leads_out_of_its_memory_is_refused(tmp_path: Path) -> None:
    table = pa.table({"text": ["a" * 77, "b"]})
    with pa.ipc.new_stream(tmp_path / "a.arrow", table.schema) as stream:
        stream.write_table(table)
    good, bad = (np.array([0, 77, end], np.int32).tobytes() for end in (78, 1 << 30))
    whole = (tmp_path / "a.arrow").read_bytes()
    assert whole.count(good) == 1
    (tmp_path / "a.arrow").write_bytes(whole.replace(good, bad))
    with pytest.raises(InputError, match=r"records 0 to 1: .* HINT: correct the file"):
        open_data(tmp_path / "a.arrow").read(np.arange(2))


@pytest.mark.parametrize("chunks", [(2,), None], ids=["chunks", "one piece"])
def test_rows_that_a_script_has_not_written_are_refused(
    tmp_path: Path, chunks: tuple[int] | None
) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        x = file.create_dataset("x", (6,), np.float32, chunks=chunks)
        if chunks:
            x[:4] = 1
    with pytest.raises(InputError, match="rows of x were never written"):
        Shards(tmp_path / "a.h5")


@pytest.mark.parametrize(
    ("rows", "is_refused"), [(5000, True), (3, False), (0, False)], ids=["large", "small", "empty"]
)
def test_a_copy_of_a_file_is_not_read_as_more_samples(
    tmp_path: Path, rows: int, is_refused: bool
) -> None:
    name = "x" * (10 if rows == 3 else 5000)  # so that files without rows are large
    for file in ("0.parquet", "0 (1).parquet"):
        pq.write_table(pa.table({name: np.arange(rows)}), tmp_path / file)
        (tmp_path / file).with_suffix(".csv").write_text(f"{name}\n" + "1\n" * rows)
    pq.write_table(pa.table({name: np.arange(1)}), tmp_path / "1.parquet")
    (tmp_path / "1.csv").write_text(f"{name}\n1\n")
    for pattern in ("*.parquet", "*.csv"):
        if is_refused:
            with pytest.raises(
                InputError, match=r"0.* is a copy of .*0 \(1\).*would be read twice"
            ):
                open_data(tmp_path / pattern)
        else:
            assert len(open_data(tmp_path / pattern)) == 2 * rows + 1


def write_parquet_rows(path: Path, values: Any) -> None:
    pq.write_table(pa.table({"x": values}), path)


def write_feather(path: Path, values: Any) -> None:
    table = pa.table({"x": values})
    with pa.ipc.new_file(path, table.schema) as out:
        out.write_table(table)


def write_hdf5(path: Path, values: Any, version: str = "earliest") -> None:
    with h5py.File(path, "w", libver=version) as file:
        file["x"] = values


def write_npz(path: Path, values: Any) -> None:
    with path.open("wb") as file:
        np.savez(file, x=values)


@pytest.mark.parametrize(
    ("suffix", "write", "read", "message"),
    [
        ("parquet", write_parquet_rows, open_data, "was joined of several files"),
        ("feather", write_feather, open_data, "bytes follow the end of its stream"),
        ("h5", write_hdf5, Shards, "several files were joined into it"),
        ("h5", partial(write_hdf5, version="latest"), Shards, "several files were joined into it"),
        ("npz", write_npz, describe_data, "another file lies before its arrays"),
    ],
    ids=["Parquet", "Arrow", "HDF5", "HDF5 of a later version", "NPZ"],
)
def test_files_that_were_joined_into_one_are_refused(
    suffix: str,
    write: Callable[[Path, Any], None],
    read: Callable[[Path], Any],
    message: str,
    tmp_path: Path,
) -> None:
    names = [tmp_path / "folder" / f"{number}.{suffix}" for number in range(2)]
    names[0].parent.mkdir()
    for number, name in enumerate(names):
        write(name, np.arange(500 * number, 500 * number + 100))
        read(name)
    path = tmp_path / f"joined.{suffix}"
    path.write_bytes(b"".join(map(Path.read_bytes, names)))
    with pytest.raises(InputError, match=f"joined.{suffix}.*{message}"):
        read(path)


@pytest.mark.parametrize(
    ("numbers", "pattern", "missing"),
    [
        ((0, 1, 3), "", "00002-of-00004"),
        ((1, 2, 4), "", "00003-of-00004"),
        ((0, 1, 2), "train-*.parquet", "00003-of-00004"),
        ((0, 1, 2), "train-0000[012]*.parquet", ""),
        ((0, 1, 2, 3), "", ""),
        ((1, 2, 3, 4), "", ""),
    ],
)
def test_a_missing_part_of_files_that_are_numbered_is_named(
    numbers: tuple[int, ...], pattern: str, missing: str, tmp_path: Path
) -> None:
    for number in numbers:
        name = f"train-{number:05}-of-00004-{number}ab.parquet"
        pq.write_table(pa.table({"x": [number]}), tmp_path / name)
    with pytest.raises(InputError, match=missing) if missing else nullcontext():
        assert len(open_data(f"{tmp_path}/{pattern}")) == len(numbers)
