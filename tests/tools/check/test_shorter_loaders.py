"""A loader of fewer batches has the first samples of the data set in its own order."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch.utils.data import DataLoader, Sampler

from stepladder.tools.check.probe.shorter_loaders import shorten


@pytest.mark.parametrize(
    ("length", "lengths"),
    [
        (100, [10, 10, 10]),
        (104, [10, 10, 4]),
        (30, [10, 10, 10]),
        (25, [10, 10, 5]),
        (40, [10, 10, 10]),
        (38, [10, 10, 8]),
        (20, [10, 10]),
        (1, [1]),
    ],
)
def test_a_shorter_loader_keeps_the_first_batches_and_the_last_one(
    length: int, lengths: list[int]
) -> None:
    class Backwards(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(length - 1, -1, -1))

        def __len__(self) -> int:
            return length

    loader = DataLoader(range(length), batch_size=10, sampler=Backwards())  # type: ignore[arg-type]
    whole = DataLoader(range(length), batch_size=10, sampler=Backwards())  # type: ignore[arg-type]
    shorten(loader, batches=3)
    assert [len(batch) for batch in loader] == lengths
    assert len(loader) == len(lengths)
    assert next(iter(loader)).tolist() == list(range(sum(lengths)))[: -1 - lengths[0] : -1]
    assert len(whole) == -(-length // 10)


@pytest.mark.parametrize("size", [1, 5])
def test_whole_batches_of_an_odd_size_stay_whole_and_are_odd_in_number(size: int) -> None:
    loader = DataLoader(range(6 * size), batch_size=size)  # type: ignore[arg-type]
    shorten(loader, batches=9)
    assert [len(batch) for batch in loader] == [size] * 5


def test_a_loader_whose_batches_have_no_size_is_left_alone() -> None:
    loader = DataLoader(range(8), batch_sampler=[[0, 1], [2, 3]])  # type: ignore[arg-type]
    shorten(loader, batches=1)
    assert len(loader) == len(list(loader)) == 2


@pytest.mark.parametrize(("workers", "left"), [(0, 0), (1, 1), (8, 2)])
def test_few_batches_are_read_by_few_workers(workers: int, left: int) -> None:
    loader = DataLoader(range(8), batch_size=2, num_workers=workers)  # type: ignore[arg-type]
    shorten(loader, batches=3)
    assert loader.num_workers == left
