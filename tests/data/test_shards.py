"""Opening and reading shards: with an index, without one, and when they are not what they should
be.
"""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from stepladder import InputError, Loader, Shards, write_shards
from stepladder.cli.data import shard_lines
from stepladder.data.describe import describe_shards
from stepladder.data.shards.reader import ShardReader

ROWS = 100
IMAGES = np.random.default_rng(0).integers(0, 256, (ROWS, 4, 3), dtype=np.uint8)


def samples() -> Any:
    """Compounds: an image, an id, a rating, a list."""
    for i in range(ROWS):
        yield {
            "image": IMAGES[i],
            "id": 7 * i,
            "rating": i / 4,
            "tags": list(range(i % 4)),
            "seen": i % 2 == 0,
        }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_shards(samples(), tmp_path / "s", chunk_rows=8, rows_per_shard=40).parent


def plain(path: Path, **arrays: Any) -> Path:
    """What a script writes with h5py: arrays, each (data, keywords of create_dataset) or data."""
    path.parent.mkdir(exist_ok=True, parents=True)
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            data, how = array if isinstance(array, tuple) else (array, {})
            file.create_dataset(name, data=data, **how)
    return path


def read(path: Path, indices: Any, **more: Any) -> dict[str, Any]:
    with ShardReader(Shards(path, **more)) as reader:
        return reader.read(np.asarray(indices))


@pytest.mark.parametrize("compress", [False, True])
def test_compounds_come_back(tmp_path: Path, compress: bool) -> None:
    write_shards(samples(), tmp_path / "s", chunk_rows=8, rows_per_shard=40, compress=compress)
    shards = Shards(tmp_path / "s")
    assert (len(shards), len(shards.shards), sum(s.num_chunks for s in shards.shards)) == (
        ROWS,
        3,
        13,
    )
    indices = np.random.default_rng(1).permutation(ROWS)
    batch = read(tmp_path / "s", indices)
    np.testing.assert_array_equal(batch["image"], IMAGES[indices])
    np.testing.assert_array_equal(batch["id"], 7 * indices)
    np.testing.assert_array_equal(batch["rating"], (indices / 4).astype(np.float32))
    np.testing.assert_array_equal(batch["seen"], indices % 2 == 0)
    values, offsets = batch["tags"]
    assert [values[a:b].tolist() for a, b in pairwise(offsets)] == [
        list(range(i % 4)) for i in indices
    ]
    types = {name: str(column) for name, column in shards.columns.items()}
    assert types == {
        "image": "4 x 3 uint8",
        "id": "int64",
        "rating": "float32",
        "tags": "lists of int64",
        "seen": "bool",
    }


def test_any_h5py_reads_our_shards(folder: Path) -> None:
    with h5py.File(folder / "shard-00000.h5") as file:
        np.testing.assert_array_equal(file["image"], IMAGES[:40])
        assert file["image"].chunks == (8, 4, 3)


@pytest.mark.parametrize("slots", [1, 3, 100])
def test_a_pool_smaller_than_a_batch_reads_the_same(folder: Path, slots: int) -> None:
    shards = Shards(folder)
    shards.__dict__["chunks"] = type(shards.chunks)(shards.chunks.shards, slots)
    order = np.random.default_rng(2).integers(0, ROWS, (5, 30))
    with ShardReader(shards) as reader:
        for indices in order:
            batch = reader.read(indices)
            np.testing.assert_array_equal(batch["image"], IMAGES[indices])
            assert np.diff(batch["tags"].offsets).tolist() == (indices % 4).tolist()
        assert (reader.chunk_of >= 0).sum() <= slots


LAYOUTS = {
    "chunked": {"chunks": (10, 4, 3)},
    "one row a chunk": {"chunks": (1, 4, 3)},
    "contiguous": {},
    "h5py's own chunks": {"chunks": True},
    "chunks across rows": {"chunks": (16, 2, 3)},
    "gzip": {"chunks": (10, 4, 3), "compression": "gzip"},
    "growing": {"maxshape": (None, 4, 3)},
}


