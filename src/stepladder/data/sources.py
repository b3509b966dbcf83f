"""Sources: data that is read by index, one batch at a time.

A source knows nothing of ranks, and makes no collective calls.
"""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from threading import Lock
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset, IterableDataset, default_collate

from stepladder.core.errors import InputError, as_input_error
from stepladder.core.order import Chunks
from stepladder.data.loader import make_loader
from stepladder.data.shards.dataset import Shards
from stepladder.data.shards.reader import ShardReader, validate_process
from stepladder.data.source import Source, is_source, make_chunks
from stepladder.data.table import MAX_NUMBER_BYTES, Ragged
from stepladder.data.workers import PackedError, limit_start_time, stop_workers

UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)

Indices = NDArray[np.int64]
Collate = Callable[[list[Any]], Any]
Batches = Generator[tuple[Indices, Any], None, None]
Request = tuple[int, Indices]  # epoch, data-set indices of one pass
PREFETCHED_BATCHES = 4
TENSOR_KINDS = "biufc"  # NumPy's letters for the types that tensors have
ROWS_HINT = (
    "tensors or arrays with a row for each sample, or a list or dict of them; for open_data,"
    " columns= names those of numbers, and decode= makes numbers of others"
)
SOURCE_MEMBERS = ("__len__", "chunk_edges", "read(indices)")


class BatchSource(Protocol):
    """Data of a known length that yields batches in the requested order."""

    def __len__(self) -> int: ...

    def batches(self, requests: Iterable[Request]) -> Batches:
        """Yield for each request the indices that were read, and the batch on the device."""
        ...


class TensorSource:
    """Tensors in memory. A batch takes one index operation per tensor."""

    def __init__(self, data: Any, device: torch.device) -> None:
        """Move the tensors to the device.

        Args:
            data: A tensor or an array, or a tuple, list or dict of them, a row per sample.
            device: The training device.

        Raises:
            InputError: If the tensors hold no numbers, are not dense, or differ in length.
        """
        self.names = list(data) if isinstance(data, dict) else None
        self.is_single = isinstance(data, torch.Tensor)
        # An array of strings or objects, or of another byte order, cannot be a tensor.
        with as_input_error(
            "the job's data cannot be tensors",
            "numbers only, in the byte order of this machine",
            (TypeError, ValueError),
        ):
            tensors = [_make_tensor(array) for array in _list_columns(data)]
        for tensor in tensors:
            _validate_tensor(tensor)
        self.tensors = [tensor.detach().to(device) for tensor in tensors]
        self.device = device
        _validate_lengths(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors[0])

    def batches(self, requests: Iterable[Request]) -> Batches:
        """Yield for each request its indices and their rows, in the form of the data."""
        for _, indices in requests:
            rows = torch.from_numpy(indices)
            if self.device.type != "cpu":
                rows = rows.to(self.device, non_blocking=True)
            # index_select is faster, but does not know all types.
            parts = [
                tensor[rows] if tensor.dtype in UNSIGNED else tensor.index_select(0, rows)
                for tensor in self.tensors
            ]
            if self.names is not None:
                yield indices, dict(zip(self.names, parts, strict=True))
            elif self.is_single:
                yield indices, parts[0]
            else:
                yield indices, parts


def _make_tensor(array: Any) -> torch.Tensor:
    """Return a tensor or an array as a tensor, with a copy only if torch needs one."""
    if np.ma.is_masked(array):
        raise ValueError("some numbers of an array are masked")
    if isinstance(array, np.ndarray) and min(array.strides, default=0) < 0:
        array = array.copy()
    return torch.as_tensor(array)


def _validate_tensor(tensor: torch.Tensor) -> None:
    """Raise InputError for a tensor whose rows cannot be selected by index."""
    if tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_nested:
        return
    if tensor.is_nested:
        kind = "a nested tensor"
    else:
        kind = f"a tensor ({tensor.layout}, on {tensor.device})"
    raise InputError(f"the job's data is {kind}", "dense tensors, on the CPU or a GPU")


def _validate_lengths(tensors: list[torch.Tensor]) -> None:
    hint = "give each one row per sample"
    if any(tensor.ndim == 0 for tensor in tensors):
        raise InputError("the data's tensors hold a single number", hint)
    lengths = {len(tensor) for tensor in tensors}
    if len(lengths) != 1:
        raise InputError(f"the data's tensors have different lengths {sorted(lengths)}", hint)


