"""Sources: data read by index, a whole batch at a time. Knows no ranks, makes no collective."""

from __future__ import annotations

import multiprocessing
import random
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from stepladder.core.errors import InputError, as_input_error, to_one_line
from stepladder.core.order import derive_seed
from stepladder.data.shards.dataset import Shards
from stepladder.data.shards.reader import Reader
from stepladder.data.table import Ragged
from stepladder.data.workers import WorkerFailure, end_workers, in_rank, in_worker, serve_one_rank

Indices = NDArray[np.int64]
Collate = Callable[[list[Any]], Any]
Batches = Generator[tuple[Indices, Any], None, None]
Request = tuple[int, Indices]  # epoch, data-set indices of one pass
BATCHES_AHEAD = 4


class Source(Protocol):
    """Data of a known length that hands out batches in the order asked for."""

    def __len__(self) -> int: ...

    def batches(self, requests: Iterable[Request]) -> Batches:
        """Per request the indices that were really read, and the batch on the training device."""
        ...


class TensorSource:
    """Tensors in memory: one index operation per tensor and batch, never a sample at a time."""

    def __init__(self, data: Any, device: torch.device) -> None:
        self.names = list(data) if isinstance(data, dict) else None
        self.bare = isinstance(data, torch.Tensor)
        with as_input_error(
            "the job's data cannot be tensors", "numbers only", (TypeError,)
        ):  # arrays of texts or objects
            tensors = list(map(torch.as_tensor, parts_of(data)))
        if odd := [t for t in tensors if not holds_rows(t)]:
            kind = (
                "a nested tensor"
                if odd[0].is_nested
                else f"a tensor ({odd[0].layout}, on {odd[0].device})"
            )
            raise InputError(f"the job's data is {kind}", "dense tensors, on the CPU or a GPU")
        self.tensors = [tensor.detach().to(device) for tensor in tensors]
        self.device = device
        if any(tensor.ndim == 0 for tensor in self.tensors):
            raise InputError(
                "the data's tensors hold a single number", "give each one row per sample"
            )
        lengths = {len(tensor) for tensor in self.tensors}
        if len(lengths) != 1:
            raise InputError(
                f"the data's tensors have different lengths {sorted(lengths)}",
                "give each one row per sample",
            )

    def __len__(self) -> int:
        return len(self.tensors[0])

    def batches(self, requests: Iterable[Request]) -> Batches:
        for _, indices in requests:
            rows = torch.from_numpy(indices)
            if self.device.type != "cpu":
                rows = rows.to(self.device, non_blocking=True)
            parts = [tensor.index_select(0, rows) for tensor in self.tensors]
            if self.names is not None:
                yield indices, dict(zip(self.names, parts, strict=True))
            else:
                yield indices, parts[0] if self.bare else parts


class StreamSource:
    """Rows of shards as tensors on `device`. Memory: the reader's pool, and the batches read ahead."""

    def __init__(self, shards: Shards, device: torch.device) -> None:
        self.shards, self.device = shards, device

    def __len__(self) -> int:
        return len(self.shards)

    def batches(self, requests: Iterable[Request]) -> Batches:
        """Per request the indices that were read, and their rows: a dict by column, or a list."""
        with Reader(self.shards) as reader:
            batches = ((indices, self._batch(reader.read(indices))) for _, indices in requests)
            with closing(ahead(batches)) as items:
                for item in items:
                    yield item
                    reader.refuse_inherited()

    def _batch(self, arrays: dict[str, Any]) -> Any:
        batch = {name: self._tensor(array) for name, array in arrays.items()}
        return list(batch.values()) if self.shards.as_list else batch

    def _tensor(self, array: Any) -> Any:
        if isinstance(array, Ragged):
            return Ragged(*map(self._tensor, array))
        tensor = torch.from_numpy(array)
        if self.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)


def ahead(items: Generator[Any, None, None]) -> Generator[Any, None, None]:
    """The items, taken by a thread, at most BATCHES_AHEAD before they are asked for. Raises what they raise."""
    pool = ThreadPoolExecutor(1, "read-ahead")
    try:
        coming = deque(pool.submit(next, items, None) for _ in range(BATCHES_AHEAD))
        while (item := coming.popleft().result()) is not None:
            coming.append(pool.submit(next, items, None))
            yield item
    finally:
        pool.shutdown(cancel_futures=True)


