"""Reading rows of shards by index: whole chunks into a pool of fixed size, rows gathered from the
pool.

Uncompressed chunks are read from the file's own bytes, whose places HDF5 says once per shard,
straight into the pool; others through h5py. Every chunk that an index has a checksum of is checked.
"""

from __future__ import annotations

import io
import os
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import xxhash

from stepladder.core.errors import InputError, to_one_line
from stepladder.core.order import Order
from stepladder.data.shards.dataset import H5_ERRORS, INDEX, Shard, Shards, bad_shards
from stepladder.data.table import Column, Ragged, join

MOST_FILES = 32  # open at a time
MOST_H5 = 4  # of those read through h5py, each with a cache of its own


class Extent(NamedTuple):
    """Where a column's rows lie in the file: real chunks of `rows` rows at byte `offsets`; None:
    ask h5py.
    """

    rows: int
    offsets: Order | None


class Reader:
    """Open shards of one process; reads rows in any order, quickly where few chunks have them.

    Holds `slots` chunks. A process that inherits it over a fork is refused: open the data there.
    """

    def __init__(self, shards: Shards) -> None:
        self.shards, self.pid = shards, os.getpid()
        self.edges = shards.chunks.edges
        self.first_chunks = np.cumsum([0, *(shard.num_chunks for shard in shards.shards)])
        self.num_slots = min(shards.chunks.slots, max(1, len(self.edges) - 1))
        self.rows_per_slot = max(min(s.chunk_rows, s.rows) for s in shards.shards)
        size = self.num_slots * self.rows_per_slot
        self.pool = {
            name: np.empty((size, *column.shape), column.dtype)
            for name, column in shards.columns.items()
            if not column.is_list
        }
        self.lists: dict[str, list[Any]] = {
            name: [None] * self.num_slots
            for name, column in shards.columns.items()
            if column.is_list
        }
        self.slot_of = np.full(len(self.edges) - 1, -1, np.int64)
        self.chunk_of = np.full(self.num_slots, -1, np.int64)
        self.used = np.full(self.num_slots, -1, np.int64)  # the read that a slot was last used by
        self.reads = 0
        self.extents: dict[tuple[int, str], Extent] = {}
        self.files: OrderedDict[int, io.FileIO] = OrderedDict()
        self.h5: OrderedDict[int, Any] = OrderedDict()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        if self.pid == os.getpid():
            for opened in (*self.files.values(), *self.h5.values()):
                opened.close()
        self.files.clear()
        self.h5.clear()

    def refuse_inherited(self) -> None:
        if self.pid != os.getpid():
            raise InputError(
                f"{self.shards.path} was opened by process {self.pid} and is read by its child {os.getpid()}",
                "open Shards after the fork, in the process that reads them",
            )

    def read(self, indices: Order) -> dict[str, Any]:
        """Rows by data-set index: per column an array (len(indices), *shape), or Ragged for lists."""
        self.refuse_inherited()
        chunks = self.edges.searchsorted(indices, "right") - 1
        slots = self.slot_of[chunks]
        self.reads += 1
        if (slots < 0).any():
            wanted = np.unique(chunks)
            if len(wanted) > self.num_slots:
                middle = len(indices) // 2
                return join([self.read(indices[:middle]), self.read(indices[middle:])])
            self._load(wanted)
            slots = self.slot_of[chunks]
        self.used[slots] = self.reads
        places = indices - self.edges[chunks]
        rows = slots * self.rows_per_slot + places
        return {
            name: self.pool[name].take(rows, axis=0)
            if name in self.pool
            else self._lists(name, slots, places)
            for name in self.shards.columns
        }

    def _lists(self, name: str, slots: Order, places: Order) -> Ragged:
        held, parts = self.lists[name], []
        for slot, place in zip(slots.tolist(), places.tolist(), strict=True):
            ends, values = held[slot]
            parts.append(values[ends[place] : ends[place + 1]])
        empty = np.empty(0, self.shards.columns[name].dtype)
        return Ragged(np.concatenate([empty, *parts]), np.cumsum([0, *map(len, parts)]))

    # -- loading -----------------------------------------------------------------------------------

    def _load(self, wanted: Order) -> None:
        """Bring these chunks into the pool, over those that were not used for longest."""
        slots = self.slot_of[wanted]
        self.used[slots[slots >= 0]] = self.reads
        missing = wanted[slots < 0]
        victims = np.argpartition(self.used, len(missing) - 1)[: len(missing)]
        for chunk, slot in zip(missing.tolist(), victims.tolist(), strict=True):
            if self.chunk_of[slot] >= 0:
                self.slot_of[self.chunk_of[slot]] = -1
            self.chunk_of[slot] = -1
            self._load_one(chunk, slot)
            self.chunk_of[slot], self.slot_of[chunk], self.used[slot] = chunk, slot, self.reads

    def _load_one(self, chunk: int, slot: int) -> None:
        number = int(self.first_chunks.searchsorted(chunk, "right")) - 1
        shard, place = self.shards.shards[number], chunk - int(self.first_chunks[number])
        lo, hi = place * shard.chunk_rows, min((place + 1) * shard.chunk_rows, shard.rows)
        for name, column in self.shards.columns.items():
            try:
                if column.is_list:
                    ends, values = self._read_lists(number, name, lo, hi)
                    self.lists[name][slot] = ends, values
                    digest = xxhash.xxh3_64_intdigest(
                        values.data, seed=xxhash.xxh3_64_intdigest(ends.data)
                    )
                else:
                    start = slot * self.rows_per_slot
                    target = self.pool[name][start : start + hi - lo]
                    self._read_array(number, name, lo, target)
                    digest = xxhash.xxh3_64_intdigest(target.data)
            except H5_ERRORS as error:
                raise damaged(shard, place, name, to_one_line(error)) from error
            if shard.checksums is not None and digest != shard.checksums[name][place]:
                raise damaged(
                    shard, place, name, "its bytes are not those that were written (checksum)"
                )

    def _read_array(self, number: int, name: str, lo: int, target: np.ndarray) -> None:
        where = self._extent(number, name)
        if where.offsets is None:
            self._h5(number)[name].read_direct(target, np.s_[lo : lo + len(target)])
            return
        row_bytes, done = self.shards.columns[name].row_bytes, 0
        room = target.reshape(-1).view(np.uint8).data
        path = self.shards.shards[number].path
        file = _kept(self.files, number, MOST_FILES, lambda: io.FileIO(path))
        while done < len(target):
            real, within = divmod(lo + done, where.rows)
            count = min(where.rows - within, len(target) - done)
            part = room[done * row_bytes : (done + count) * row_bytes]
            if os.preadv(
                file.fileno(), [part], int(where.offsets[real]) + within * row_bytes
            ) != len(part):
                raise OSError("the file ends early")
            done += count

    def _read_lists(self, number: int, name: str, lo: int, hi: int) -> tuple[Order, np.ndarray]:
        """Ends of lists lo..hi within their values, from 0 on, and the values."""
        group = self._h5(number)[name]
        first = int(group["ends"][lo - 1]) if lo else 0
        ends = np.concatenate([[0], group["ends"][lo:hi] - first])
        return ends, group["values"][first : first + int(ends[-1])]

    def _extent(self, number: int, name: str) -> Extent:
        if (number, name) not in self.extents:
            import h5py

            shard = self.shards.shards[number]
            with h5py.File(shard.path, "r", locking=False) as h5:
                for column_name, column in self.shards.columns.items():
                    if not column.is_list:
                        array = h5[column_name]
                        refuse_other_array(shard, column_name, column, array)
                        self.extents[number, column_name] = extent_of(h5, array)
        return self.extents[number, name]

    def _h5(self, number: int) -> Any:
        import h5py

        path = self.shards.shards[number].path
        return _kept(self.h5, number, MOST_H5, lambda: h5py.File(path, "r", locking=False))


