"""`stepladder.Packed`: every token of every document once, in blocks that are nearly full."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from stepladder import InputError, Loader, Packed
from stepladder.data.packing import pack
from stepladder.testing import check_source


def make_documents(lengths: list[int]) -> list[NDArray[np.int64]]:
    """Documents whose tokens all differ: 1000 * number + place."""
    return [1000 * number + np.arange(length) for number, length in enumerate(lengths)]


def read_all(packed: Packed) -> dict[str, NDArray[np.int64]]:
    return packed.read(np.arange(len(packed)))


@given(st.lists(st.integers(0, 40), min_size=1).filter(any), st.integers(1, 16))
def test_every_token_is_in_one_block(lengths: list[int], block_size: int) -> None:
    documents = make_documents(lengths)
    batch = read_all(Packed(documents, block_size))
    is_text = batch["documents"] > 0
    assert sorted(batch["tokens"][is_text].tolist()) == np.concatenate(documents).tolist()
    assert not batch["tokens"][~is_text].any()
    has_target = batch["targets"] != -100
    assert not (has_target & ~is_text).any()
    # Each token but the last of a document has the next one as its target.
    assert has_target.sum() == sum(lengths) - np.count_nonzero(lengths)
    assert (batch["targets"] == batch["tokens"] + 1)[has_target].all()


def test_a_block_shows_where_its_documents_begin() -> None:
    batch = read_all(Packed(make_documents([3, 2]), 6))
    assert {name: array.tolist() for name, array in batch.items()} == {
        "tokens": [[0, 1, 2, 1000, 1001, 0]],
        "targets": [[1, 2, -100, 1001, -100, -100]],
        "positions": [[0, 1, 2, 0, 1, 0]],
        "documents": [[1, 1, 1, 2, 2, 0]],
    }


@given(st.lists(st.integers(0, 50), max_size=60), st.integers(1, 20))
def test_no_two_blocks_would_fit_into_one(lengths: list[int], block_size: int) -> None:
    """Which bounds what is wasted: all blocks but one are more than half full."""
    pieces = pack(np.array(lengths, np.int64), block_size)
    used = [int(pieces.lengths[lo:hi].sum()) for lo, hi in pairwise(pieces.block_edges)]
    assert all(0 < size <= block_size for size in used)
    assert len(used) < 2 or sum(sorted(used)[:2]) > block_size


def test_lengths_as_those_of_web_pages_fill_the_blocks() -> None:
    lengths = np.random.default_rng(0).lognormal(6, 1.2, 20_000).astype(np.int64) + 1
    packed = Packed(range(20_000), 2048, lengths)
    assert packed.fill > 0.999


class Texts:
    """A Source of documents in chunks of 50."""

    def __init__(self, lengths: list[int]) -> None:
        self.documents = make_documents(lengths)
        self.chunk_edges = [*range(0, len(lengths), 50), len(lengths)]

    def __len__(self) -> int:
        return len(self.documents)

    def read(self, indices: NDArray[np.int64]) -> list[Any]:
        return [self.documents[index] for index in indices]


def test_documents_in_chunks_are_packed_with_their_neighbours() -> None:
    lengths = np.random.default_rng(0).integers(1, 12, 2990).tolist()
    packed = Packed(Texts(lengths), 32)
    check_source(packed)
    assert packed.fill > 0.97
    edges = packed.chunk_edges
    assert edges is not None and len(edges) > 5
    firsts = []
    for lo, hi in pairwise(edges):
        documents = packed.read(np.arange(lo, hi))["tokens"] // 1000
        firsts.append((documents[documents > 0].min(), documents.max()))
    assert all(last < first for (_, last), (first, _) in pairwise(firsts))


def test_a_loader_gives_blocks() -> None:
    packed = Packed(make_documents([5, 9, 3, 8, 2]), 8)
    loader = Loader(packed, 2)
    given = [batch["tokens"][batch["documents"] > 0] for batch in loader]
    loader.close()
    assert (
        sorted(np.concatenate(given).tolist())
        == np.concatenate(make_documents([5, 9, 3, 8, 2])).tolist()
    )


class Labels(Texts):
    """A source of two columns, none of which is of lists, as `open_data(columns=...)` may be."""

    def read(self, indices: NDArray[np.int64]) -> list[Any]:
        return [indices]


@pytest.mark.parametrize(
    ("documents", "lengths", "named"),
    [
        ([[1, 2, 3], [4]], [3, 2], "document 1 has 1 tokens, and was packed as one of 2"),
        ([[1, 2, 3], [4]], [2, 1], "document 0 has 3 tokens, and was packed as one of 2"),
        ([np.array([0.5, 1.5])], None, "holds float64 of 1 axes"),
        ([np.ones((2, 3), np.int64)], None, "holds int64 of 2 axes"),
    ],
)
def test_no_token_is_lost_or_changed_unseen(
    documents: list[Any], lengths: list[int] | None, named: str
) -> None:
    with pytest.raises(InputError, match=named):
        read_all(Packed(documents, 4, lengths))


@pytest.mark.parametrize(
    ("documents", "options", "named"),
    [
        ([[1], [2]], {"lengths": [1]}, "lengths has 1 numbers, and there are 2 documents"),
        ([[1], [2]], {"lengths": [-1, 2]}, "a document has the length -1"),
        ([[1], [2]], {"lengths": [1.5, 2]}, "lengths holds float64, not whole numbers"),
        ([[], []], {}, "the documents hold no token"),
        (["one", "two"], {}, "the documents are texts"),
        ((text for text in ([1], [2])), {}, "the documents are a generator"),
        ([1, 2], {}, "the documents are no arrays: object of type 'int' has no len"),
        (Labels([1] * 5), {}, "of 5 documents, 1 are read"),
        ([[1]], {"block_size": 0}, "block_size=0"),
        ([[1]], {"block_size": 2.5}, r"block_size=2\.5"),
        ([[1]], {"block_size": True}, "block_size=True"),
        ([[1], [2]], {"lengths": [[1], [1, 2]]}, "lengths: setting an array element"),
        ({"a": [1]}, {}, "the documents are a dict"),
        ([{"tokens": [1]}], {}, "the documents are dicts"),
        ({1, 2}, {}, "the documents are a set"),
    ],
)
def test_what_cannot_be_packed_is_refused(
    documents: Any, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(InputError, match=named):
        Packed(documents, **{"block_size": 4, **options})