class DatasetSource:
    """A map-style Dataset read through DataLoader workers.

    Before each item, Python's, NumPy's and torch's generators are seeded by (seed, epoch, sample):
    augmentation does not depend on the worker, the rank or a resume.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        device: torch.device,
        seed: int,
        num_workers: int,
        collate: Collate | None,
    ) -> None:
        self.dataset, self.device, self.seed, self.num_workers = dataset, device, seed, num_workers
        self.collate = collate or default_collate

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def batches(self, requests: Iterable[Request]) -> Batches:
        """Yield per request the indices that were read, and their batch. Raises what the Dataset raises."""
        loader = DataLoader(
            _KeyedItems(self.dataset, self.seed, in_worker if self.num_workers else in_rank),
            batch_sampler=(
                [(epoch, int(index)) for index in indices] for epoch, indices in requests
            ),
            num_workers=self.num_workers,
            collate_fn=partial(_collate, self.collate, in_worker if self.num_workers else in_rank),
            worker_init_fn=serve_one_rank if self.num_workers else None,
            multiprocessing_context=_start_method() if self.num_workers else None,
            pin_memory=self.device.type == "cuda",
        )
        before = signal.pthread_sigmask(
            signal.SIG_BLOCK, {signal.SIGTERM}
        )  # until workers have their handlers
        try:
            items = iter(loader)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        try:
            for item in items:
                if isinstance(item, WorkerFailure):
                    item.raise_it()
                indices, batch = item
                yield indices.numpy(), _to(batch, self.device)
        finally:
            if self.num_workers:
                end_workers(items)


def _start_method() -> str:
    """Return how workers start: as the job has set it, else by fork, which is not Python 3.14's default.

    A forked worker is a child of its rank, dies with it, and needs no Dataset that can be pickled.
    """
    return multiprocessing.get_start_method(allow_none=True) or "fork"


class _KeyedItems(Dataset[tuple[int, Any]]):
    """The items of a Dataset, each with its index, read with generators that are seeded by (seed, epoch, index).

    guard: calls the Dataset, and hands its exceptions on.
    """

    def __init__(self, dataset: Dataset[Any], seed: int, guard: Callable[..., Any]) -> None:
        self.dataset, self.seed, self.guard = dataset, seed, guard

    def __getitem__(self, place: tuple[int, int]) -> tuple[int, Any]:
        epoch, index = place
        seed = derive_seed(self.seed, "sample", epoch, index)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.default_generator.manual_seed(seed)
        return index, self.dataset[index]

    def __getitems__(self, places: list[tuple[int, int]]) -> Any:
        """Return all items of a batch, for torch's fetcher."""
        return self.guard(self._items, places)

    def _items(self, places: list[tuple[int, int]]) -> list[tuple[int, Any]]:
        return [self[place] for place in places]


def _collate(collate: Collate, guard: Callable[..., Any], items: Any) -> Any:
    """Return the batch of the items and their indices; a WorkerFailure passes through."""
    if isinstance(items, WorkerFailure):
        return items
    batch = guard(_batch_of, collate, items)
    if isinstance(batch, WorkerFailure):
        return batch
    return torch.tensor([index for index, _ in items]), batch


def _batch_of(collate: Collate, items: list[tuple[int, Any]]) -> Any:
    """Return the batch. Raises InputError where the items do not go together."""
    try:
        return collate([item for _, item in items])
    except (TypeError, RuntimeError, LookupError) as error:
        if collate is not default_collate:
            raise  # the user's own
        raise InputError(
            f"items of the job's Dataset, from {items[0][0]} on, do not make a batch ({to_one_line(error)})",
            "items of one form, numbers or tensors of one shape; or collate=, a function of a list of items",
        ) from error


def _to(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {name: _to(part, device) for name, part in batch.items()}
    if isinstance(batch, (tuple, list)):
        return [_to(part, device) for part in batch]
    return batch


def parts_of(data: Any) -> list[Any]:
    """A dict's values, a tuple's or list's items, or the one thing that it is."""
    return list(
        data.values()
        if isinstance(data, dict)
        else data
        if isinstance(data, (tuple, list))
        else [data]
    )


def holds_rows(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not (tensor.is_meta or tensor.is_nested)


def is_map_style(data: Any, parts: list[Any]) -> bool:
    """Whether it hands out items by number. No text, and no columns of which some are tensors."""
    if isinstance(data, (str, bytes, type, IterableDataset)) or not hasattr(data, "__getitem__"):
        return False
    if not hasattr(data, "__len__") or hasattr(
        data, "iloc"
    ):  # pandas': by number they give columns
        return False
    with as_input_error(
        f"len() of the job's {type(data).__name__} fails",
        "a number of samples",
        (TypeError, ValueError),
    ):
        len(data)
    return not (
        isinstance(data, (tuple, dict)) and any(isinstance(part, torch.Tensor) for part in parts)
    )


def open_source(
    data: Any, device: torch.device, seed: int, num_workers: int = 0, collate: Collate | None = None
) -> Source:
    """The source for a job's data: tensors (alone, or a tuple or dict of them), Shards, or a map-style Dataset."""
    if isinstance(data, Shards):
        return StreamSource(data, device)
    parts = parts_of(data)
    if parts and all(isinstance(part, (torch.Tensor, np.ndarray)) for part in parts):
        return TensorSource(data, device)
    if is_map_style(data, parts):
        return DatasetSource(data, device, seed, num_workers, collate)
    raise InputError(
        f"the job's data is a {type(data).__name__}",
        "give tensors, a tuple or dict of tensors, Shards, or a map-style Dataset",
    )
