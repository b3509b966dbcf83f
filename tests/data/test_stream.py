"""Batches from shards: in the order asked for, read ahead, ended well; training from them."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from contracts import check_resume
from processes import JOBS, SECONDS, audited, refused, run, train, wait_until
from ranks import run_ranks
from stepladder import Comm, InputError, Plan, Settings, Shards, Trainer, write_shards
from stepladder.data.shards.inputs import open_tables
from stepladder.data.shards.writer import write_table
from stepladder.data.sources import StreamSource, open_source
from stepladder.train.job_file import load_job_file

CPU = torch.device("cpu")
JOB = JOBS / "streamed.py"
ROWS = 250


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 6)).astype(np.float32)
    rows = (
        {"x": row, "y": row[:1] * row[1:2], "id": i, "tags": [i] * (i % 3)}
        for i, row in enumerate(x)
    )
    return write_shards(
        rows, tmp_path_factory.mktemp("stream") / "s", chunk_rows=8, rows_per_shard=100
    ).parent


def requests(rows: Any) -> Iterator[tuple[int, np.ndarray]]:
    return ((0, np.array(indices)) for indices in rows)


def test_batches_are_tensors_by_name_or_in_a_list(folder: Path) -> None:
    ((indices, batch),) = open_source(Shards(folder), CPU, 0).batches(requests([[4, 249, 8]]))
    assert indices.tolist() == batch["id"].tolist() == [4, 249, 8]
    assert (batch["x"].shape, batch["x"].dtype) == ((3, 6), torch.float32)
    values, offsets = batch["tags"]
    bags = torch.nn.functional.embedding_bag(
        values, torch.arange(ROWS).float()[:, None], offsets, mode="sum", include_last_offset=True
    )
    assert bags.flatten().tolist() == [4 * 1, 0, 8 * 2]
    ((_, (ids, x)),) = StreamSource(Shards(folder, columns=("id", "x")), CPU).batches(
        requests([[7]])
    )
    assert (ids.tolist(), x.shape) == ([7], (1, 6))


def test_ended_early_it_leaves_no_thread_and_no_file(folder: Path) -> None:
    gc.collect()  # what earlier tests have left to be closed at any time
    before = len(list(Path("/proc/self/fd").iterdir()))
    batches = StreamSource(Shards(folder), CPU).batches(
        requests([[i % ROWS] for i in range(10_000)])
    )
    next(batches)
    assert any(thread.name.startswith("read-ahead") for thread in threading.enumerate())
    batches.close()
    assert not any(thread.name.startswith("read-ahead") for thread in threading.enumerate())
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_what_goes_wrong_in_the_thread_is_raised_where_the_batch_is_asked_for(folder: Path) -> None:
    def broken() -> Iterator[tuple[int, np.ndarray]]:
        yield 0, np.array([1])
        raise KeyError("the plan's own bug")

    batches = StreamSource(Shards(folder), CPU).batches(broken())
    next(batches)
    with pytest.raises(KeyError, match="the plan's own bug"):
        next(batches)


def test_it_reads_ahead_but_not_without_end(folder: Path) -> None:
    taken: list[int] = []

    def counted() -> Iterator[tuple[int, np.ndarray]]:
        for i in range(1000):
            taken.append(i)
            yield 0, np.array([i % ROWS])

    batches = StreamSource(Shards(folder), CPU).batches(counted())
    for _ in range(3):
        next(batches)
    wait_until(lambda: len(taken) > 3)  # by the thread, whenever it gets a core
    batches.close()
    assert len(taken) <= 12


def test_a_stream_inherited_over_a_fork_is_refused(folder: Path) -> None:
    batches = StreamSource(Shards(folder), CPU).batches(requests([[i] for i in range(100)]))
    next(batches)
    child = os.fork()
    if child == 0:
        try:
            next(batches)
        except InputError as error:
            os._exit(42 if "open Shards after the fork" in str(error) else 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
    next(batches)
    batches.close()


class Reading:
    """Reads a plan's shares on some number of ranks, another one after each stop."""

    def __init__(self, folder: Path) -> None:
        self.shards = Shards(folder)
        self.position = 0
        self.read = dict[int, list[int]]()
        self.plan = Plan(ROWS, 24, 3, seed=5, chunks=self.shards.chunks)  # 11 steps per epoch

    def advance(self, until: int) -> None:
        world_size = 1 + self.position % 4
        for step in range(self.position, until):
            shares = [self.plan.share(step, rank, world_size) for rank in range(world_size)]
            self.read[step] = [int(i) for spans in shares for i in self._read(step, spans)]
        self.position = until

    def _read(self, step: int, spans: Any) -> Iterator[int]:
        requests = ((0, self.plan.indices(step, span)) for span in spans)
        for indices, batch in StreamSource(self.shards, CPU).batches(requests):
            assert batch["id"].tolist() == indices.tolist()
            yield from batch["id"].tolist()

    def outcome(self) -> Any:
        epoch = [row for step in range(11) for row in self.read[step]]
        assert sorted(epoch) == list(range(ROWS))
        return self.read


