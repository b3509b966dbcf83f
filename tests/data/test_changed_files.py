"""A state and an index belong to the contents of files: changed ones are seen."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from file_makers import ONE, TWO, files, image, jsonl, read_all
from stepladder import InputError, Loader, open_data


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def make_loader(folder: Path) -> Loader:
    return Loader(open_data(folder, columns=["x"]), global_batch=2)


def write_two(folder: Path, second: int = 3) -> None:
    folder.mkdir(exist_ok=True)
    files(a_dot_jsonl=ONE + TWO, b_dot_jsonl=ONE + f'{{"x": {second}}}\n')(folder)


def test_a_state_is_of_the_contents_of_files(tmp_path: Path) -> None:
    write_two(tmp_path / "data")
    loader = make_loader(tmp_path / "data")
    next(iter(loader))
    state = json.loads(json.dumps(loader.state_dict()))
    loader.close()
    (tmp_path / "data").rename(tmp_path / "moved")
    make_loader(tmp_path / "moved").load_state_dict(state)
    write_two(tmp_path / "moved", second=4)
    with pytest.raises(InputError, match=r"b\.jsonl has other contents than the Loader"):
        make_loader(tmp_path / "moved").load_state_dict(state)
    (tmp_path / "moved" / "b.jsonl").unlink()
    (tmp_path / "moved" / "a.jsonl").write_text((ONE + TWO) * 2)
    with pytest.raises(InputError, match="the Loader's state has 2 files of data, now 1"):
        make_loader(tmp_path / "moved").load_state_dict(
            state | make_loader(tmp_path / "moved").state_dict() | {"files": state["files"]}
        )


def test_a_state_of_images_is_of_their_names_and_contents(tmp_path: Path) -> None:
    image("a/0.png")(tmp_path)
    image("b/0.png")(tmp_path)
    state = Loader(open_data(tmp_path, columns=["label"]), 2).state_dict()
    image("b/0.png", size=(1, 2))(tmp_path)
    with pytest.raises(InputError, match=r"b/0\.png has other contents"):
        Loader(open_data(tmp_path, columns=["label"]), 2).load_state_dict(state)


def test_large_files_are_known_again_by_samples(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    numbers = np.arange(1 << 19)
    np.save(path, numbers)
    before = open_data(path).contents
    numbers[0] += 1
    np.save(path, numbers)
    assert open_data(path).contents != before


def test_names_that_are_no_text_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (b"\xff.jsonl", b"\xfe.jsonl"):
        (tmp_path / os.fsdecode(name)).write_text(ONE)
    source, batch = read_all(tmp_path, {}, monkeypatch)
    assert batch["x"].tolist() == [1, 1]
    assert source.fingerprint
    state = Loader(source, 2).state_dict()
    Loader(open_data(tmp_path), 2).load_state_dict(json.loads(json.dumps(state)))


def test_images_whose_names_are_no_text_are_read(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"\xff")
    folder.mkdir()
    Image.new("RGB", (2, 1)).save(folder / "0.png")
    assert open_data(tmp_path).read(np.arange(1))["image"].shape == (1, 1, 2, 3)


def test_an_index_belongs_to_the_way_in_which_a_file_is_read(tmp_path: Path) -> None:
    """The same lines are rows of JSON, and of CSV with and without a header."""
    path = tmp_path / "a.csv"
    path.write_text("x\n1\n2\n")
    assert len(open_data(path)) == 2
    assert len(open_data(path, header=["y"])) == 3
    path.write_text('{"x": 1}\n{"x": 2}\n')
    assert len(open_data(path, format="jsonl")) == 2
    assert len(open_data(path)) == 1


def test_columns_in_another_order_are_seen_with_an_index(tmp_path: Path) -> None:
    files(a_dot_csv="x,y\n1,2\n", b_dot_csv="y,x\n1,2\n")(tmp_path)
    for name in ("a.csv", "b.csv"):
        open_data(tmp_path / name)
    with pytest.raises(InputError, match="other columns"):
        open_data(tmp_path)


def test_a_check_finds_records_that_a_training_would_refuse(tmp_path: Path) -> None:
    jsonl(ONE + '{"y": 1}\n{"x": 1, "y": 2}\n')(tmp_path)
    reasons = [damage.reason for damage in open_data(tmp_path).find_damage()]
    assert reasons == ["it has no x", "it has y, and the first record has not"]


def test_a_check_finds_empty_values_that_a_training_would_refuse(tmp_path: Path) -> None:
    columns = {"x": [1, 2, 3, None], "y": [[1], [2, None], None, []], "z": ["", None, "", ""]}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet", row_group_size=2)
    source = open_data(tmp_path)
    found = [(damage.first, damage.reason) for damage in source.find_damage()]
    empty = "column {} has an empty value"
    assert found == [(1, empty.format("y")), (3, empty.format("x")), (2, empty.format("y"))]
    with pytest.raises(InputError, match=r"a\.parquet: record 3: column x .* HINT: decode="):
        source.read(np.array([2]))
    assert not list(open_data(tmp_path, decode=str).find_damage())


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "file"])
def test_an_arrow_file_that_becomes_shorter_is_named_before_it_is_read(
    stream: bool, tmp_path: Path
) -> None:
    """Its memory is the kernel's, which ends a process that reads beyond the end of a file."""
    path = tmp_path / "a.arrow"
    table = pa.table({"x": np.arange(100_000)})
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(path, table.schema) as out:
        out.write_table(table, max_chunksize=1000)
    data = open_data(path)
    assert data.read(np.arange(3))["x"].tolist() == [0, 1, 2]
    os.truncate(path, 200_000)
    with pytest.raises(InputError, match=r"a\.arrow has changed since it was opened"):
        data.read(np.arange(len(data)))
