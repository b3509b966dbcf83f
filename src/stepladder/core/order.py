"""In which order an epoch reads its samples: pure arithmetic on (seed, epoch).

Two orders. Data in memory is read in one random permutation. Data in files is read chunk by chunk:
chunks in random order, rows in random order within windows of several chunks, and from several
places ("lanes") at once."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

Order = NDArray[np.int64]

MOST_LANES = 64
SORT, FEISTEL = "sort", "feistel"  # how an order is made, as config.json names it
MOST_SORTED = 1 << 16  # a sorted order is drawn from all there are, and held: up to so many samples
ROUNDS = 8
# SplitMix64's (Steele et al., OOPSLA 2014)
MIX, MIX_AGAIN, HALF = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB), np.uint64(32)


def key(*parts: int | str) -> int:
    """A 63-bit seed that depends on every part and on nothing else."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def largest_divisor(number: int, most: int) -> int:
    """The largest divisor of `number` up to `most`."""
    return next(d for d in range(min(number, most), 0, -1) if number % d == 0)


def permutation(count: int, seed: int) -> Order:
    """A random order of 0..count-1, shape (count,).

    Random keys of a counter-based generator (Philox, Salmon et al., SC 2011), whose raw stream
    NumPy keeps stable between versions, which it does not promise for `permutation`. The index
    replaces the lowest bits: keys are then unique, any sort gives the same order, and it needs no
    argsort."""
    raw = np.random.Philox(key=seed).random_raw(count)
    mask = np.uint64((1 << count.bit_length()) - 1)
    keys = (raw & ~mask) | np.arange(count, dtype=np.uint64)
    keys.sort()
    return (keys & mask).astype(np.int64)


def shuffled(count: int, seed: int, method: str) -> Order:
    """A random order of 0..count-1, shape (count,). method: SORT or FEISTEL."""
    return permutation(count, seed) if method == SORT else Feistel(count, seed).at(np.arange(count))


