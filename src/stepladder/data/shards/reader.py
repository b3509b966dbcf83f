"""Reading rows of shards by index.

Whole chunks are read into a pool of fixed size, and rows are copied from the pool. Uncompressed
chunks are read from the file's own bytes straight into the pool; HDF5 tells their offsets once per
shard. Other chunks are read through h5py. Every chunk that has a checksum in the index is checked.
"""

from __future__ import annotations

import io
import os
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from stepladder.core.errors import InputError, to_one_line
from stepladder.core.order import IndexArray
from stepladder.data.shards.dataset import Shards
from stepladder.data.shards.shard import (
    H5_ERRORS,
    SHARD_INDEX,
    Shard,
    compute_checksum,
    open_h5,
    shards_error,
)
from stepladder.data.table import Column, Ragged, concatenate_blocks

MAX_OPEN_FILES = 32
MAX_OPEN_H5 = 4  # each has a cache of its own
NOT_LOADED = -1


class _Extent(NamedTuple):
    """The position of a column's rows in its file.

    Args:
        rows: The rows of each chunk of the file.
        offsets: The byte of each chunk; None if only h5py can read them.
    """

    rows: int
    offsets: IndexArray | None


class ShardReader:
    """Open shards of one process, from which rows are read in any order.

    Reading is fast where the rows of a read are in few chunks. The pool holds `num_slots` chunks.
    A process that inherits a reader over a fork must not use it; it opens the data itself.
    """

    def __init__(self, shards: Shards) -> None:
        self.shards = shards
        self.pid = os.getpid()
        self.chunk_edges = shards.chunks.edges
        self.first_chunks = np.cumsum([0, *(shard.num_chunks for shard in shards.shards)])
        num_chunks = len(self.chunk_edges) - 1
        self.num_slots = min(shards.chunks.slots, max(1, num_chunks))
        self.rows_per_slot = max(min(shard.chunk_rows, shard.rows) for shard in shards.shards)
        pool_rows = self.num_slots * self.rows_per_slot
        self.pool: dict[str, np.ndarray] = {}
        self.lists: dict[str, list[Any]] = {}  # by column and slot: Ragged
        for name, column in shards.columns.items():
            if column.is_list:
                self.lists[name] = [None] * self.num_slots
            else:
                self.pool[name] = np.empty((pool_rows, *column.shape), column.dtype)
        self.slot_of = np.full(num_chunks, NOT_LOADED, np.int64)  # by chunk
        self.chunk_of = np.full(self.num_slots, NOT_LOADED, np.int64)  # by slot
        self.last_read = np.full(self.num_slots, -1, np.int64)  # that used a slot
        self.num_reads = 0
        self.extents: dict[tuple[int, str], _Extent] = {}
        # Return the open file of a shard; one is closed when many others were opened since.
        self.get_file = lru_cache(MAX_OPEN_FILES)(self._open_file)
        self.get_h5 = lru_cache(MAX_OPEN_H5)(self._open_h5)

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.get_file.cache_clear()
        self.get_h5.cache_clear()

    def __len__(self) -> int:
        return len(self.shards)

    def read_batch(self, indices: IndexArray) -> dict[str, Any] | list[Any]:
        """Return rows in the form of the data set's batches."""
        block = self.read(indices)
        return list(block.values()) if self.shards.as_list else block

    def read(self, indices: IndexArray) -> dict[str, Any]:
        """Return rows by column.

        Args:
            indices: The rows, counted over all shards, shape (n,).

        Returns:
            For each column an array (n, *shape), or Ragged for lists.
        """
        validate_process(self.pid, self.shards)
        chunks = self.chunk_edges.searchsorted(indices, "right") - 1
        slots = self.slot_of[chunks]
        self.num_reads += 1
        if (slots == NOT_LOADED).any():
            needed = np.unique(chunks)
            if len(needed) > self.num_slots:
                middle = len(indices) // 2
                halves = [self.read(indices[:middle]), self.read(indices[middle:])]
                return concatenate_blocks(halves)
            self._load(needed)
            slots = self.slot_of[chunks]
        self.last_read[slots] = self.num_reads
        rows_in_chunk = indices - self.chunk_edges[chunks]
        pool_rows = slots * self.rows_per_slot + rows_in_chunk
        block: dict[str, Any] = {}
        for name in self.shards.columns:
            if name in self.pool:
                block[name] = self.pool[name].take(pool_rows, axis=0)
            else:
                block[name] = self._gather_lists(name, slots, rows_in_chunk)
        return block

    def _gather_lists(self, name: str, slots: IndexArray, rows_in_chunk: IndexArray) -> Ragged:
        column_lists = self.lists[name]
        parts = [np.empty(0, self.shards.columns[name].dtype)]
        lengths = [0]
        for slot, row in zip(slots.tolist(), rows_in_chunk.tolist(), strict=True):
            values, offsets = column_lists[slot]
            part = values[offsets[row] : offsets[row + 1]]
            parts.append(part)
            lengths.append(len(part))
        return Ragged(np.concatenate(parts), np.cumsum(lengths))

    # -- loading chunks ----------------------------------------------------------------------------

    def _load(self, needed: IndexArray) -> None:
        """Load chunks into the pool, over those that have not been used for longest."""
        slots = self.slot_of[needed]
        self.last_read[slots[slots != NOT_LOADED]] = self.num_reads
        missing = needed[slots == NOT_LOADED]
        oldest_slots = np.argpartition(self.last_read, len(missing) - 1)[: len(missing)]
        for chunk, slot in zip(missing.tolist(), oldest_slots.tolist(), strict=True):
            if self.chunk_of[slot] != NOT_LOADED:
                self.slot_of[self.chunk_of[slot]] = NOT_LOADED
            self.chunk_of[slot] = NOT_LOADED  # in case the next line raises
            self._load_chunk(chunk, slot)
            self.chunk_of[slot] = chunk
            self.slot_of[chunk] = slot
            self.last_read[slot] = self.num_reads

    def _load_chunk(self, chunk: int, slot: int) -> None:
        """Read all columns of a chunk into a slot, and check them."""
        shard_index = int(self.first_chunks.searchsorted(chunk, "right")) - 1
        shard = self.shards.shards[shard_index]
        chunk_in_shard = chunk - int(self.first_chunks[shard_index])
        lo, hi = shard.chunk_range(chunk_in_shard)
        for name, column in self.shards.columns.items():
            try:
                rows: Any
                if column.is_list:
                    rows = self._read_lists(shard_index, name, lo, hi)
                    self.lists[name][slot] = rows
                else:
                    first_row = slot * self.rows_per_slot
                    rows = self.pool[name][first_row : first_row + hi - lo]
                    self._read_array(shard_index, name, lo, rows)
                digest = compute_checksum(rows)
            except H5_ERRORS as error:
                raise _chunk_error(shard, chunk_in_shard, name, to_one_line(error)) from error
            if shard.checksums is not None and digest != shard.checksums[name][chunk_in_shard]:
                problem = "its bytes are not those that were written (checksum)"
                raise _chunk_error(shard, chunk_in_shard, name, problem)

    def _read_array(self, shard_index: int, name: str, lo: int, target: np.ndarray) -> None:
        """Read rows from `lo` on into `target`, as many as it has."""
        extent = self._extent(shard_index, name)
        if extent.offsets is None:
            dataset = self.get_h5(shard_index)[name]
            dataset.read_direct(target, np.s_[lo : lo + len(target)])
            return
        row_bytes = self.shards.columns[name].row_bytes
        buffer = target.reshape(-1).view(np.uint8).data
        file = self.get_file(shard_index)
        done = 0
        while done < len(target):  # a chunk of the shard may be several of the file
            file_chunk, row = divmod(lo + done, extent.rows)
            count = min(extent.rows - row, len(target) - done)
            part = buffer[done * row_bytes : (done + count) * row_bytes]
            offset = int(extent.offsets[file_chunk]) + row * row_bytes
            if os.preadv(file.fileno(), [part], offset) != len(part):
                raise OSError("the file ends early")
            done += count

    def _read_lists(self, shard_index: int, name: str, lo: int, hi: int) -> Ragged:
        """Return the lists lo to hi."""
        group = self.get_h5(shard_index)[name]
        first = int(group["ends"][lo - 1]) if lo else 0
        offsets = np.concatenate([[0], group["ends"][lo:hi] - first])
        return Ragged(group["values"][first : first + int(offsets[-1])], offsets)

    def _extent(self, shard_index: int, name: str) -> _Extent:
        if (shard_index, name) not in self.extents:
            shard = self.shards.shards[shard_index]
            with open_h5(shard.find()) as h5:
                for column_name, column in self.shards.columns.items():
                    if not column.is_list:
                        dataset = h5[column_name]
                        _validate_dataset(shard, column_name, column, dataset)
                        self.extents[shard_index, column_name] = _find_extent(h5, dataset)
        return self.extents[shard_index, name]

    def _open_file(self, shard_index: int) -> io.FileIO:
        return io.FileIO(self.shards.shards[shard_index].find())

    def _open_h5(self, shard_index: int) -> Any:
        return open_h5(self.shards.shards[shard_index].find())


