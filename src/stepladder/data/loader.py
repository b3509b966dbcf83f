"""The DataLoader of a Dataset: each item is read with random numbers of its own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from stepladder.core.errors import InputError, to_one_line
from stepladder.core.host_generators import seed_host
from stepladder.core.order import derive_seed
from stepladder.data.workers import PackedError, call_in_rank, call_in_worker, initialize_worker

SampleKey = tuple[int, int]  # epoch, index
Caller = Callable[..., Any]  # calls a function of the job, and handles its exceptions


def make_loader(
    dataset: Dataset[Any],
    seed: int,
    batches: Iterable[list[SampleKey]],
    num_workers: int,
    collate: Callable[[list[Any]], Any],
    pin_memory: bool,
) -> DataLoader[Any]:
    """Make a DataLoader that yields the indices of each batch together with the batch.

    Args:
        dataset: The job's Dataset.
        seed: The run's seed.
        batches: The samples of each batch.
        num_workers: The number of processes that read; 0 reads in this process.
        collate: Makes a batch of a list of items.
        pin_memory: Whether batches are copied to pinned memory.

    Returns:
        The loader. If the items of a batch cannot be read, a worker process returns a PackedError
        in place of that batch.
    """
    call = call_in_worker if num_workers else call_in_rank
    return DataLoader(
        _SeededItems(dataset, seed, call),
        batch_sampler=batches,
        num_workers=num_workers,
        collate_fn=partial(collate_items, collate, call),
        worker_init_fn=initialize_worker if num_workers else None,
        multiprocessing_context=_find_start_method() if num_workers else None,
        pin_memory=pin_memory,
    )


def _find_start_method() -> str:
    """Return how workers start: as the job has set it, else by fork.

    A forked worker is a child of its rank, so it ends with the rank, and its Dataset needs no
    pickling. From Python 3.14 on, fork is not the default.
    """
    return multiprocessing.get_start_method(allow_none=True) or "fork"


class _SeededItems(Dataset[tuple[int, Any]]):
    """The items of a Dataset with their indices; random numbers are seeded before each item."""

    def __init__(self, dataset: Dataset[Any], seed: int, call: Caller) -> None:
        self.dataset = dataset
        self.seed = seed
        self.call = call

    def __getitem__(self, sample: SampleKey) -> tuple[int, Any]:
        epoch, index = sample
        seed = derive_seed(self.seed, "sample", epoch, index)
        seed_host(seed)
        torch.default_generator.manual_seed(seed)
        return index, self.dataset[index]

    def __getitems__(self, samples: list[SampleKey]) -> Any:
        """Return all items of a batch; torch's fetcher calls it."""
        return self.call(self._read_items, samples)

    def _read_items(self, samples: list[SampleKey]) -> list[tuple[int, Any]]:
        return [self[sample] for sample in samples]


def collate_items(collate: Callable[[list[Any]], Any], call: Caller, items: Any) -> Any:
    """Return the indices and the batch of items; a PackedError is returned as it is."""
    if isinstance(items, PackedError):
        return items
    batch = call(_make_batch, collate, items)
    if isinstance(batch, PackedError):
        return batch
    return torch.tensor([index for index, _ in items]), batch


def _make_batch(collate: Callable[[list[Any]], Any], items: list[tuple[int, Any]]) -> Any:
    """Return the batch of items. Raises InputError if torch cannot collate them."""
    try:
        return collate([item for _, item in items])
    except (TypeError, RuntimeError, LookupError) as error:
        if collate is not default_collate:
            raise  # an error in the user's own function
        first_index, _ = items[0]
        raise InputError(
            f"items of the job's Dataset, from {first_index} on, do not make a batch"
            f" ({to_one_line(error)})",
            "items of one form, numbers or tensors of one shape; or collate=, a function of a list"
            " of items",
        ) from error