def _kept(held: OrderedDict[int, Any], number: int, most: int, opened: Callable[[], Any]) -> Any:
    """The open file of a shard; the one not used for longest makes room."""
    if number not in held:
        held[number] = opened()
        if len(held) > most:
            held.popitem(last=False)[1].close()
    held.move_to_end(number)
    return held[number]


def extent_of(h5: Any, array: Any) -> Extent:
    """Where the rows are in the file, if they lie there as they are in memory and in whole rows."""
    plain = array.dtype.isnative and h5.userblock_size == 0 and not array.external
    if not plain or array.id.get_create_plist().get_nfilters():
        return Extent(0, None)
    if array.chunks is None:
        offset = array.id.get_offset()
        return Extent(max(1, len(array)), None if offset is None else np.array([offset]))
    if array.chunks[1:] != array.shape[1:]:
        return Extent(0, None)
    offsets = np.full(-(-len(array) // array.chunks[0]), -1, np.int64)

    def note(info: Any) -> None:
        offsets[info.chunk_offset[0] // array.chunks[0]] = info.byte_offset

    array.id.chunk_iter(note)
    return Extent(array.chunks[0], None if (offsets < 0).any() else offsets)


def refuse_other_array(shard: Shard, name: str, column: Column, array: Any) -> None:
    found = (len(array), tuple(array.shape[1:]), array.dtype.newbyteorder("="))
    if found != (shard.rows, column.shape, column.dtype):
        raise bad_shards(
            shard.path.parent,
            f"{shard.path} has {len(array)} rows of {Column(found[2], found[1])} in {name}, {INDEX} says"
            f" {shard.rows} of {column}",
        )


def damaged(shard: Shard, place: int, name: str, what: str) -> InputError:
    lo, hi = place * shard.chunk_rows, min((place + 1) * shard.chunk_rows, shard.rows)
    where = f"chunk {place} of {shard.num_chunks} (rows {lo} to {hi - 1}), column {name}"
    return bad_shards(shard.path.parent, f"{shard.path} is damaged in {where}: {what}")