def validate_process(process: int, source: object) -> None:
    """Raise InputError if this is not the process, given by its id, that has opened the source."""
    if process != os.getpid():
        name = source.path if isinstance(source, Shards) else type(source).__name__
        raise InputError(
            f"{name} was opened by process {process} and is read by its child {os.getpid()}",
            "open Shards after the fork, in the process that reads them",
        )


def _find_extent(h5: Any, dataset: Any) -> _Extent:
    """Find the bytes of an HDF5 dataset's chunks in its file.

    Only h5py can read the chunks if they are compressed, have another byte order, are not whole
    rows, or are in another file, to which a link leads.

    Returns:
        The rows of a chunk, and the offset of each chunk in bytes, which is None if only h5py can
        read it.
    """
    is_here = dataset.file.filename == h5.filename and not dataset.external
    is_plain = is_here and dataset.dtype.isnative and h5.userblock_size == 0
    if not is_plain or dataset.id.get_create_plist().get_nfilters():
        return _Extent(0, None)
    if dataset.chunks is None:
        offset = dataset.id.get_offset()
        offsets = None if offset is None else np.array([offset])
        return _Extent(max(1, len(dataset)), offsets)
    if dataset.chunks[1:] != dataset.shape[1:]:
        return _Extent(0, None)
    chunk_rows = dataset.chunks[0]
    num_chunks = -(-len(dataset) // chunk_rows)
    offsets = np.full(num_chunks, -1, np.int64)

    def record_offset(info: Any) -> None:
        offsets[info.chunk_offset[0] // chunk_rows] = info.byte_offset

    dataset.id.chunk_iter(record_offset)
    is_complete = bool((offsets >= 0).all())
    return _Extent(chunk_rows, offsets if is_complete else None)


def _validate_dataset(shard: Shard, name: str, column: Column, dataset: Any) -> None:
    """Raise InputError if the file has another array than the index says."""
    rows = len(dataset)
    shape = tuple(dataset.shape[1:])
    dtype = dataset.dtype.newbyteorder("=")
    if (rows, shape, dtype) != (shard.rows, column.shape, column.dtype):
        raise shards_error(
            shard.path.parent,
            f"{shard.path} has {rows} rows of {Column(dtype, shape)} in {name}, {SHARD_INDEX} says"
            f" {shard.rows} of {column}",
        )


def _chunk_error(shard: Shard, chunk: int, name: str, problem: str) -> InputError:
    lo, hi = shard.chunk_range(chunk)
    position = f"chunk {chunk} of {shard.num_chunks} (rows {lo} to {hi - 1}), column {name}"
    return shards_error(shard.path.parent, f"{shard.path} is damaged in {position}: {problem}")
