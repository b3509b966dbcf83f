"""`stepladder.Padded`: documents as wide as the longest of their batch, which has similar lengths."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from processes import JOBS, audited, train
from stepladder import Filtered, InputError, Loader, Mapped, Mixture, Padded, World, open_data
from stepladder.storage.audit import audit

LENGTHS = np.random.default_rng(0).lognormal(3, 1, 500).astype(np.int64) + 1


def make_documents() -> list[NDArray[np.int64]]:
    """Documents whose tokens are their own number, from 1."""
    return [np.full(length, number + 1) for number, length in enumerate(LENGTHS)]


class Texts:
    """A Source of documents in chunks of 50."""

    chunk_edges = range(0, 501, 50)

    def __len__(self) -> int:
        return 500

    def read(self, indices: NDArray[np.int64]) -> list[Any]:
        documents = make_documents()
        return [documents[index] for index in indices]


def expect_padded(batch: dict[str, Any]) -> list[int]:
    """Each row is one whole document, then zeros; return their numbers."""
    tokens = np.asarray(batch["tokens"])
    numbers: list[int] = (tokens[:, 0] - 1).tolist()
    lengths = LENGTHS[numbers]
    assert batch["lengths"].tolist() == lengths.tolist()
    assert tokens.shape == (len(numbers), lengths.max())
    for row, number, length in zip(tokens, numbers, lengths, strict=True):
        assert row.tolist() == [number + 1] * length + [0] * (len(row) - length)
    return numbers


@pytest.mark.parametrize("documents", [make_documents(), Texts()])
def test_an_epoch_has_every_document_once_with_little_padding(
    documents: Any, tmp_path: Path
) -> None:
    loader = Loader(Padded(documents), 8, run_dir=tmp_path / "run")
    numbers = []
    places = 0
    for batch in loader:
        numbers += expect_padded(batch)
        places += batch["tokens"].numel()
    loader.close()
    assert sorted(numbers) == list(range(500))
    assert LENGTHS.sum() / places > 0.55  # in a random order it is 0.33
    assert audit(tmp_path / "run").ok


def load_rank(rank: int, ranks: int, state: dict[str, Any] | None = None) -> Loader:
    loader = Loader(Padded(make_documents(), LENGTHS), 12, world=World(rank, ranks, rank, ranks))
    if state is not None:
        loader.load_state_dict(state)
    return loader


def test_a_state_holds_on_another_number_of_ranks() -> None:
    numbers = []
    state = None
    for ranks, steps in ((2, 7), (3, None)):
        loaders = [load_rank(rank, ranks, state) for rank in range(ranks)]
        for loader in loaders:
            for batch in islice(loader, steps):
                numbers += expect_padded(batch)
            loader.close()
        state = loaders[0].state_dict()
    assert sorted(numbers) == list(range(500))


def test_a_state_of_another_order_is_refused() -> None:
    plain = Loader([(number, 1) for number in range(500)], 12)
    with pytest.raises(InputError, match="has order="):
        plain.load_state_dict(load_rank(0, 1).state_dict())


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "texts.jsonl"
    rows = [{"label": n % 2, "tokens": [n + 1] * length} for n, length in enumerate(LENGTHS)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    yield file


def test_columns_of_lists_are_padded_and_the_others_stay(texts: Path) -> None:
    batch = Padded(open_data(texts), padding=-1).read(np.arange(500)[::-1])
    assert batch["lengths"].tolist() == sorted(LENGTHS.tolist(), reverse=True)
    assert (batch["tokens"] >= 0).sum() == LENGTHS.sum()
    assert ((batch["tokens"][:, 0] - 1) % 2).tolist() == batch["label"].tolist()
    tokens, label, lengths = Padded(open_data(texts, columns=("tokens", "label"))).read(
        np.array([499, 0])
    )
    assert (tokens.shape[1], label.shape) == (LENGTHS.max(), (2,))
    assert lengths.tolist() == [LENGTHS.max(), LENGTHS.min()]


def test_an_empty_document_changes_no_type() -> None:
    batch = Padded([[3, 4], [], [5]]).read(np.arange(3))
    assert batch["tokens"].dtype == np.int64
    assert batch["tokens"].tolist() == [[0, 0], [5, 0], [3, 4]]
    assert Padded([[], []]).read(np.arange(2))["tokens"].shape == (2, 0)


@pytest.mark.parametrize("padding", ["x", None, [0], 1.5, float("nan"), 10**30])
def test_padding_that_no_token_can_be_is_refused(padding: Any) -> None:
    with pytest.raises(InputError, match="padding="):
        Padded([[1, 2], [3]], padding=padding).read(np.arange(2))


def test_a_mixture_keeps_lists_whole(texts: Path) -> None:
    data = open_data(texts)
    mixture = Mixture([data, data])
    batch = mixture.read(np.array([700, 3, 501]))
    lists = np.split(batch["tokens"].values, batch["tokens"].offsets[1:-1])
    assert [values.tolist() for values in lists] == [
        [number + 1] * LENGTHS[number] for number in (200, 3, 1)
    ]
    loader = Loader(Padded(mixture), 50)
    assert sum(len(batch["lengths"]) for batch in loader) == 1000
    loader.close()


def test_documents_without_tokens_are_refused(texts: Path) -> None:
    class Labels(Texts):
        def read(self, indices: NDArray[np.int64]) -> Any:
            return {"label": indices}

    with pytest.raises(InputError, match="the columns label, and none of lists"):
        Padded(Labels())
    with pytest.raises(InputError, match=r"a document has the shape \[2, 3\]"):
        Padded([np.zeros((2, 3))]).read(np.arange(1))


def read_numbers(source: Any) -> list[int]:
    loader = Loader(source, 8)
    numbers = [number for batch in loader for number in expect_padded(batch)]
    loader.close()
    return numbers


def test_batches_of_what_a_function_makes_have_similar_lengths() -> None:
    padded = Padded(Texts(), LENGTHS)
    order = read_numbers(padded)
    mapped = Mapped(padded, lambda batch: {**batch, "tokens": batch["tokens"]})
    kept = Filtered(mapped, lambda batch: batch["lengths"] > 0)
    for source in (mapped, kept):
        assert read_numbers(source) == order


@pytest.mark.slow
@pytest.mark.ranks
def test_exact_gives_one_hash_on_any_number_of_processes_through_a_kill(tmp_path: Path) -> None:
    hashes = set()
    for ranks in (1, 2, 3):
        run_dir = tmp_path / f"run-{ranks}"
        kill = ("--fail-at", f"{ranks - 1}:7") if ranks > 1 else ()
        flags = ("--microbatch", 4, "--sync", "exact", "--nproc", ranks, "--run-dir", run_dir)
        hashes.add(train(JOBS / "padded.py", *flags, *kill, cwd=tmp_path)["weights_sha256"])
        found = audited(run_dir)
        assert (found["lost"], found["repeated"]) == (0, 0)
    assert len(hashes) == 1
