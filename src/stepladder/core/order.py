"""The order in which an epoch reads its samples: pure arithmetic on (seed, epoch).

There are two orders. Data in memory is read in one random permutation. Data in files is read chunk
by chunk: chunks in random order, rows in random order within windows of several chunks, and from
several positions of that order ("lanes") at once.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

IndexArray = NDArray[np.int64]  # an order, positions in it, or rows of the data set

MAX_LANES = 64
# How an order is made, as config.json names it.
SORT = "sort"
FEISTEL = "feistel"
MAX_SORTED = 1 << 16  # elements of an order made by SORT, which draws and keeps all of them
ROUNDS = 8  # of the Feistel network
# The multipliers of SplitMix64 (Steele et al., OOPSLA 2014).
FIRST_MULTIPLIER = np.uint64(0xBF58476D1CE4E5B9)
SECOND_MULTIPLIER = np.uint64(0x94D049BB133111EB)
HALF_WORD = np.uint64(32)  # bits


def derive_seed(*parts: int | str) -> int:
    """Return a 63-bit seed that depends on every part and on nothing else."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def derive_pass_seed(base: int, step: int, number: int) -> int:
    """Return the seed of microbatch `number` of `step`, as `derive_seed` would, without a hash.

    The hash would cost 3 us in each pass. This is SplitMix64's finaliser (Steele et al., OOPSLA
    2014) of a 64-bit word that differs for each pass.
    """
    word = (base + step * 0x9E3779B97F4A7C15 + number * 0xD1342543DE82EF95) & 0xFFFFFFFFFFFFFFFF
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (word ^ (word >> 31)) >> 1


def find_largest_divisor(number: int, limit: int) -> int:
    """Return the largest divisor of a number up to a limit."""
    candidates = range(min(number, limit), 0, -1)
    return next(divisor for divisor in candidates if number % divisor == 0)


def make_permutation(count: int, seed: int) -> IndexArray:
    """Return a random order of 0..count-1, shape (count,).

    It sorts random keys, which come from a counter-based generator (Philox, Salmon et al., SC
    2011). NumPy keeps the raw stream of this generator stable between versions, and makes no such
    promise for its `permutation`. An index replaces the lowest bits of each key. Keys are then
    unique, so any sort gives the same order, and the sorted keys themselves contain the order,
    without an argsort.
    """
    random_words = np.random.Philox(key=seed).random_raw(count)
    index_mask = np.uint64((1 << count.bit_length()) - 1)
    keys = (random_words & ~index_mask) | np.arange(count, dtype=np.uint64)
    keys.sort()
    return (keys & index_mask).astype(np.int64)


def make_order(count: int, seed: int, method: str) -> IndexArray:
    """Return a random order of 0..count-1, shape (count,), made by SORT or FEISTEL."""
    if method == SORT:
        return make_permutation(count, seed)
    return FeistelOrder(count, seed).indices_at(np.arange(count))


