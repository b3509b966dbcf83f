"""`stepladder.Filtered` and `stepladder.Mapped`: what is kept is found once, and again after a change."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from processes import refused, run, wait_until
from stepladder import Filtered, InputError, Loader, Mapped, Packed, World, open_data
from stepladder.data.readers.files import DataFile, LocalFile
from stepladder.data.readers.record_index import load_index
from stepladder.storage.audit import audit
from stepladder.testing import check_source

LIMIT = 100
NAMES = {"a", "b", "c"}
SHORT = np.array([1, 2, 3])


class Numbers:
    """A Source of the numbers 0 to 239 in chunks of 20, which cannot tell whether it has changed."""

    chunk_edges = range(0, 241, 20)

    def __len__(self) -> int:
        return 240

    def read(self, indices: NDArray[np.int64]) -> dict[str, Any]:
        return {"id": indices.copy()}


@pytest.fixture(autouse=True)
def indexes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/stepladder/indexes"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"id": i, "x": i % 7}) + "\n" for i in range(240)))
    return path


def is_small(batch: dict[str, Any]) -> Any:
    return batch["id"] < LIMIT


def test_what_is_kept_is_in_its_chunks_and_read_once(tmp_path: Path) -> None:
    kept = Filtered(Numbers(), lambda batch: batch["id"] % 3 == 0, key="thirds")
    assert kept.chunk_edges is not None
    assert kept.chunk_edges.tolist() == [len(range(0, edge, 3)) for edge in range(0, 241, 20)]
    check_source(kept)
    states: list[Any] = [None]
    ids: list[int] = []
    for ranks, steps in ((2, 3), (3, 99)):
        for rank in range(ranks):
            loader = Loader(kept, 12, world=World(rank, ranks, rank, ranks))
            if states[0]:
                loader.load_state_dict(states[0])
            for _, batch in zip(range(steps), loader, strict=False):
                ids += batch["id"].tolist()
            loader.close()
            last = loader.state_dict()
        states = [last]
    assert sorted(ids) == list(range(0, 240, 3))
    loader = Loader(kept, 7, run_dir=tmp_path / "run")
    assert sum(len(batch["id"]) for batch in loader) == 80
    loader.close()
    assert audit(tmp_path / "run").ok


def test_chunks_of_which_nothing_is_kept_are_gone() -> None:
    kept = Filtered(Numbers(), lambda batch: (batch["id"] < 5) | (batch["id"] > 230))
    assert kept.chunk_edges is not None
    assert kept.chunk_edges.tolist() == [0, 5, 14]


def test_an_index_is_made_once_and_anew_after_a_change(
    file: Path, indexes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Filtered(open_data(file), is_small, key="100").read(np.array([99]))["id"].tolist() == [
        99
    ]
    count = len(list(indexes.iterdir()))
    with monkeypatch.context() as patch:
        patch.setattr(Filtered, "_find_kept", None)
        assert len(Filtered(open_data(file), is_small, key="100")) == 100
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "LIMIT", 50)
        assert len(Filtered(open_data(file), is_small, key="50")) == 50
    file.write_text(file.read_text() + '{"id": 7, "x": 7}\n')
    assert len(Filtered(open_data(file), is_small, key="100")) == 101
    columns = open_data(file, columns=("id",))
    assert len(Filtered(columns, lambda batch: batch[0] < 3, key="100")) == 3
    assert len(list(indexes.iterdir())) == count + 4, "three indexes of Filtered, one of lines"


def test_a_filter_of_what_a_function_makes(file: Path) -> None:
    def double(batch: dict[str, Any]) -> dict[str, Any]:
        return {"double": 2 * batch["id"]}

    doubled = Mapped(open_data(file), double, key="v1")
    check_source(doubled)
    kept = Filtered(doubled, lambda batch: batch["double"] > 470, key="v1")
    assert kept.read(np.arange(len(kept)))["double"].tolist() == [472, 474, 476, 478]
    assert kept.fingerprint != Filtered(open_data(file), is_small, key="v1").fingerprint


def test_documents_that_are_kept_are_packed() -> None:
    documents = Mapped(Numbers(), lambda batch: [np.arange(n % 5 + 1) for n in batch["id"]])
    kept = Filtered(documents, lambda batch: np.array([len(text) > 3 for text in batch]))
    assert len(kept) == 2 * 48
    assert Packed(kept, 9).fill == 1.0


def test_an_error_of_the_users_function_is_not_one_of_the_index(file: Path) -> None:
    def keep(batch: Any) -> Any:
        Path("words.txt").read_text()

    with pytest.raises(RuntimeError, match=r"has raised FileNotFoundError: .*'words\.txt'"):
        Filtered(open_data(file), keep, key="v1")


def test_a_long_search_says_what_it_does(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("stepladder.core.console.SLOW_S", 0)
    monkeypatch.setattr("stepladder.data.filtered.SAMPLES_PER_READ", 100)
    shown = [""]

    def read_shown(text: str) -> bool:
        shown[0] += capsys.readouterr().err
        return text in shown[0]

    def keep(batch: dict[str, Any]) -> Any:
        wait_until(lambda: read_shown("Filtered reads all 240 samples to find"))
        return is_small(batch)

    for source in (open_data(file), Numbers()):
        Filtered(source, keep, key="small")
        assert shown[0].count("Filtered reads") == 1
        shown[0] = ""

    def find_offsets(data: DataFile) -> Iterator[NDArray[np.int64]]:
        wait_until(lambda: read_shown(f"{file} is read once, to find where its records begin"))
        yield np.array([0, data.size])

    file.write_text('{"id": 1}\n')
    assert load_index(LocalFile(file), find_offsets, "kind").tolist() == [0, 10]


def test_without_a_key_nothing_is_cached(file: Path, indexes: Path) -> None:
    data = open_data(file)
    of_lines = list(indexes.iterdir())
    assert len(Filtered(data, is_small)) == 100
    assert Filtered(data, is_small).fingerprint is None
    assert list(indexes.iterdir()) == of_lines
    decoded = open_data(file, decode=lambda sample: sample)
    assert decoded.fingerprint is None
    assert Filtered(decoded, is_small, key="v1").fingerprint is None


def resume(then: str | None, now: str | None) -> None:
    """Continue a Loader with one key with the state of a Loader with another."""
    first = Loader(Mapped(Numbers(), dict, key=then), 12)
    state = json.loads(json.dumps(first.state_dict()))
    Loader(Mapped(Numbers(), dict, key=now), 12).load_state_dict(state)


def test_a_resume_needs_the_same_key(monkeypatch: pytest.MonkeyPatch) -> None:
    resume("v1", "v1")
    resume(None, "v1")
    with pytest.raises(InputError, match="the function of Mapped has other contents than the Load"):
        resume("v1", "v2")
    for then in (None, "v1"):
        with pytest.raises(InputError, match="the function of Mapped has no key, and") as caught:
            resume(then, None)
        assert str(caught.value).endswith('HINT: Mapped(..., key="v1")')
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    resume(None, None)
    with pytest.raises(InputError, match="the function of Mapped has other contents"):
        resume("v1", None)


JOB = """
from dataclasses import dataclass
import torch
from stepladder import Job, Mapped