class StreamSource:
    """Reads the samples of a Source or of shards in a thread, PREFETCHED_BATCHES batches ahead."""

    def __init__(self, source: Source | Shards, device: torch.device) -> None:
        self.source = source
        self.device = device
        self.lock = Lock()  # training, evaluation and a recomputed batch read at the same time

    def __len__(self) -> int:
        return len(self.source)

    def batches(self, requests: Iterable[Request]) -> Batches:
        """Yield for each request its indices and their batch."""
        process = os.getpid()
        with ExitStack() as stack:
            read: Callable[[Indices], Any] = self._read_alone
            if isinstance(self.source, Shards):  # a Source opens what it needs by itself
                read = stack.enter_context(ShardReader(self.source)).read_batch
            batches = (
                (indices, self._to_device(read(indices), len(indices))) for _, indices in requests
            )
            with closing(_prefetch(batches)) as prefetched:
                for batch in prefetched:
                    yield batch
                    validate_process(process, self.source)

    def _read_alone(self, indices: Indices) -> Any:
        assert not isinstance(self.source, Shards), "each reader of shards is used by one thread"
        with self.lock:
            return self.source.read(indices)

    def _to_device(self, batch: Any, rows: int) -> Any:
        """Return a batch on the device, each part of which must have a row for each sample."""
        if isinstance(batch, Ragged):
            offsets = self._to_device(batch.offsets, rows + 1)
            return Ragged(self._to_device(batch.values, len(batch.values)), offsets)
        if isinstance(batch, dict):
            return {name: self._to_device(part, rows) for name, part in batch.items()}
        if isinstance(batch, (tuple, list)):
            return [self._to_device(part, rows) for part in batch]
        problem = _describe_problem(batch, rows)
        if problem:
            name = type(self.source).__name__
            raise InputError(f"a batch of the job's {name} {problem}", ROWS_HINT)
        tensor = _make_tensor(batch)
        if self.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)


def _describe_problem(part: Any, rows: int) -> str:
    """Return why a part of a batch cannot be a tensor with this number of rows; "" if it can."""
    if not isinstance(part, (np.ndarray, torch.Tensor)):
        return f"holds a {type(part).__name__}"
    if isinstance(part, np.ndarray) and not _is_tensor_type(part.dtype):
        return f"holds an array of {part.dtype}"
    if part.shape[:1] != (rows,):
        return f"of {rows} samples holds an array of shape {list(part.shape)}"
    return ""


def _is_tensor_type(dtype: np.dtype[Any]) -> bool:
    """Return whether torch has such numbers, in the byte order of this machine."""
    max_bytes = MAX_NUMBER_BYTES
    if dtype.kind == "c":  # of two numbers
        max_bytes *= 2
    return dtype.kind in TENSOR_KINDS and dtype.isnative and dtype.itemsize <= max_bytes


def _prefetch(items: Generator[Any, None, None]) -> Generator[Any, None, None]:
    """Yield the items of a generator, which a thread runs PREFETCHED_BATCHES items ahead.

    Raises:
        Exception: Whatever the generator raises.
    """
    pool = ThreadPoolExecutor(1, "read-ahead")
    try:
        futures = deque(pool.submit(next, items, None) for _ in range(PREFETCHED_BATCHES))
        while (item := futures.popleft().result()) is not None:
            futures.append(pool.submit(next, items, None))
            yield item
    finally:
        pool.shutdown(cancel_futures=True)