@pytest.mark.parametrize("how", LAYOUTS.values(), ids=LAYOUTS)
def test_files_of_a_plain_script_work(tmp_path: Path, how: dict[str, Any]) -> None:
    labels = np.arange(ROWS).astype(">i4")
    path = plain(tmp_path / "d" / "all.hdf5", images=(IMAGES, how), labels=labels)
    indices = np.random.default_rng(3).permutation(ROWS)
    for where in (path, path.parent):
        batch = read(where, indices, columns=("images", "labels"))
        np.testing.assert_array_equal(batch["images"], IMAGES[indices])
        np.testing.assert_array_equal(batch["labels"], labels[indices])


def test_several_plain_files_are_one_data_set(tmp_path: Path) -> None:
    plain(tmp_path / "a.h5", x=(np.arange(10.0), {"chunks": (4,)}))
    plain(tmp_path / "b.h5", x=np.arange(10.0, 17.0))
    assert read(tmp_path, np.arange(17))["x"].tolist() == list(range(17))


def refused(path: Path, *parts: str, indices: Any = None, **more: Any) -> None:
    with pytest.raises(InputError) as caught:
        read(path, np.arange(ROWS) if indices is None else indices, **more)
    for part in parts:
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_flipped_byte_is_named_with_its_chunk(folder: Path) -> None:
    shard = folder / "shard-00001.h5"
    with h5py.File(shard) as file:
        offset = file["image"].id.get_chunk_info(2).byte_offset
    data = bytearray(shard.read_bytes())
    data[offset + 5] ^= 1
    shard.write_bytes(data)
    named = (
        "shard-00001.h5 is damaged in chunk 2 of 5 (rows 16 to 23), column image",
        "checksum",
        "data shard",
    )
    refused(folder, *named)
    read(folder, np.arange(56))  # the chunks before it are good
    with pytest.raises(InputError, match="chunk 2 of 5"):
        describe_shards(folder, check=True)


@pytest.mark.parametrize("compress", [False, True])
def test_no_flipped_byte_goes_unseen(tmp_path: Path, compress: bool) -> None:
    """In whatever part of the file: checksums of chunks, or the file's."""
    short = ({"x": np.arange(50, dtype=np.int16) + i, "l": [i] * (i % 3)} for i in range(30))
    folder = write_shards(short, tmp_path / "s", chunk_rows=8, compress=compress).parent
    shard = folder / "shard-00000.h5"
    good = shard.read_bytes()
    for offset in np.random.default_rng(4).integers(0, len(good), 60).tolist():
        bad = bytearray(good)
        bad[offset] ^= 0x40
        shard.write_bytes(bad)
        with pytest.raises(InputError, match=r"shard-00000.h5"):
            describe_shards(folder, check=True)


def test_a_missing_shard(folder: Path) -> None:
    (folder / "shard-00002.h5").unlink()
    refused(folder, "index.json lists shard-00002.h5, which is missing")


def test_a_shard_that_was_cut(folder: Path) -> None:
    os.truncate(folder / "shard-00000.h5", 1000)
    refused(folder, "shard-00000.h5 has 1,000 bytes", "in index.json")


def change(folder: Path, path: str, value: Any) -> None:
    index = json.loads((folder / "index.json").read_text())
    *outer, last = path.split("/")
    inner = index
    for part in outer:
        inner = inner[int(part)] if part.isdigit() else inner[part]
    inner[last] = value
    (folder / "index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    "path, value, message",
    [
        ("rows", 99, "index.json disagrees with itself: 99 rows in all, 100 in its shards"),
        ("shards/0/rows", 39, "shards"),
        ("chunk_rows", 4, "has 10 chunks and another number of checksums"),
        ("columns/id/dtype", "int32", "has 40 rows of int64 in id, index.json says 40 of int32"),
        (
            "columns/image/shape",
            [3, 4],
            "has 40 rows of 4 x 3 uint8 in image, index.json says 40 of 3 x 4 uint8",
        ),
        ("shards", 5, "cannot use"),
        ("columns", None, "cannot use"),
    ],
)
def test_an_index_that_disagrees(folder: Path, path: str, value: Any, message: str) -> None:
    change(folder, path, value)
    refused(folder, message)


def test_an_index_that_is_torn(folder: Path) -> None:
    text = (folder / "index.json").read_text()
    (folder / "index.json").write_text(text[:100])
    refused(folder, "cannot use", "index.json (it is not JSON")