@pytest.mark.slow
def test_resumed_at_any_step_on_other_ranks_it_reads_the_same(folder: Path) -> None:
    check_resume(lambda _name: Reading(folder), 22, [1, 2, 7, 10, 11, 15])


# -- training --------------------------------------------------------------------------------------


@pytest.mark.ranks
@pytest.mark.slow
def test_exact_training_from_shards_resumes_on_other_numbers_of_processes(
    folder: Path, tmp_path: Path
) -> None:
    common = (JOB, "--data-dir", folder, "--sync", "exact", "--run-dir")
    unbroken = train(*common, "a", "--nproc", 1, cwd=tmp_path)
    assert train(*common, "b", "--nproc", 3, "--steps", 9, cwd=tmp_path)["steps"] == 9
    resumed = train(*common, "b", "--nproc", 2, "--epochs", 2, cwd=tmp_path)
    assert (unbroken["steps"], resumed["resumed_from_step"]) == (22, 9)
    assert resumed["weights_sha256"] == unbroken["weights_sha256"]
    assert (tmp_path / "a" / "metrics.jsonl").read_bytes() == (
        tmp_path / "b" / "metrics.jsonl"
    ).read_bytes()
    audit = audited(tmp_path / "b")
    assert (audit["ok"], audit["lost"], audit["repeated"]) == (True, 0, 0)


@pytest.mark.ranks
def test_a_damaged_shard_ends_training_on_several_processes(folder: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    bad.mkdir()
    for path in folder.iterdir():
        (bad / path.name).write_bytes(path.read_bytes())
    with h5py.File(bad / "shard-00001.h5") as file:
        offset = file["x"].id.get_chunk_info(3).byte_offset
    data = bytearray((bad / "shard-00001.h5").read_bytes())
    data[offset] ^= 1
    (bad / "shard-00001.h5").write_bytes(data)
    done = run("train", JOB, "--data-dir", bad, "--nproc", 2, cwd=tmp_path)
    refused(done, "shard-00001.h5 is damaged in chunk 3 of 13", "column x")


def resumed_with(comm: Comm, first: Path, second: Path, run_dir: Path) -> str:
    """What a run that began with the shards `first` says to `second`."""
    module = load_job_file(JOB)
    settings = Settings(run_dir=run_dir, global_batch=24, epochs=1, steps=3, progress=False)
    Trainer(module.build(module.Config(data_dir=str(first))), settings, comm=comm).fit()
    with pytest.raises(InputError) as caught:
        Trainer(module.build(module.Config(data_dir=str(second))), settings, comm=comm).fit()
    return str(caught.value)


@pytest.mark.ranks
def test_a_resumed_run_must_have_the_same_shards(folder: Path, tmp_path: Path) -> None:
    write_table(open_tables(str(folder))[""], tmp_path / "other", chunk_rows=10)
    (message,) = run_ranks(resumed_with, 1, folder, tmp_path / "other", tmp_path / "run")
    assert "chunks" in message and "3 shards" in message and "1 shards" in message


MEMORY = """
import json, sys, numpy as np, psutil, torch
from stepladder import Plan, Shards
from stepladder.data.sources import StreamSource
from stepladder.train.job_file import load_job_file
own = psutil.Process().memory_info
shards = Shards(sys.argv[1])
plan = Plan(len(shards), 256, 32, chunks=shards.chunks)
before, peak, read = own().rss, 0, 0
steps = range(plan.steps_per_epoch)
requests = ((0, plan.indices(step, span)) for step in steps for span in plan.microbatches(step))
for number, (indices, _) in enumerate(StreamSource(shards, torch.device("cpu")).batches(requests)):
    read += len(indices)
    if number % 20 == 0: peak = max(peak, own().rss)
print(json.dumps([read, (peak - before) / 1e6]))
"""


@pytest.mark.slow
def test_reading_takes_less_than_100_mb(tmp_path: Path) -> None:
    rows = ({"x": np.full(10_000, i % 256, np.uint8)} for i in range(20_000))
    write_shards(rows, tmp_path / "s")
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path / "s")],
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    read, megabytes = json.loads(done.stdout)
    assert read == 20_000
    assert megabytes < 100
