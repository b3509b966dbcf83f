"""A data source of the user's own: its contract, the refusal of what breaks it, training from it."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from pages import EXAMPLES
from processes import audited, train
from stepladder import InputError, Plan, Shards, Source, write_shards
from stepladder.data.shards.reader import ShardReader
from stepladder.data.source import CHUNKS_IN_MEMORY, make_chunks
from stepladder.data.sources import find_chunks, open_source
from stepladder.data.table import Ragged
from stepladder.testing import check_source

CPU = torch.device("cpu")
EXAMPLE = EXAMPLES / "streaming_job.py"


class Squares:
    """A source that keeps the contract; each test breaks one member."""

    chunk_edges: Any = (0, 4, 8, 11, 20)

    def __len__(self) -> int:
        return 20

    def read(self, indices: np.ndarray) -> Any:
        return {"x": torch.from_numpy(indices**2), "y": np.stack([indices, -indices], 1)}


def broken(**members: Any) -> Squares:
    source: Squares = type("Broken", (Squares,), members)()
    return source


def test_what_keeps_the_contract_passes(tmp_path: Path) -> None:
    assert isinstance(Squares(), Source)
    check_source(Squares())
    check_source(broken(chunk_edges=None))
    write_shards(({"x": i, "tags": [i] * (i % 3)} for i in range(50)), tmp_path / "s", chunk_rows=8)
    with ShardReader(Shards(tmp_path / "s")) as reader:
        check_source(reader)


class Counter:
    """Says how often it was read."""

    def __init__(self) -> None:
        self.reads = 0
        self.buffer = np.zeros(100, np.int64)

    def count(self, source: Any, indices: np.ndarray) -> np.ndarray:
        self.reads += 1
        return indices + self.reads

    def reuse(self, source: Any, indices: np.ndarray) -> np.ndarray:
        self.buffer[: len(indices)] = indices
        return self.buffer[: len(indices)]


def overwrite(source: Any, indices: np.ndarray) -> np.ndarray:
    indices.sort()
    return indices.copy()


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"chunk_edges": [0, 4]}, "do not lead from 0 to 20"),
        ({"chunk_edges": [0.0, 20.0]}, "do not lead from 0 to 20"),
        ({"chunk_edges": [0, 8, 8, 20]}, "do not increase"),
        ({"__len__": lambda _: 0, "chunk_edges": None}, "no samples"),
        ({"read": lambda _, i: torch.tensor(1)}, "a single number"),
        ({"read": lambda _, i: i.tolist()}, "holds a int"),
        ({"read": lambda _, i: i[:1]}, "has columns of"),
        ({"read": lambda _, i: np.sort(i)}, "has other values"),
        ({"read": lambda _, i: i.astype(float if len(i) > 1 else int)}, "another type or shape"),
        ({"read": lambda _, i: (i,) * len(i)}, "columns, others have"),
        ({"read": Counter().count}, "has other values"),
        ({"read": Counter().reuse}, "has other values"),
        ({"read": overwrite}, "changes the indices"),
        ({"read": lambda _, i: np.random.rand(len(i))}, "has other values"),
    ],
)
def test_what_breaks_the_contract_is_named(members: dict[str, Any], message: str) -> None:
    for name, member in members.items():
        if isinstance(getattr(member, "__self__", None), Counter):
            members = {name: lambda self, i, call=member: call(self, i)}
    with pytest.raises(AssertionError, match=message):
        check_source(broken(**members))


def test_an_object_without_a_member_is_no_source() -> None:
    with pytest.raises(AssertionError, match="lacks one of"):
        check_source([1, 2, 3])  # type: ignore[arg-type]


def test_batches_are_on_the_device_in_the_form_of_the_source() -> None:
    ((indices, batch),) = open_source(Squares(), CPU, 0).batches([(0, np.array([3, 1]))])
    assert indices.tolist() == [3, 1]
    assert batch["x"].tolist() == [9, 1]
    assert batch["y"].tolist() == [[3, -3], [1, -1]]
    source = broken(read=lambda _, i: (i, i))
    ((_, pair),) = open_source(source, CPU, 0).batches([(0, np.array([3]))])
    assert [part.tolist() for part in pair] == [[3], [3]]


def test_chunks_are_as_short_as_their_sizes_allow() -> None:
    chunks = find_chunks(Squares())
    assert chunks is not None
    assert chunks.edges.tolist() == [0, 4, 8, 11, 20]
    assert chunks.shards == ((11, 4), (9, 9))
    assert find_chunks(torch.zeros(3)) is None


def test_an_epoch_reads_nearly_each_chunk_once_if_64_are_in_memory() -> None:
    edges = np.arange(0, 4001, 10)
    chunks = make_chunks(broken(__len__=lambda _: 4000, chunk_edges=edges))
    plan = Plan(4000, 64, 4, chunks=chunks)
    cached: dict[int, None] = {}
    loads = 0
    for step in range(plan.steps_per_epoch):
        for span in plan.microbatches(step):
            needed = np.unique(np.searchsorted(edges, plan.indices(step, span), "right") - 1)
            for chunk in needed.tolist():
                loads += chunk not in cached
                cached.pop(chunk, None)
                cached[chunk] = None
                if len(cached) > CHUNKS_IN_MEMORY:
                    del cached[next(iter(cached))]
    assert 400 <= loads <= 400 + 2 * 16  # a chunk at the end of a lane belongs to two of 16 lanes


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[int]:
        return iter(range(9))


def refuse(data: Any) -> str:
    with pytest.raises(InputError) as caught:
        open_source(data, CPU, 0)
    message = str(caught.value)
    assert "\n" not in caught.value.problem
    return message


@pytest.mark.parametrize(
    ("make", "reason", "way_out"),
    [
        (Stream, "an IterableDataset (Stream), which chooses its own samples", "write_shards"),
        (object, "the job's data is a object", "chunk_edges, read(indices)"),
        (lambda: Squares, "the job's data is a type", "read(indices)"),
    ],
)
def test_what_is_no_source_is_refused_with_the_way_out(
    make: Callable[[], Any], reason: str, way_out: str
) -> None:
    message = refuse(make())
    assert reason in message
    assert way_out in message


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda i: "text", "holds a str"),
        (lambda i: np.array(["text"] * len(i)), "holds an array of <U4"),
        (lambda i: {"x": i[1:]}, r"of 2 samples holds an array of shape \[1\]"),
        (lambda i: [i, np.array(5)], r"of 2 samples holds an array of shape \[\]"),
        (lambda i: Ragged(i, np.array([0, 2])), r"of 3 samples holds an array of shape \[2\]"),
    ],
)
def test_a_batch_of_something_else_is_refused(make: Callable[[Any], Any], problem: str) -> None:
    """Fewer rows would be samples that nobody trains, and that the ledger counts."""
    source = broken(read=lambda _, i: make(i))
    with pytest.raises(InputError, match=f"a batch of the job's Broken {problem}"):
        list(open_source(source, CPU, 0).batches([(0, np.array([3, 4]))]))


@pytest.mark.ranks
def test_the_example_trains_to_the_same_bits_on_two_processes(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        example = runpy.run_path(str(EXAMPLE), run_name="__main__")
        check_source(example["TextFiles"]("parts"))
    common = (EXAMPLE, "--data-dir", tmp_path / "parts", "--sync", "exact", "--run-dir")
    unbroken = train(*common, "a", cwd=tmp_path)
    assert train(*common, "b", "--nproc", 2, "--steps", 7, cwd=tmp_path)["steps"] == 7
    resumed = train(*common, "b", "--epochs", 2, cwd=tmp_path)
    assert resumed["resumed_from_step"] == 7
    assert resumed["weights_sha256"] == unbroken["weights_sha256"]
    audit = audited(tmp_path / "b")
    assert (audit["ok"], audit["lost"], audit["repeated"]) == (True, 0, 0)