class Feistel:
    """A random order of 0..count-1 that is never held: the index at any position, from the position
    alone.

    A generalized Feistel network (Black and Rogaway, CT-RSA 2002, section 5). A position is a pair
    of numbers, each up to about the square root of `count`. In each round one of them gets a keyed
    hash of the other added, modulo its size. Fewer than sqrt(count) pairs are no position: those go
    through again, until they are."""

    def __init__(self, count: int, seed: int) -> None:
        side = math.isqrt(max(count, 1) - 1) + 1
        self.count, self.sizes = np.uint64(count), (np.uint64(side), np.uint64(-(-count // side)))
        keys = hashlib.blake2b(
            str(seed).encode(), digest_size=8 * ROUNDS
        ).digest()  # numpy.random loads for 10 ms
        self.keys = np.frombuffer(keys, "<u8").astype(np.uint64)

    def at(self, positions: Order) -> Order:
        """The indices at these positions, shape (n,). 20 ns each, and 40 us in all for a few."""
        indices = self._through(positions.astype(np.uint64))
        while (outside := np.flatnonzero(indices >= self.count)).size:
            indices[outside] = self._through(indices[outside])
        return indices.astype(np.int64)

    def _through(self, positions: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left_size, right_size = self.sizes
        left, right = np.divmod(positions, right_size)
        for even, odd in self.keys.reshape(-1, 2):
            left = _added(left, _hashed(right, even, left_size), left_size)
            right = _added(right, _hashed(left, odd, right_size), right_size)
        return left * right_size + right


def _hashed(values: NDArray[np.uint64], key: np.uint64, size: np.uint64) -> NDArray[np.uint64]:
    """A number below `size` (up to 2^32) for each value."""
    mixed = (values + key) * MIX
    mixed ^= mixed >> HALF
    mixed *= MIX_AGAIN
    mixed >>= HALF
    mixed *= size
    mixed >>= HALF
    return mixed


def _added(
    values: NDArray[np.uint64], more: NDArray[np.uint64], size: np.uint64
) -> NDArray[np.uint64]:
    """Modulo `size`, both being below it: what is too large is smaller less `size`; the others wrap
    around.
    """
    more += values
    smaller: NDArray[np.uint64] = np.minimum(more, more - size)
    return smaller


@dataclass(frozen=True)
class Chunks:
    """How rows lie in files. shards: (rows, rows per chunk) of each; slots: chunks that may be held
    at once.
    """

    shards: tuple[tuple[int, int], ...]
    slots: int

    def hold(self, rows: object) -> bool:
        """Whether they can be read, and hold so many rows in all."""
        sound = self.slots > 0 and all(
            held >= 0 and per_chunk > 0 for held, per_chunk in self.shards
        )
        return sound and sum(held for held, _ in self.shards) == rows

    @cached_property
    def edges(self) -> Order:
        """Chunk c holds the rows [edges[c], edges[c + 1]); shape (number of chunks + 1,)."""
        starts, first = [], 0
        for rows, per_chunk in self.shards:
            starts.append(np.arange(first, first + rows, per_chunk, dtype=np.int64))
            first += rows
        return np.concatenate([*starts, np.array([first], np.int64)])


class StreamOrder:
    """The order of an epoch that is read from files, without ever holding all of it.

    Rows in the order of shuffled chunks, shuffled again within windows, are dealt out in equal
    contiguous lanes: the batch of a step takes its k-th part from lane k. Ranks take contiguous
    shares of a batch, so a rank reads the lanes of its share only, and the order is still the same
    for any number of ranks. What does not fill a step is read last, from one place. Half of the
    slots hold the windows that are open, the other half those that come next."""

    def __init__(
        self,
        chunks: Chunks,
        seed: int,
        num_samples: int,
        global_batch: int,
        microbatches: int,
        shuffle: str,
    ) -> None:
        self.chunks, self.seed, self.global_batch, self.shuffle = (
            chunks,
            seed,
            global_batch,
            shuffle,
        )
        most = max(1, min(MOST_LANES, chunks.slots // 4))
        self.num_lanes = largest_divisor(microbatches, most)
        self.rows_per_lane = global_batch // self.num_lanes  # of one step
        self.full_steps = num_samples // global_batch
        self.chunks_per_window = max(1, chunks.slots // (2 * self.num_lanes))
        self._epoch = lru_cache(maxsize=2)(self._epoch_anew)
        # Two of each lane: in one step all lanes may come from one window to the next.
        self._window = lru_cache(maxsize=2 * self.num_lanes)(self._window_anew)

    def indices(self, epoch: int, lo: int, hi: int) -> Order:
        """Data-set indices at the positions [lo, hi) of the epoch; no step's end may lie between
        them.
        """
        step, begin = divmod(lo, self.global_batch)
        full = self.full_steps * self.global_batch
        parts: list[Order] = []
        per_lane = self.rows_per_lane
        end = min(hi, full) - step * self.global_batch
        for lane in range(begin // per_lane, -(-end // per_lane)):
            first = (
                lane * self.full_steps + step - lane
            ) * per_lane  # such that adding a position finds it
            a, b = max(begin, lane * per_lane), min(end, (lane + 1) * per_lane)
            parts += self._rows(epoch, first + a, first + b)
        if full < hi:  # what does not fill a step
            parts += self._rows(epoch, max(lo, full), hi)
        return np.concatenate(parts)

    def chunk_order(self, epoch: int) -> Order:
        """The epoch's chunks in the order in which they are dealt out to lanes."""
        return self._epoch(epoch)[0]

    def _epoch_anew(self, epoch: int) -> tuple[Order, Order]:
        """The chunks' order, and the places where windows begin and end in it, counted in rows."""
        edges = self.chunks.edges
        order = shuffled(len(edges) - 1, key(self.seed, "chunks", epoch), self.shuffle)
        ends = np.cumsum(np.diff(edges)[order])
        per = self.chunks_per_window
        cuts = [np.zeros(1, np.int64), ends[per - 1 :: per]]
        if len(order) % per:
            cuts.append(ends[-1:])
        return order, np.concatenate(cuts)

    def _window_anew(self, epoch: int, number: int) -> Order:
        edges, per = self.chunks.edges, self.chunks_per_window
        chunks = self._epoch(epoch)[0][number * per : (number + 1) * per]
        rows = np.concatenate([np.arange(edges[c], edges[c + 1]) for c in chunks])
        return rows[permutation(len(rows), key(self.seed, "window", epoch, number))]

    def _rows(self, epoch: int, lo: int, hi: int) -> Iterator[Order]:
        """Rows [lo, hi) of the shuffled chunks, window by window."""
        cuts = self._epoch(epoch)[1]
        number = int(cuts.searchsorted(lo, "right")) - 1
        while lo < hi:
            start, end = int(cuts[number]), int(cuts[number + 1])
            yield self._window(epoch, number)[lo - start : min(hi, end) - start]
            lo, number = min(hi, end), number + 1
