"""Each format gives the rows that were written, names what is damaged, and keeps the contract of a
source.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from data_files import CHUNK, FILES, LIBRARIES, PER_FILE, ROWS, WRITERS, make_rows, make_table
from nginx import serve
from processes import run
from stepladder import InputError, open_data
from stepladder.data.readers import json_values, lines
from stepladder.data.readers.file_rows import OpenedSource
from stepladder.testing import check_source

INDICES = np.array([ROWS - 1, 3, 81, 80, 3])
TAR_COLUMNS = ("id.cls", "x.npy", "y.cls", "text.txt")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "stepladder"


def write(folder: Path, name: str) -> Path:
    folder.mkdir()
    WRITERS[name](folder)
    return folder


def expect_rows(source: OpenedSource) -> None:
    """The source has the rows of data_files, in every column that its format has."""
    assert len(source) == ROWS
    batch = source.read(INDICES)
    rows = [make_rows()[index] for index in INDICES]
    names = {name.partition(".")[0]: name for name in batch}
    for name in names.keys() & {"id", "y"}:
        assert batch[names[name]].tolist() == [row[name] for row in rows]
    for name in names.keys() & {"x", "array"}:
        assert np.array_equal(batch[names[name]], np.stack([row["x"] for row in rows]))
    if "text" in names:
        assert batch[names["text"]] == [row["text"] for row in rows]
    assert names.keys() & {"id", "array"}


@pytest.mark.parametrize("name", WRITERS)
def test_rows_are_those_that_were_written(name: str, tmp_path: Path) -> None:
    source = open_data(write(tmp_path / "data", name), chunk_rows=CHUNK)
    assert source.format == name
    expect_rows(source)
    edges = source.chunk_edges
    assert edges is not None and list(edges) == list(range(0, ROWS + 1, CHUNK))
    assert list(source.find_damage()) == []
    numbers = [name for name in source.columns if name.partition(".")[0] in ("id", "x", "array")]
    check_source(open_data(tmp_path / "data", columns=numbers))


@pytest.mark.parametrize(("name", "column"), [("mds", "x"), ("webdataset", "x.npy")])
def test_a_column_has_the_same_type_with_and_without_decode(
    name: str, column: str, tmp_path: Path
) -> None:
    folder = write(tmp_path / "data", name)
    assert open_data(folder).columns[column] == "4 float32"
    assert open_data(folder, decode=lambda sample: 0).columns[column] == "4 float32"


def test_a_list_that_decode_gets_is_a_list(tmp_path: Path) -> None:
    folder = write(tmp_path / "data", "jsonl")
    columns = open_data(folder, decode=lambda sample: 0).columns
    assert columns == {"id": "int", "x": "list", "y": "int", "text": "str"}


def test_over_http_they_are_the_same(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp", reason="needs aiohttp: pip install 'stepladder[http]'")
    root = tmp_path / "root"
    root.mkdir()
    for name in WRITERS:
        write(root / name, name)
    write_images(root / "images")
    with serve(root, tmp_path / "nginx") as server:
        for name in WRITERS:
            source = open_data(f"{server.url}{name}/")
            assert source.format == name
            expect_rows(source)
        expect_rows(open_data(f"{server.url}mds/index.json"))
        images, labels = open_data(f"{server.url}images/", columns=("image", "label")).read(
            np.array([2, 0, 2])
        )
        assert (images[:, 0, 0, 0].tolist(), labels.tolist()) == ([2, 0, 2], [1, 0, 1])
        assert set(server.ranges().values()) == {1}, "each part is sent once"


def write_arrow_file(path: Path, table: pa.Table) -> None:
    """Write the kind of file that begins with its name, in batches of CHUNK compressed rows."""
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with (
        pa.OSFile(str(path), "wb") as file,
        pa.ipc.new_file(file, table.schema, options=options) as out,
    ):
        for batch in table.to_batches(CHUNK):
            out.write_batch(batch)


@pytest.mark.slow
def test_arrow_over_http_is_read_batch_by_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("aiohttp", reason="needs aiohttp: pip install 'stepladder[http]'")
    monkeypatch.setattr("stepladder.data.readers.remote.BLOCK_BYTES", 4096)
    monkeypatch.setattr("stepladder.data.readers.block_cache.BLOCK_BYTES", 4096)
    root = tmp_path / "root"
    root.mkdir()
    table = make_table(make_rows())
    write_arrow_file(root / "a.arrow", table)
    labels = table.append_column("name", table["text"].dictionary_encode())
    write_arrow_file(root / "labels.arrow", labels)
    data = (root / "a.arrow").read_bytes()
    (root / "cut.arrow").write_bytes(data[: len(data) // 2])
    (root / "text.arrow").write_bytes(b"no arrow at all")
    with serve(root, tmp_path / "nginx") as server:
        source = open_data(f"{server.url}a.arrow")
        expect_rows(source)
        edges = source.chunk_edges
        assert edges is not None and list(edges) == list(range(0, ROWS + 1, CHUNK))
        check_source(open_data(f"{server.url}a.arrow", columns=("id", "x", "tags")))
        assert list(source.find_damage()) == []
        assert set(server.ranges().values()) == {1}, "each part is sent once"
        for name, message in (
            ("labels", "columns with a dictionary"),
            ("cut", r"cut.arrow cannot be used: its message at byte \d"),
            ("text", "text.arrow cannot be used"),
        ):
            with pytest.raises(InputError, match=message):
                open_data(f"{server.url}{name}.arrow")


@pytest.mark.slow
def test_array_records_over_http_are_copied_into_the_cache(tmp_path: Path, cache: Path) -> None:
    pytest.importorskip("aiohttp", reason="needs aiohttp: pip install 'stepladder[http]'")
    (tmp_path / "root").mkdir()
    write_array_records(tmp_path / "root")
    size = (tmp_path / "root/part-0.arrayrecord").stat().st_size
    with serve(tmp_path / "root", tmp_path / "nginx") as server:
        for _ in range(2):
            source = open_data(server.url, decode=lambda record: int(record["record"]))
            assert source.read(np.array([239, 0, 80])).tolist() == [239, 0, 80]
            check_source(source)
        assert len(server.ranges()) == 3
        assert set(server.ranges().values()) == {1}, "each part is sent once"
        shutil.rmtree(cache / "blocks")
        bounded = open_data(server.url, cache_bytes=2 * size)
        assert bounded.read(np.array([239, 0, 80]))["record"] == [b"239", b"0", b"80"]
        assert len(list(cache.glob("blocks/*/0-whole"))) < 3
        with pytest.raises(InputError, match="its library reads a copy of the whole file"):
            open_data(server.url, cache_bytes=size - 1)


@pytest.mark.parametrize("library", LIBRARIES)
def test_files_of_the_formats_own_library_are_read(library: str, tmp_path: Path) -> None:
    name, write_files = LIBRARIES[library]
    write_files(tmp_path)
    source = open_data(tmp_path)
    assert source.format == name
    if name == "arrow":  # datasets writes lists of any length, as float64
        batch = source.read(INDICES)
        assert batch["id"].tolist() == INDICES.tolist()
        assert batch["x"].offsets.tolist() == [0, 4, 8, 12, 16, 20]
    else:
        expect_rows(source)
    assert list(source.find_damage()) == []


def test_array_records_are_bytes_for_decode(tmp_path: Path) -> None:
    write_array_records(tmp_path)
    source = open_data(tmp_path, decode=lambda record: int(record["record"]))
    assert source.read(np.array([239, 0, 80])).tolist() == [239, 0, 80]
    assert list(source.find_damage()) == []
    check_source(source)


def cut(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: len(data) - 700])


def write_array_records(folder: Path) -> None:
    module = pytest.importorskip("array_record.python.array_record_module")
    for number in range(FILES):
        path = str(folder / f"part-{number}.arrayrecord")
        out = module.ArrayRecordWriter(path, "group_size:1,uncompressed")
        for index in range(number * PER_FILE, (number + 1) * PER_FILE):
            out.write(str(index).encode())
        out.close()


def write_images(folder: Path) -> None:
    for number, name in enumerate(("cats/1", "cats/2", "dogs/1")):
        path = folder / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 3), (number, 0, 0)).save(path)


def write_tokens(folder: Path) -> None:
    """Files with the header of llm.c, and a token more than records of `data check`."""
    header = np.zeros(256, np.int32)
    header[:3] = (20240520, 1, 1001)
    for number in range(FILES):
        tokens = np.arange(1001, dtype=np.uint16)
        (folder / f"part-{number}.bin").write_bytes(header.tobytes() + tokens.tobytes())


def flip(pattern: bytes, into: bytes) -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        data = file.read_bytes()
        assert data.count(pattern) == 1
        file.write_bytes(data.replace(pattern, into))

    return damage


DAMAGES = pytest.mark.parametrize(
    ("name", "file", "damage", "place"),
    [
        ("arrow", "data-1.arrow", cut, "data-1.arrow"),
        (
            "webdataset",
            "part-1.tar",
            flip(b"000088.y.cls", b"00008?.y.cls"),
            "part-1.tar: record 8: ",
        ),
        ("mds", "shard.00001.mds", cut, "shard.00001.mds"),
        ("jsonl", "part-1.jsonl", flip(b'"id": 85,', b'"id": 85'), "part-1.jsonl: record 5: "),
        ("jsonl", "part-1.jsonl", flip(b'"id": 85,', b'"id": "",'), "part-1.jsonl: record 5: "),
        ("csv", "part-1.csv", flip(b"\n85,", b"\n8x,"), "part-1.csv: record 5: "),
        ("csv", "part-1.csv", flip(b"\n85,", b"\n85,,"), "part-1.csv: record 5: "),
        ("parquet", "part-1.parquet", cut, "part-1.parquet"),
        ("npy", "part-1.npy", cut, "part-1.npy: records 36 to 79: "),
        ("safetensors", "part-1.safetensors", cut, "part-1.safetensors: record"),
    ],
)


@DAMAGES
def test_damage_is_named_by_file_and_record(
    name: str, file: str, damage: Callable[[Path], None], place: str, tmp_path: Path
) -> None:
    folder = write(tmp_path / "data", name)
    damage(folder / file)
    try:
        source = open_data(folder)
    except InputError as error:
        found = [error.problem]
    else:
        found = [str(damage) for damage in source.find_damage()]
        with pytest.raises(InputError, match=file):
            source.read(np.arange(PER_FILE, 2 * PER_FILE))
    assert len(found) == 1
    assert place in found[0]


@pytest.mark.slow
@DAMAGES
def test_check_ends_with_one_line_and_exit_code_2(
    name: str, file: str, damage: Callable[[Path], None], place: str, tmp_path: Path
) -> None:
    folder = write(tmp_path / "data", name)
    good = run("data", "check", "data", cwd=tmp_path)
    assert (good.returncode, good.stdout) == (
        0,
        f"data: {ROWS} records of {name}, all can be read\n",
    )
    damage(folder / file)
    done = run("data", "check", "data", cwd=tmp_path)
    assert done.returncode == 2
    assert place in (done.stdout + done.stderr).splitlines()[0]
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("write_files", "kind", "count", "file", "damage", "place"),
    [
        (write_tokens, "tokens", 3000, "part-1.bin", cut, "part-1.bin: records 650 to 999: "),
        (write_images, "images", 3, "cats/2.png", cut, "cats/2.png: record 1: "),
        (
            write_array_records,
            "array_record",
            ROWS,
            "part-1.arrayrecord",
            flip(b"85", b"95"),
            "part-1.arrayrecord: record 5: ",
        ),
    ],
)
def test_check_names_damage_of_what_has_no_columns(
    write_files: Callable[[Path], None],
    kind: str,
    count: int,
    file: str,
    damage: Callable[[Path], None],
    place: str,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    write_files(folder)
    good = run("data", "check", "data", cwd=tmp_path)
    assert (good.returncode, good.stdout) == (
        0,
        f"data: {count:,} records of {kind}, all can be read\n",
    )
    damage(folder / file)
    done = run("data", "check", "data", cwd=tmp_path)
    assert done.returncode == 2
    assert f"data/{place}" in (done.stdout + done.stderr).splitlines()[0]
    assert done.stderr.count("\n") == 1


def test_an_index_is_made_once_and_beside_a_file_only_when_asked(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "data", "jsonl")
    monkeypatch.setattr(
        lines, "SCANNED_BYTES", 1000
    )  # lines lie across the ends of what is scanned
    expect_rows(open_data(folder))
    assert len(list(folder.iterdir())) == 3
    kept = [file for file in (cache / "indexes").iterdir() if file.name != "lock"]
    assert len(kept) == 3
    for file in kept:
        file.unlink()
    expect_rows(open_data(folder, index_beside=True))
    assert len(list(folder.iterdir())) == 6
    monkeypatch.setattr(lines, "find_lines", None)
    expect_rows(open_data(folder))


def test_an_index_beside_a_file_that_was_edited_is_made_anew(tmp_path: Path) -> None:
    file = tmp_path / "data/a.txt"
    file.parent.mkdir()
    lines = [f'{{"x": {number}}}\n' for number in range(2000)]
    file.write_text("".join(lines))
    before = open_data(file, format="jsonl", index_beside=True)
    index = tmp_path / "data/a.txt.stepladder-index"
    first_bytes = index.read_bytes()
    lines[1000] = '{"x":\n}    \n'  # as long as before, in two lines
    file.write_text("".join(lines))
    assert file.stat().st_size == before.num_bytes
    written = file.stat().st_mtime_ns
    os.utime(index, ns=(written, written - 1))
    edited = open_data(tmp_path / "data", format="jsonl", index_beside=True)
    assert index.read_bytes() != first_bytes
    assert edited.num_files == 1, "the index is no data"
    assert edited.read(np.array([2, 1999]))["x"].tolist() == [2, 1998]
    assert [damage.first for damage in edited.find_damage()] == [1000, 1001]


def test_tokens_are_blocks_that_share_their_ends(tmp_path: Path) -> None:
    tokens = np.arange(1001, dtype=np.uint16)
    header = np.zeros(256, np.int32)
    header[:3] = (20240520, 1, len(tokens))
    files = {"nano.bin": tokens.tobytes(), "modded.bin": header.tobytes() + tokens.tobytes()}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    np.save(tmp_path / "tokens.npy", tokens)
    for name in (*files, "tokens.npy"):
        source = open_data(tmp_path / name, block=50)
        assert len(source) == 20
        batch = source.read(np.array([19, 0]))["tokens"]
        assert batch[:, 0].tolist() == [950, 0]
        assert batch[:, -1].tolist() == [1000, 50]
        check_source(source)
    with pytest.raises(InputError, match="block is None"):
        open_data(tmp_path / "nano.bin")


def test_folders_of_images_are_classes(tmp_path: Path) -> None:
    write_images(tmp_path)
    source = open_data(tmp_path, columns=("image", "label"))
    images, labels = source.read(np.array([2, 0]))
    assert (images.shape, labels.tolist()) == ((2, 3, 4, 3), [1, 0])
    assert images[0, 0, 0].tolist() == [2, 0, 0]
    check_source(source)
    (tmp_path / "cats/2.png").write_bytes(b"no image")
    (damage,) = source.find_damage()
    assert str(damage).startswith(f"{tmp_path}/cats/2.png: record 1: ")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ('{"x": 1.5}', "x has another type than in the first records"),
        ("[]", "it is no JSON object"),
        ('{"y": 1}', "has no x"),
    ],
)
def test_a_later_record_of_another_kind_is_one_line(
    record: str, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"x": 1}\n{"x": 2}\n' * 128 + record)
    source = open_data(file)
    assert source.read(np.array([1, 0]))["x"].tolist() == [2, 1]
    with pytest.raises(InputError, match=message):
        source.read(np.array([0, 256]))


def read_numbers(file: Path) -> list[Any]:
    batch = open_data(file).read(np.arange(3))
    return [batch["x"].tolist(), batch["y"].tolist(), batch["z"]]


def test_a_faster_library_for_json_changes_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lists = "[0.1, 2]", "[NaN, -Infinity]", "[9007199254740993, -0.0]"
    texts = [f'{{"x": {x}, "y": {y}, "z": "{x}"}}' for x, y in zip(lists, (1, 2.5, 7), strict=True)]
    (tmp_path / "a.jsonl").write_text("\n".join(texts))
    rows = "1,.5,a", "-0,+1,b", '" 3",inf,"c, d"'
    (tmp_path / "a.csv").write_text("\n".join(["x,y,z", *rows]))
    for name in ("a.jsonl", "a.csv"):
        fast = read_numbers(tmp_path / name)
        with monkeypatch.context() as patch:
            patch.setattr(json_values, "decode_json", json_values.parse_carefully)
            assert repr(read_numbers(tmp_path / name)) == repr(fast)


def test_a_sample_of_json_does_not_depend_on_its_batch(tmp_path: Path) -> None:
    lists = "[0.5]", "[9007199791611905]"  # which lies between two float32
    (tmp_path / "a.jsonl").write_text("\n".join(f'{{"x": {x}}}' for x in lists))
    source = open_data(tmp_path / "a.jsonl")
    alone = source.read(np.array([1]))["x"][0]
    assert source.read(np.array([0, 1]))["x"][1] == alone


def test_types_are_those_of_the_first_file_that_has_records(tmp_path: Path) -> None:
    for name, head in (("jsonl", ""), ("csv", "x\n")):
        (tmp_path / f"0.{name}").write_text(head)
    (tmp_path / "1.jsonl").write_text('{"x": [1, 2]}\n')
    (tmp_path / "1.csv").write_text("x\n1.5\n")
    assert open_data(tmp_path / "*.jsonl").read(np.array([0]))["x"].tolist() == [[1, 2]]
    assert open_data(tmp_path / "*.csv").read(np.array([0]))["x"].tolist() == [1.5]


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_a_number_of_more_than_64_bits_is_not_rounded(name: str, tmp_path: Path) -> None:
    rows = {"a.jsonl": ['{"x": 1}', '{"x": 9223372036854775808}'], "a.csv": ["x", "1", str(2**63)]}
    (tmp_path / name).write_text("\n".join(rows[name]))
    source = open_data(tmp_path / name)
    with pytest.raises(InputError, match=f"{name}: record 1: x.* too large for int64"):
        source.read(np.arange(2))


def test_decode_gets_json_as_it_is_and_csv_as_texts(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n{"x": [2, 3]}\n')
    (tmp_path / "a.csv").write_text("x\n1\n2\n")
    values = []

    def decode(sample: dict[str, Any]) -> int:
        values.append(sample["x"])
        return 0

    for name in ("a.jsonl", "a.csv"):
        open_data(tmp_path / name, decode=decode).read(np.arange(2))
    assert values == [1, [2, 3], "1", "2"]


def open_pickles(folder: Path) -> Any:
    WRITERS["mds"](folder)
    index = folder / "index.json"
    index.write_text(index.read_text().replace('"str"', '"pkl"'))
    return open_data(folder)


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="pickles run code"):
        open_pickles(tmp_path)