class FeistelOrder:
    """A random order of 0..count-1 without a table: an index is computed from its position alone.

    A generalized Feistel network (Black and Rogaway, CT-RSA 2002, section 5). A position is a pair
    of numbers, each up to about the square root of `count`. In each round a keyed hash of one
    number is added to the other number, modulo the size of its range. There are a few more pairs
    than positions, by less than sqrt(count): a result that is no position goes through the network
    again, until it is one.
    """

    def __init__(self, count: int, seed: int) -> None:
        side = math.isqrt(max(count, 1) - 1) + 1  # the square root, rounded up
        self.count = np.uint64(count)
        self.left_size = np.uint64(side)
        self.right_size = np.uint64(-(-count // side))
        # A key of 8 bytes for each round, in pairs. Not by numpy.random, whose import takes 10 ms.
        digest = hashlib.blake2b(str(seed).encode(), digest_size=8 * ROUNDS).digest()
        self.round_keys = np.frombuffer(digest, "<u8").astype(np.uint64).reshape(-1, 2)

    def indices_at(self, positions: IndexArray) -> IndexArray:
        """Return the indices at these positions, shape (n,).

        A call takes 20 ns for each position, and 40 us at least.
        """
        indices = self._encrypt(positions.astype(np.uint64))
        while (outside := np.flatnonzero(indices >= self.count)).size:
            indices[outside] = self._encrypt(indices[outside])
        return indices.astype(np.int64)

    def _encrypt(self, positions: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = np.divmod(positions, self.right_size)
        for left_key, right_key in self.round_keys:
            left_hash = _hash_values(right, left_key, self.left_size)
            left = _add_modulo(left, left_hash, self.left_size)
            right_hash = _hash_values(left, right_key, self.right_size)
            right = _add_modulo(right, right_hash, self.right_size)
        return left * self.right_size + right


def _hash_values(
    values: NDArray[np.uint64], round_key: np.uint64, size: np.uint64
) -> NDArray[np.uint64]:
    """Return a hash below `size` (up to 2^32) for each value."""
    hashes = (values + round_key) * FIRST_MULTIPLIER
    hashes ^= hashes >> HALF_WORD
    hashes *= SECOND_MULTIPLIER
    # The upper half is a fraction of 2^32, which becomes the same fraction of `size`.
    hashes >>= HALF_WORD
    hashes *= size
    hashes >>= HALF_WORD
    return hashes


def _add_modulo(
    values: NDArray[np.uint64], hashes: NDArray[np.uint64], size: np.uint64
) -> NDArray[np.uint64]:
    """Return (values + hashes) modulo `size`; all are below `size`. Overwrites `hashes`.

    A sum of `size` or more becomes smaller by subtracting `size`. For any other sum the subtraction
    wraps around to a large number. So the minimum of both is the result.
    """
    hashes += values
    sums: NDArray[np.uint64] = np.minimum(hashes, hashes - size)
    return sums


@dataclass(frozen=True)
class Chunks:
    """How the rows of a data set are divided into files, and these into chunks.

    Args:
        shards: (rows, rows per chunk) of each file.
        slots: How many chunks may be in memory at once.
    """

    shards: tuple[tuple[int, int], ...]
    slots: int

    def can_hold(self, num_rows: object) -> bool:
        """Return whether the numbers are valid, and the files have `num_rows` rows in all."""
        if self.slots <= 0:
            return False
        for rows, rows_per_chunk in self.shards:
            if rows < 0 or rows_per_chunk <= 0:
                return False
        return sum(rows for rows, _ in self.shards) == num_rows

    @cached_property
    def edges(self) -> IndexArray:
        """The first row of each chunk, and the number of rows; shape (number of chunks + 1,).

        Chunk c holds the rows [edges[c], edges[c + 1]).
        """
        chunk_starts = []
        file_start = 0
        for rows, rows_per_chunk in self.shards:
            file_end = file_start + rows
            chunk_starts.append(np.arange(file_start, file_end, rows_per_chunk, dtype=np.int64))
            file_start = file_end
        return np.concatenate([*chunk_starts, np.array([file_start], np.int64)])


class StreamOrder:
    """The order of an epoch that is read from files, which is never in memory as a whole.

    The chunks are shuffled. Some neighbours in their new order form a window, and the rows of each
    window are shuffled. The resulting rows are partitioned into equal contiguous lanes: the batch
    of a step takes its k-th part from lane k. Ranks take contiguous shares of a batch, so a rank
    reads the lanes of its share only, and the order is still the same for any number of ranks. Rows
    that do not fill a step are read last, without lanes. Half of the slots for chunks hold the
    window that each lane reads, the other half the next window of each lane.
    """

    def __init__(
        self,
        chunks: Chunks,
        seed: int,
        num_samples: int,
        global_batch: int,
        microbatches: int,
        shuffle: str,
    ) -> None:
        self.chunks = chunks
        self.seed = seed
        self.global_batch = global_batch
        self.shuffle = shuffle
        max_lanes = max(1, min(MAX_LANES, chunks.slots // 4))
        self.num_lanes = find_largest_divisor(microbatches, max_lanes)
        self.rows_per_lane = global_batch // self.num_lanes  # in each step
        self.full_steps = num_samples // global_batch
        self.chunks_per_window = max(1, chunks.slots // (2 * self.num_lanes))
        self._get_epoch = lru_cache(maxsize=2)(self._make_epoch)
        # Two windows of each lane: in one step all lanes may move from one window to the next.
        self._get_window = lru_cache(maxsize=2 * self.num_lanes)(self._make_window)

    def indices(self, epoch: int, lo: int, hi: int) -> IndexArray:
        """Return the data-set indices at the positions [lo, hi) of the epoch.

        All positions must belong to one step.
        """
        step, start = divmod(lo, self.global_batch)
        full_rows = self.full_steps * self.global_batch
        # From here on, [start, end) are positions in the batch of the step, as far as it is full.
        end = min(hi, full_rows) - step * self.global_batch
        per_lane = self.rows_per_lane
        parts: list[IndexArray] = []
        for lane in range(start // per_lane, -(-end // per_lane)):
            # The positions [first_position, first_position + per_lane) of the batch hold the rows
            # from first_row on: a lane has `per_lane` rows for each step.
            first_position = lane * per_lane
            first_row = (lane * self.full_steps + step) * per_lane
            lane_start = max(start, first_position)
            lane_end = min(end, first_position + per_lane)
            parts += self._read_rows(
                epoch,
                first_row + lane_start - first_position,
                first_row + lane_end - first_position,
            )
        if full_rows < hi:  # the rows that do not fill a step
            parts += self._read_rows(epoch, max(lo, full_rows), hi)
        return np.concatenate(parts)

    def chunk_order(self, epoch: int) -> IndexArray:
        """Return the chunks of an epoch in their shuffled order."""
        order, _ = self._get_epoch(epoch)
        return order

    def _make_epoch(self, epoch: int) -> tuple[IndexArray, IndexArray]:
        """Return the order of the chunks, and the edges of their windows.

        Window w has the rows [edges[w], edges[w + 1]), counted in the order of the chunks.
        """
        edges = self.chunks.edges
        order = make_order(len(edges) - 1, derive_seed(self.seed, "chunks", epoch), self.shuffle)
        chunk_ends = np.cumsum(np.diff(edges)[order])
        per_window = self.chunks_per_window
        window_edges = [np.zeros(1, np.int64), chunk_ends[per_window - 1 :: per_window]]
        # The last window may have fewer chunks.
        if len(order) % per_window:
            window_edges.append(chunk_ends[-1:])
        return order, np.concatenate(window_edges)

    def _make_window(self, epoch: int, number: int) -> IndexArray:
        """Return the shuffled rows of one window."""
        edges = self.chunks.edges
        first_chunk = number * self.chunks_per_window
        end_chunk = first_chunk + self.chunks_per_window
        chunks = self.chunk_order(epoch)[first_chunk:end_chunk]
        rows = np.concatenate([np.arange(edges[chunk], edges[chunk + 1]) for chunk in chunks])
        seed = derive_seed(self.seed, "window", epoch, number)
        return rows[make_permutation(len(rows), seed)]

    def _read_rows(self, epoch: int, lo: int, hi: int) -> Iterator[IndexArray]:
        """Yield the rows [lo, hi) of the shuffled chunks, window by window."""
        _, window_edges = self._get_epoch(epoch)
        number = int(window_edges.searchsorted(lo, "right")) - 1
        while lo < hi:
            window_start = int(window_edges[number])
            window_end = int(window_edges[number + 1])
            part_end = min(hi, window_end)
            window = self._get_window(epoch, number)
            yield window[lo - window_start : part_end - window_start]
            lo = part_end
            number += 1
