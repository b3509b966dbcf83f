"""`stepladder.Mixture`: each source as often as it has passes, on any number of ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from stepladder import InputError, Loader, Mixture
from stepladder.data.mixture import find_passes
from stepladder.storage.audit import audit
from stepladder.testing import check_source


class Numbers:
    """A Source of the numbers from `first` on, each with its half."""

    def __init__(self, first: int, count: int, edges: Sequence[int] | None = None) -> None:
        self.first = first
        self.count = count
        self.chunk_edges = edges

    def __len__(self) -> int:
        return self.count

    def read(self, indices: NDArray[np.int64]) -> dict[str, Any]:
        numbers = torch.from_numpy(indices + self.first)
        return {"number": numbers, "half": numbers / 2}


@pytest.mark.parametrize("edges", [None, [0, 8, 16, 20]])
def test_an_epoch_has_each_source_as_often_as_it_has_passes(
    edges: list[int] | None, tmp_path: Path
) -> None:
    mixture = Mixture([Numbers(0, 20, edges), Numbers(100, 3)], passes=[1, 5])
    check_source(mixture)
    loader = Loader(mixture, 7, run_dir=tmp_path / "run")
    batches = list(loader)
    loader.close()
    numbers = np.concatenate([batch["number"] for batch in batches])
    assert Counter(numbers.tolist()) == {**dict.fromkeys(range(20), 1), 100: 5, 101: 5, 102: 5}
    halves = np.concatenate([batch["half"] for batch in batches])
    assert halves.tolist() == (numbers / 2).tolist()
    assert audit(tmp_path / "run").ok


def test_weights_become_whole_passes() -> None:
    mixture = Mixture([Numbers(0, 1000), Numbers(2000, 70)], weights=[7, 3])
    assert mixture.passes == [5, 31]
    assert len(mixture) == 5 * 1000 + 31 * 70
    assert find_passes([10**6, 10**5], [0.5, 0.5]) == [1, 10]
    assert find_passes([5], [2.5]) == [1]


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(1, 10**9), st.floats(0.01, 1)), min_size=1, max_size=6))
def test_the_part_of_each_source_is_its_weight_within_a_hundredth(
    sources: list[tuple[int, float]],
) -> None:
    lengths, weights = zip(*sources, strict=True)
    samples = np.multiply(find_passes(lengths, weights), lengths)
    assert samples.min() > 0
    assert samples / samples.sum() == pytest.approx(np.array(weights) / sum(weights), rel=0.0101)


@pytest.mark.parametrize(
    "weights",
    [
        *([1.0], [1.0, 0.0], [1.0, float("nan")], [1.0, float("inf")], [1e308, 1e308]),
        *([1.0, 5e-324], [1.0, None], "ab", 3, [[1.0], [1.0, 2.0]]),
    ],
)
def test_weights_that_are_none_are_refused(weights: Any) -> None:
    with pytest.raises(InputError, match="a Mixture of 2 sources with weights="):
        Mixture([Numbers(0, 5), Numbers(0, 5)], weights=weights)


def test_batches_of_several_forms_are_refused() -> None:
    class Halves(Numbers):
        def read(self, indices: NDArray[np.int64]) -> dict[str, Any]:
            return {"half": super().read(indices)["half"]}

    with pytest.raises(InputError, match="give batches of several forms: 'number'"):
        Mixture([Numbers(0, 2), Halves(0, 2)]).read(np.arange(4))


def test_tensors_of_a_type_that_numpy_lacks_are_mixed() -> None:
    class Brains(Numbers):
        def read(self, indices: NDArray[np.int64]) -> dict[str, Any]:
            return {"x": torch.from_numpy(indices).to(torch.bfloat16)}

    batch = Mixture([Brains(0, 2), Brains(0, 3)]).read(np.array([4, 0, 1]))
    assert batch["x"].dtype is torch.bfloat16
    assert batch["x"].tolist() == [2, 0, 1]


def test_weights_that_need_too_many_passes_are_refused() -> None:
    with pytest.raises(InputError, match="reads a source 1,000,000,000 times in an epoch"):
        Mixture([Numbers(0, 4), Numbers(0, 4)], weights=[1, 1e-9])


def test_weights_of_what_is_no_source_are_refused() -> None:
    with pytest.raises(InputError, match="a Mixture's source is a int"):
        Mixture([5], weights=[1.0])  # type: ignore[list-item]


def test_a_source_without_chunks_beside_one_that_has_some_gets_chunks() -> None:
    mixture = Mixture([Numbers(0, 5, [0, 2, 5]), Numbers(0, 1500)], passes=[2, 1])
    assert mixture.chunk_edges is not None
    assert mixture.chunk_edges.tolist() == [0, 2, 5, 7, 10, 10 + 1024, 1510]


@pytest.mark.parametrize(
    ("sources", "passes", "named"),
    [
        ([], None, "a Mixture of 0 sources"),
        ([Numbers(0, 1)], [0], r"passes=\[0\]"),
        ([Numbers(0, 1)], [1, 2], r"a Mixture of 1 sources with passes=\[1, 2\]"),
        ([Numbers(0, 1)], [1.5], r"passes=\[1.5\]"),
        ([Numbers(0, 1)], 3, "passes=3: 'int' object is not iterable"),
        ([[1, 2]], None, "a Mixture's source is a list"),
        (Numbers(0, 1), None, "the sources of a Mixture: 'Numbers' object is not iterable"),
        ([Numbers(0, 1), Numbers(0, 0)], None, "a source of the Mixture has no samples"),
    ],
)
def test_what_is_no_mixture_is_refused(
    sources: list[Any], passes: list[int] | None, named: str
) -> None:
    with pytest.raises(InputError, match=named):
        Mixture(sources, passes)