def test_shards_that_are_not_finished_are_not_taken_for_plain_files(folder: Path) -> None:
    (folder / "index.json").rename(folder / "index.json.part")
    refused(folder, "is not finished")


def test_bad_plain_files(tmp_path: Path) -> None:
    refused(tmp_path / "none", "there is no")
    (tmp_path / "e").mkdir()
    refused(tmp_path / "e", "holds no shards")
    plain(tmp_path / "a" / "a.h5", images=IMAGES, labels=np.arange(ROWS - 1))
    refused(tmp_path / "a", "images has 100 rows, labels has 99 rows")
    refused(
        plain(tmp_path / "t" / "a.h5", t=np.array([b"ab", b"c"])),
        "t is of type |S2, not rows of numbers",
    )
    plain(tmp_path / "b" / "a.h5", x=np.arange(5))
    plain(tmp_path / "b" / "b.h5", x=np.arange(5.0))
    refused(tmp_path / "b", "column 'x' is float64 in", "int64 in a.h5")
    (tmp_path / "n.h5").write_bytes(b"not HDF5 at all")
    refused(tmp_path / "n.h5", "cannot read", "n.h5 as HDF5")
    refused(plain(tmp_path / "empty.h5"), "it has no arrays")


def test_nothing_of_a_plain_file_is_left_out(tmp_path: Path) -> None:
    with h5py.File(plain(tmp_path / "g.h5", x=np.arange(5)), "a") as file:
        file.create_group("deep")["y"] = np.arange(5)
    refused(tmp_path / "g.h5", "deep is a group")
    with h5py.File(plain(tmp_path / "t.h5", x=np.arange(5)), "a") as file:
        file["kind"] = np.dtype("i4")
    refused(tmp_path / "t.h5", "kind is a datatype")
    with h5py.File(plain(tmp_path / "l.h5", x=np.arange(5)), "a") as file:
        file["y"] = h5py.SoftLink("/gone")
    refused(tmp_path / "l.h5", "y is a link that leads nowhere")
    assert read(tmp_path / "l.h5", np.arange(5), columns=("x",))["x"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("name", ["deep/b.h5", "b.hdf", "b.h5.part", "b.npz"])
def test_a_file_that_may_hold_samples_is_not_left_out(tmp_path: Path, name: str) -> None:
    plain(tmp_path / "a.H5", x=np.arange(5))
    (tmp_path / "README.md").write_text("five rows")
    assert read(tmp_path, np.arange(5))["x"].tolist() == [0, 1, 2, 3, 4]
    plain(tmp_path / name, x=np.arange(5))
    refused(tmp_path, f"{name} is no file of the shards")


@pytest.mark.parametrize("how", [os.link, os.symlink], ids=["hard", "symbolic"])
def test_a_link_to_a_plain_file_does_not_repeat_its_rows(tmp_path: Path, how: Any) -> None:
    how(plain(tmp_path / "a.h5", x=np.arange(5)), tmp_path / "b.h5")
    refused(tmp_path, "a.h5 and", "b.h5 are one file")


def test_a_shard_that_the_index_does_not_name_is_not_left_out(folder: Path) -> None:
    plain(folder / "z.h5", x=np.arange(5))
    refused(folder, "z.h5 is no file of the shards")


def test_an_array_of_another_file_that_is_missing_is_not_filled(tmp_path: Path) -> None:
    layout = h5py.VirtualLayout((10,), "i8")
    for number in (0, 1):
        source = plain(tmp_path / f"{number}.part", x=np.arange(5) + 5 * number)
        layout[5 * number : 5 * number + 5] = h5py.VirtualSource(source, "x", (5,))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_virtual_dataset("x", layout, fillvalue=-1)
    assert read(tmp_path / "a.h5", np.arange(10))["x"].tolist() == list(range(10))
    with h5py.File(source, "a") as file:
        file.move("x", "y")
    refused(tmp_path / "a.h5", "1.part has no x")
    source.unlink()
    refused(tmp_path / "a.h5", "1.part")


@pytest.mark.parametrize("chunks", [None, (4,)], ids=["whole", "chunks"])
def test_a_column_behind_an_external_link_is_read_from_its_own_file(
    tmp_path: Path, chunks: tuple[int] | None
) -> None:
    plain(tmp_path / "own" / "a.h5", x=np.arange(800).reshape(8, 100))
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file.create_dataset("labels", data=np.arange(1000, 1008), chunks=chunks)
    with h5py.File(tmp_path / "own" / "a.h5", "a") as file:
        file["y"] = h5py.ExternalLink("../b.h5", "/labels")
    assert read(tmp_path / "own" / "a.h5", np.arange(8))["y"].tolist() == list(range(1000, 1008))


def link_externally(file: h5py.File, source: Path) -> None:
    file["x"] = h5py.ExternalLink(str(source), "x")


def show_virtually(file: h5py.File, source: Path) -> None:
    layout = h5py.VirtualLayout((6,), "i8")
    layout[:] = h5py.VirtualSource(source, "x", (6,))
    file.create_virtual_dataset("x", layout)


def store_outside(file: h5py.File, source: Path) -> None:
    np.arange(6).tofile(source)
    file.create_dataset("x", (6,), "i8", external=[(str(source), 0, 48)])


@pytest.mark.parametrize("connect", [link_externally, show_virtually, store_outside])
def test_a_state_is_of_all_files_that_hold_values(tmp_path: Path, connect: Any) -> None:
    other = plain(tmp_path / "other.h5", x=np.arange(6))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        connect(file, other)
    path = tmp_path / "a.h5"
    assert read(path, np.arange(6))["x"].tolist() == list(range(6))
    opened = Shards(path)
    state = Loader(Shards(path), global_batch=2).state_dict()
    Loader(Shards(path), global_batch=2).load_state_dict(state)
    data = bytearray(other.read_bytes())
    data[-8] += 1
    other.write_bytes(data)
    with pytest.raises(InputError, match=r"other\.h5 has other contents than the Loader"):
        Loader(Shards(path), global_batch=2).load_state_dict(state)
    with ShardReader(opened) as reader, pytest.raises(InputError, match=r"other\.h5 has changed"):
        reader.read(np.arange(6))
    other.unlink()
    refused(path, "x is a link that leads nowhere" if connect is link_externally else "other.h5")


def test_a_column_that_is_not_there(folder: Path) -> None:
    refused(
        folder,
        "has no column 'labels'",
        "image, id, rating, tags, seen",
        columns=("image", "labels"),
    )


def test_a_reader_inherited_over_a_fork_is_refused(folder: Path) -> None:
    with ShardReader(Shards(folder)) as reader:
        reader.read(np.arange(3))
        child = os.fork()
        if child == 0:
            try:
                reader.read(np.arange(3))
            except InputError as error:
                os._exit(42 if "was opened by process" in str(error) else 1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
        reader.read(np.arange(50))  # the parent's still works


def test_only_so_many_files_are_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepladder.data.shards.reader.MAX_OPEN_FILES", 2)
    monkeypatch.setattr("stepladder.data.shards.reader.MAX_OPEN_H5", 2)
    rows = ({"x": i, "l": [i]} for i in range(20))
    write_shards(rows, tmp_path / "s", chunk_rows=2, rows_per_shard=4)
    with ShardReader(Shards(tmp_path / "s")) as reader:
        before = len(list(Path("/proc/self/fd").iterdir()))
        for _ in range(2):
            batch = reader.read(np.arange(20))
            assert batch["x"].tolist() == batch["l"].values.tolist() == list(range(20))
            assert len(list(Path("/proc/self/fd").iterdir())) - before <= 4
        reader.slot_of[:] = -1
        assert reader.read(np.array([0, 19]))["x"].tolist() == [0, 19]


def test_info_advises_a_chunk_size(tmp_path: Path) -> None:
    plain(tmp_path / "tiny" / "a.h5", images=(IMAGES, {"chunks": (1, 4, 3), "compression": "gzip"}))
    facts = describe_shards(tmp_path / "tiny")
    (part,) = facts["parts"]
    assert (facts["rows"], facts["chunks"], part["chunk_rows"], part["advised_chunk_rows"]) == (
        100,
        100,
        1,
        32768,
    )
    assert "--chunk-rows 32768" in "\n".join(shard_lines(facts))