@dataclass
class Config:
    pass

class Numbers:
    chunk_edges = None
    def __len__(self):
        return 40
    def read(self, indices):
        return torch.from_numpy(indices).float()[:, None]

def build(config: Config) -> Job:
    model = torch.nn.Linear(1, 1)
    data = Mapped(Numbers(), lambda batch: batch / 40)
    def loss(model, batch):
        return model(batch).square().sum(), len(batch)
    return Job(model, torch.optim.SGD(model.parameters(), 0.1), loss, data)
"""


@pytest.mark.ranks
def test_a_run_without_a_key_says_so_and_is_not_resumed(tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text(JOB)
    command = ("train", "job.py", "--global-batch", 4, "--run-dir", "run", "--steps")
    first = run(*command, 3, cwd=tmp_path)
    assert "the function of Mapped has no key: this run cannot be resumed" in first.stderr
    refused(run(*command, 5, cwd=tmp_path), "the function of Mapped has no key, and may be another")
    job.write_text(JOB.replace("batch / 40)", 'batch / 40, key="v1")'))
    assert run(*command, 5, cwd=tmp_path).returncode == 0


def test_a_state_from_before_keys_is_resumed() -> None:
    loader = Loader(Mapped(Numbers(), dict), 12)
    state = loader.state_dict()
    loader.load_state_dict(state | {"files": []})
    del state["files"]
    loader.load_state_dict(state)


@pytest.mark.parametrize(
    ("source", "keep", "message"),
    [
        (Numbers(), lambda batch: batch["id"] < 0, "Filtered keeps none of 240 samples"),
        (Numbers(), lambda batch: batch["id"], r"returns int64 of shape \[240\] for 240 samples"),
        (Numbers(), lambda batch: True, r"returns bool of shape \[\] for 240 samples"),
        ([1, 2], is_small, "the source of Filtered is a list"),
        (Numbers(), LIMIT, "the function of Filtered is a int"),
    ],
)
def test_what_cannot_be_filtered_is_refused(source: Any, keep: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Filtered(source, keep)
