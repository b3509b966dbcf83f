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
MAX_SORTED = 1 << 16  # samples; a sorted order is drawn from all of them, and kept in memory
ROUNDS = 8
# The multipliers and the shift of SplitMix64 (Steele et al., OOPSLA 2014).
FIRST_MULTIPLIER = np.uint64(0xBF58476D1CE4E5B9)
SECOND_MULTIPLIER = np.uint64(0x94D049BB133111EB)
HALF_WORD = np.uint64(32)


def derive_seed(*parts: int | str) -> int:
    """Return a 63-bit seed that depends on every part and on nothing else."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def find_largest_divisor(number: int, limit: int) -> int:
    """Return the largest divisor of a number up to a limit."""
    candidates = range(min(number, limit), 0, -1)
    return next(divisor for divisor in candidates if number % divisor == 0)


def make_permutation(count: int, seed: int) -> IndexArray:
    """Return a random order of 0..count-1, shape (count,).

    It sorts the random keys of a counter-based generator (Philox, Salmon et al., SC 2011), whose
    raw stream NumPy keeps stable between versions, which it does not promise for its `permutation`.
    The index replaces the lowest bits of each key. Keys are then unique, so any sort gives the same
    order, and the sorted keys themselves contain the order, without an argsort.
    """
    raw = np.random.Philox(key=seed).random_raw(count)
    mask = np.uint64((1 << count.bit_length()) - 1)
    keys = (raw & ~mask) | np.arange(count, dtype=np.uint64)
    keys.sort()
    return (keys & mask).astype(np.int64)


def make_order(
    count: int,
    seed: int,
    method: str,
) -> IndexArray:
    """Return a random order of 0..count-1, shape (count,), made by SORT or FEISTEL."""
    if method == SORT:
        return make_permutation(count, seed)
    return FeistelOrder(count, seed).indices_at(np.arange(count))


class FeistelOrder:
    """A random order of 0..count-1 without a table: an index is computed from its position alone.

    A generalized Feistel network (Black and Rogaway, CT-RSA 2002, section 5). A position is a pair
    of numbers, each up to about the square root of `count`. In each round a keyed hash of one is
    added to the other, modulo its size. There are more pairs than positions, by less than
    sqrt(count): a result that is no position goes through the network again, until it is one.
    """

    def __init__(
        self,
        count: int,
        seed: int,
    ) -> None:
        side = math.isqrt(max(count, 1) - 1) + 1
        self.count = np.uint64(count)
        self.left_size = np.uint64(side)
        self.right_size = np.uint64(-(-count // side))
        # Not numpy.random, whose import takes 10 ms.
        digest = hashlib.blake2b(str(seed).encode(), digest_size=8 * ROUNDS).digest()
        self.round_keys = np.frombuffer(digest, "<u8").astype(np.uint64).reshape(-1, 2)

    def indices_at(self, positions: IndexArray) -> IndexArray:
        """Return the indices at these positions, shape (n,).

        Takes 20 ns for each, and at least 40 us.
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
    values: NDArray[np.uint64],
    round_key: np.uint64,
    size: np.uint64,
) -> NDArray[np.uint64]:
    """Return a hash below `size` (up to 2^32) for each value."""
    hashes = (values + round_key) * FIRST_MULTIPLIER
    hashes ^= hashes >> HALF_WORD
    hashes *= SECOND_MULTIPLIER
    hashes >>= HALF_WORD
    hashes *= size
    hashes >>= HALF_WORD
    return hashes


def _add_modulo(
    values: NDArray[np.uint64],
    hashes: NDArray[np.uint64],
    size: np.uint64,
) -> NDArray[np.uint64]:
    """Return the sums modulo `size`; values and hashes are below it. Overwrites `hashes`.

    A sum that is too large becomes smaller by subtracting `size`; for all others the subtraction
    wraps around to a large number, so the minimum is the sum.
    """
    hashes += values
    sums: NDArray[np.uint64] = np.minimum(hashes, hashes - size)
    return sums


