"""Data that lie in files of common formats, local and behind a real nginx."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from data_files import CHUNK, ROWS, WRITERS, make_rows, write_parquet
from nginx import Server, serve
from processes import JOBS, audited, refused, run, train
from stepladder import InputError, Shards, open_data
from stepladder.data.readers import block_cache
from stepladder.data.readers.block_cache import BlockCache
from stepladder.data.readers.remote import UrlFile
from stepladder.data.shards.reader import ShardReader
from stepladder.testing import check_source

JOB = JOBS / "opened.py"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "stepladder"


def write(folder: Path) -> Path:
    folder.mkdir(parents=True)
    write_parquet(folder)
    return folder


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Server]:
    pytest.importorskip("aiohttp", reason="needs aiohttp: pip install 'stepladder[http]'")
    write(tmp_path / "root" / "data")
    with serve(tmp_path / "root", tmp_path / "nginx") as server:
        yield server


def test_parquet_is_read_by_row_group_as_it_was_written(tmp_path: Path) -> None:
    source = open_data(write(tmp_path / "data"))
    assert len(source) == ROWS
    edges = source.chunk_edges
    assert edges is not None and list(edges) == list(range(0, ROWS + 1, CHUNK))
    batch = source.read(np.array([200, 3, 21]))
    assert batch["id"].tolist() == [200, 3, 21]
    assert batch["x"][1].tolist() == make_rows()[3]["x"].tolist()
    assert batch["tags"].values.tolist() == [200, 200]
    assert batch["tags"].offsets.tolist() == [0, 2, 2, 2]
    check_source(open_data(tmp_path / "data", columns=("id", "x", "tags")))


def test_decode_makes_a_sample_of_a_row(tmp_path: Path) -> None:
    write(tmp_path / "data")
    source = open_data(
        tmp_path / "data" / "*.parquet", decode=lambda row: (np.array(row["x"]), len(row["text"]))
    )
    x, letters = source.read(np.array([7, 101]))
    assert x.shape == (2, 4)
    assert letters.tolist() == [10, 12]


def test_damaged_rows_are_named_by_file_and_number(tmp_path: Path) -> None:
    file = write(tmp_path / "data") / "part-1.parquet"
    good = run("data", "check", "data", cwd=tmp_path)
    assert (good.returncode, good.stdout) == (0, "data: 240 records of parquet, all can be read\n")
    bytes_ = bytearray(file.read_bytes())
    column = pq.ParquetFile(file).metadata.row_group(2).column(1)
    bytes_[column.dictionary_page_offset + column.total_compressed_size - 2] ^= 1
    file.write_bytes(bytes_)
    bad = run("data", "check", "data", "--json", cwd=tmp_path)
    assert bad.returncode == 2
    line, facts = bad.stdout.splitlines()
    assert line.startswith("data/part-1.parquet: records 40 to 59: ")
    assert json.loads(facts)["damaged"][0]["first"] == 40
    assert "data: 20 of 240 records cannot be read. HINT: " in bad.stderr
    ended = run("train", JOB, "--microbatch", 4, "--data", "data", cwd=tmp_path)
    refused(ended, "data/part-1.parquet: record")


def test_info_says_what_it_is_and_how_many(served: Server, tmp_path: Path) -> None:
    done = run("data", "info", served.url + "data/", "--json", cwd=tmp_path)
    facts = json.loads(done.stdout)
    assert (facts["dataset"], facts["rows"], facts["chunks"]) == ("parquet", 240, 12)
    assert facts["columns"]["x"] == "fixed_size_list<element: float>[4]"
    shown = run("data", "info", "root/data", cwd=tmp_path).stdout
    assert "240 rows in 3 files, 12 chunks: id (int64)" in shown


@pytest.mark.slow
def test_shards_are_written_of_a_pattern_behind_a_url(served: Server, tmp_path: Path) -> None:
    url = served.url + "data/*.parquet"
    flags = ("--columns", "id,x", "--chunk-rows", 7)
    assert run("data", "shard", url, "--out", "out", *flags, cwd=tmp_path).returncode == 0
    again = run("data", "shard", url, "--out", "out", *flags, cwd=tmp_path)
    assert again.stderr == "out: here already\n"
    shards = Shards(tmp_path / "out")
    with ShardReader(shards) as reader:
        rows = reader.read(np.arange(len(shards)))
    expected = make_rows()
    assert rows["id"].tolist() == [row["id"] for row in expected]
    np.testing.assert_array_equal(rows["x"], [row["x"] for row in expected])


def test_over_http_each_part_is_fetched_once_by_all_processes(
    served: Server, tmp_path: Path
) -> None:
    url = served.url + "data/"
    local = train(
        JOB, "--microbatch", 4, "--data", tmp_path / "root/data", "--sync", "exact", cwd=tmp_path
    )
    run_dir = tmp_path / "runs/remote"
    flags = ("--microbatch", 4, "--data", url, "--sync", "exact", "--run-dir", run_dir)
    stopped = train(JOB, *flags, "--nproc", 2, "--fail-at", "1:7", cwd=tmp_path)
    assert stopped["weights_sha256"] == local["weights_sha256"]
    audit = audited(run_dir)
    assert (audit["lost"], audit["repeated"]) == (0, 0)
    ranges = served.ranges()
    assert len(ranges) == 3  # one block of each file
    assert set(ranges.values()) == {1}


@pytest.mark.slow
def test_a_run_over_http_resumes_on_another_number_of_processes(
    served: Server, tmp_path: Path
) -> None:
    flags = (
        "--microbatch",
        4,
        "--data",
        served.url + "data/*.parquet",
        "--sync",
        "exact",
        "--run-dir",
        "run",
    )
    whole = train(JOB, *flags[:-1], "whole", cwd=tmp_path)
    train(JOB, *flags, "--nproc", 2, "--steps", 11, cwd=tmp_path)
    resumed = train(JOB, *flags, "--nproc", 3, "--steps", 30, cwd=tmp_path)
    assert resumed["weights_sha256"] == whole["weights_sha256"]


@pytest.mark.ranks
def test_a_run_is_not_resumed_with_another_file_of_the_same_length(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    WRITERS["parquet"](folder)
    flags = ("--microbatch", 4, "--data", "data", "--run-dir", "run")
    train(JOB, *flags, "--steps", 3, cwd=tmp_path)
    first, second = folder / "part-0.parquet", folder / "part-1.parquet"
    contents = first.read_bytes()
    second.replace(first)
    second.write_bytes(contents)
    done = run("train", JOB, *flags, "--steps", 5, cwd=tmp_path)
    refused(done, "data/part-0.parquet has other contents than run directory run was begun with")


def test_the_cache_is_bounded_and_a_damaged_block_is_fetched_again(
    served: Server, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_cache, "BLOCK_BYTES", 4096)
    monkeypatch.setattr("stepladder.data.readers.remote.BLOCK_BYTES", 4096)
    monkeypatch.setattr(block_cache, "WRITES_PER_SCAN", 2)
    source = open_data(served.url + "data/", columns=("id",), cache_bytes=20_000)
    assert source.read(np.arange(ROWS))[0].tolist() == list(range(ROWS))
    blocks = sorted(cache.glob("blocks/*/*[0-9]"))
    assert 0 < sum(block.stat().st_size for block in blocks) <= 20_000 + 2 * 4200
    for block in blocks:
        block.write_bytes(block.read_bytes()[:-1] + b"?")
    again = open_data(served.url + "data/", columns=("id",))
    assert again.read(np.arange(ROWS))[0].tolist() == list(range(ROWS))


def test_a_file_that_changes_on_the_server_ends_the_run(
    served: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepladder.data.readers.remote.BLOCK_BYTES", 1024)
    opened = UrlFile(served.url + "data/part-0.parquet", BlockCache())
    assert opened.read(0, 4) == b"PAR1"
    file = tmp_path / "root/data/part-0.parquet"
    file.write_bytes(file.read_bytes() + b" ")
    with pytest.raises(InputError, match="has changed since it was opened"):
        opened.read(2000, 2100)


def test_a_command_makes_an_index_in_the_cache_or_beside_the_file(
    tmp_path: Path, cache: Path
) -> None:
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n{"x": 2}\n')
    run("data", "index", "a.jsonl", "--beside", cwd=tmp_path)
    assert (tmp_path / "a.jsonl.stepladder-index").is_file()
    assert [file.name for file in cache.glob("indexes/*")] == ["lock"]
    (tmp_path / "b.jsonl").write_text('{"x": 1}\n')
    done = run("data", "index", "b.jsonl", "--json", cwd=tmp_path)
    line, facts = done.stdout.splitlines()
    assert line == f"b.jsonl: 1 records of jsonl in 1 file; indexes are in {cache}/indexes"
    assert json.loads(facts)["rows"] == 1


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nothing", "there is no nothing"),
        (__file__, "is of no format"),
        ("nothing.parquet", "there is no nothing.parquet"),
        ("ftp://host/a.parquet", "only http:// and https:// are read"),
        ("http://127.0.0.1:9/a.parquet", r"5 attempts: .*Connect call failed"),
    ],
)
def test_what_cannot_be_opened_is_one_line(
    path: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepladder.data.readers.remote.FIRST_DELAY_S", 0)
    if path.startswith("http"):
        pytest.importorskip("aiohttp", reason="needs aiohttp: pip install 'stepladder[http]'")
    with pytest.raises(Exception, match=message):
        open_data(path)


@pytest.mark.slow
@pytest.mark.ranks
def test_exact_gives_one_hash_over_three_formats_on_any_number_of_processes_through_a_kill(
    tmp_path: Path,
) -> None:
    columns = {"parquet": "x,y", "mds": "x,y", "webdataset": "x.npy,y.cls"}
    hashes = set()
    for name, names in columns.items():
        folder = tmp_path / name
        folder.mkdir()
        WRITERS[name](folder)
        for ranks in (1, 2, 3):
            run_dir = tmp_path / f"runs/{name}-{ranks}"
            flags = ("--microbatch", 4, "--data", folder, "--columns", names, "--sync", "exact")
            kill = ("--fail-at", f"{ranks - 1}:7") if ranks > 1 else ()
            result = train(JOB, *flags, "--nproc", ranks, "--run-dir", run_dir, *kill, cwd=tmp_path)
            hashes.add(result["weights_sha256"])
            audit = audited(run_dir)
            assert (audit["lost"], audit["repeated"]) == (0, 0)
    assert len(hashes) == 1