class DatasetSource:
    """A map-style Dataset that DataLoader workers read.

    Before each item, the random generators of Python, NumPy and torch are seeded by (seed, epoch,
    index). So augmentation does not depend on the worker or the rank, and a resumed run repeats it.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        device: torch.device,
        seed: int,
        num_workers: int,
        collate: Collate | None,
    ) -> None:
        self.dataset = dataset
        self.device = device
        self.seed = seed
        self.num_workers = num_workers
        self.collate = collate or default_collate

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def batches(self, requests: Iterable[Request]) -> Batches:
        """Yield for each request its indices and their batch.

        Raises:
            Exception: Whatever the Dataset raises.
        """
        keys = ([(epoch, int(index)) for index in indices] for epoch, indices in requests)
        pin_memory = self.device.type == "cuda"
        loader = make_loader(
            self.dataset, self.seed, keys, self.num_workers, self.collate, pin_memory
        )
        # Workers inherit the mask, and unblock SIGTERM once they have set their signal handlers.
        previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            iterator = iter(loader)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
        watchdog = limit_start_time(iterator) if self.num_workers else None
        try:
            for item in iterator:
                if isinstance(item, PackedError):
                    item.reraise()
                indices, batch = item
                yield indices.numpy(), _move_to_device(batch, self.device)
        finally:
            if watchdog is not None:
                watchdog.cancel()
                stop_workers(iterator)


def _move_to_device(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {name: _move_to_device(part, device) for name, part in batch.items()}
    if isinstance(batch, (tuple, list)):
        parts = [_move_to_device(part, device) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else parts  # a named tuple
    return batch


# -- the source of a job's data --------------------------------------------------------------------


def open_source(
    data: Any, device: torch.device, seed: int, num_workers: int = 0, collate: Collate | None = None
) -> BatchSource:
    """Make the source of a job's data.

    Args:
        data: Tensors (one, or a tuple or dict of them), Shards, a Source, or a map-style Dataset.
        device: The training device.
        seed: The run's seed, for the random numbers of a Dataset.
        num_workers: The number of processes that read a Dataset; 0 reads it in this process.
        collate: Makes a batch of a list of items of a Dataset, as DataLoader's collate_fn does.

    Returns:
        The source that fits the type of the data, which gives its batches on `device`.

    Raises:
        InputError: The data have another type.
    """
    if isinstance(data, Shards) or is_source(data):
        return StreamSource(data, device)
    _validate_not_iterable(data)
    columns = _list_columns(data)
    if columns and all(isinstance(column, (torch.Tensor, np.ndarray)) for column in columns):
        return TensorSource(data, device)
    if _is_map_style(data):
        return DatasetSource(data, device, seed, num_workers, collate)
    raise InputError(
        f"the job's data is a {type(data).__name__}",
        "give tensors, a tuple or dict of tensors, Shards, a map-style Dataset, or a Source:"
        f" {', '.join(SOURCE_MEMBERS)}",
    )


def _validate_not_iterable(data: Any) -> None:
    """Raise InputError for a Dataset that is read from its start to its end."""
    if not isinstance(data, IterableDataset):
        return
    raise InputError(
        f"the job's data is an IterableDataset ({type(data).__name__}), which chooses its own"
        " samples: ranks and resumed runs read by index, so that each sample counts once per epoch",
        "write it once as shards: write_shards(samples, DIR); or give it len, chunk_edges and"
        " read(indices), as docs/source.md shows",
    )


def find_chunks(data: Any) -> Chunks | None:
    """Return the chunks of a job's data, which decide the order of samples; None without any.

    Raises:
        InputError: The chunk edges of a Source are not those of chunks.
    """
    if isinstance(data, Shards):
        return data.chunks
    return make_chunks(data) if is_source(data) else None


def is_sorted_by_length(data: Any) -> bool:
    """Return whether batches of a job's data shall hold samples of similar lengths."""
    return is_source(data) and getattr(data, "sorted_by_length", False) is True


def _list_columns(data: Any) -> list[Any]:
    """Return a dict's values, a tuple's or list's items, or the data itself as the only column."""
    if isinstance(data, dict):
        return list(data.values())
    if isinstance(data, (tuple, list)):
        return list(data)
    return [data]


def _is_map_style(data: Any) -> bool:
    """Return whether the data is a map-style Dataset: it has a length, and `data[i]` is a sample.

    Not so for a string, for a tuple or dict that holds tensors (they are columns, not samples), and
    for a pandas object (its `data[i]` is a column).
    """
    if isinstance(data, (str, bytes, type, IterableDataset)):
        return False
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__") or hasattr(data, "iloc"):
        return False
    problem = f"len() of the job's {type(data).__name__} fails"
    with as_input_error(problem, "a number of samples", (TypeError, ValueError)):
        len(data)
    has_columns = isinstance(data, (tuple, dict))
    return not (has_columns and any(isinstance(c, torch.Tensor) for c in _list_columns(data)))