@dataclass(frozen=True)
class Chunks:
    """How the rows of a data set lie in files.

    Attributes:
        shards: (rows, rows per chunk) of each file.
        slots: How many chunks may be in memory at once.
    """

    shards: tuple[tuple[int, int], ...]
    slots: int

    def can_hold(self, num_rows: object) -> bool:
        """Tell whether the numbers are possible and the files hold `num_rows` rows in all."""
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
        starts = []
        first = 0
        for rows, rows_per_chunk in self.shards:
            starts.append(
                np.arange(
                    first,
                    first + rows,
                    rows_per_chunk,
                    dtype=np.int64,
                )
            )
            first += rows
        return np.concatenate([*starts, np.array([first], np.int64)])


class StreamOrder:
    """The order of an epoch that is read from files, which is never in memory as a whole.

    The rows, in the order of shuffled chunks and shuffled again within windows, are partitioned
    into equal contiguous lanes: the batch of a step takes its k-th part from lane k. Ranks take
    contiguous shares of a batch, so a rank reads the lanes of its share only, and the order is
    still the same for any number of ranks. Rows that do not fill a step are read last, without
    lanes. Half of the slots hold the windows that are open, the other half those that come next.
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
        self._epoch = lru_cache(maxsize=2)(self._make_epoch)
        # Two windows of each lane: in one step all lanes may move from one window to the next.
        self._window = lru_cache(maxsize=2 * self.num_lanes)(self._make_window)

    def indices(
        self,
        epoch: int,
        lo: int,
        hi: int,
    ) -> IndexArray:
        """Return the data-set indices at the positions [lo, hi) of the epoch.

        All positions must belong to one step.
        """
        step, start = divmod(lo, self.global_batch)
        full_rows = self.full_steps * self.global_batch
        end = min(hi, full_rows) - step * self.global_batch
        per_lane = self.rows_per_lane
        parts: list[IndexArray] = []
        for lane in range(start // per_lane, -(-end // per_lane)):
            # The offset turns a position in the batch into a row. A lane has `full_steps` times
            # `per_lane` rows, and this step takes the `step`-th part of them.

            offset = (lane * self.full_steps + step - lane) * per_lane
            lane_start = max(start, lane * per_lane)
            lane_end = min(end, (lane + 1) * per_lane)
            parts += self._read_rows(
                epoch,
                offset + lane_start,
                offset + lane_end,
            )
        if full_rows < hi:  # rows that do not fill a step
            parts += self._read_rows(epoch, max(lo, full_rows), hi)
        return np.concatenate(parts)

    def chunk_order(self, epoch: int) -> IndexArray:
        """Return the epoch's chunks in the order in which lanes read them."""
        return self._epoch(epoch)[0]

    def _make_epoch(self, epoch: int) -> tuple[IndexArray, IndexArray]:
        """Return the order of the chunks, and the row at which each window begins, and the end."""
        edges = self.chunks.edges
        order = make_order(
            len(edges) - 1,
            derive_seed(self.seed, "chunks", epoch),
            self.shuffle,
        )
        chunk_ends = np.cumsum(np.diff(edges)[order])
        per_window = self.chunks_per_window
        window_edges = [np.zeros(1, np.int64), chunk_ends[per_window - 1 :: per_window]]
        if len(order) % per_window:
            window_edges.append(chunk_ends[-1:])
        return order, np.concatenate(window_edges)

    def _make_window(
        self,
        epoch: int,
        number: int,
    ) -> IndexArray:
        """Return the shuffled rows of one window."""
        edges = self.chunks.edges
        first_chunk = number * self.chunks_per_window
        end_chunk = first_chunk + self.chunks_per_window
        chunks = self.chunk_order(epoch)[first_chunk:end_chunk]
        rows = np.concatenate([np.arange(edges[chunk], edges[chunk + 1]) for chunk in chunks])
        seed = derive_seed(self.seed, "window", epoch, number)
        return rows[make_permutation(len(rows), seed)]

    def _read_rows(
        self,
        epoch: int,
        lo: int,
        hi: int,
    ) -> Iterator[IndexArray]:
        """Yield the rows [lo, hi) of the shuffled chunks, window by window."""
        window_edges = self._epoch(epoch)[1]
        number = int(window_edges.searchsorted(lo, "right")) - 1
        while lo < hi:
            window_start = int(window_edges[number])
            window_end = int(window_edges[number + 1])
            part_end = min(hi, window_end)
            yield self._window(epoch, number)[lo - window_start : part_end - window_start]
            lo = part_end
            number += 1
