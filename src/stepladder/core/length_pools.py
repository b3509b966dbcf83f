"""An order whose batches hold samples of similar lengths, made of one that knows no lengths."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from stepladder.core.order import Chunks, IndexArray, derive_seed, make_permutation

MAX_POOL_STEPS = 50  # whose samples are sorted together
MIN_POOLS = 4  # of an epoch; with fewer, each epoch would have nearly the same batches


class LengthPools:
    """Steps whose samples have similar lengths.

    The steps of an epoch are divided into pools of neighbours. The samples of a pool are sorted by
    length and cut into batches, and these are shuffled. So each epoch has other batches, and a step
    is computed from the samples of its pool alone.

    The samples of a chunk are in the order of their lengths. Where a sample is in its chunk, as a
    part of the chunk, therefore stands for its length.
    """

    def __init__(
        self,
        seed: int,
        chunks: Chunks,
        num_steps: int,
        get_batch: Callable[[int], tuple[int, int]],
        read_order: Callable[[int, int, int], IndexArray],
    ) -> None:
        """Divide the steps into pools.

        Args:
            seed: The run's seed.
            chunks: Their samples are in the order of their lengths. The samples of a pool are no
                more than half of the chunks in memory have, so that few chunks are read twice.
            num_steps: The steps of an epoch.
            get_batch: Returns the positions [lo, hi) of a step of the epoch. All steps have one
                size; only the last may have another one.
            read_order: Returns the samples of (epoch, lo, hi) in an order that knows no lengths.
        """
        self.seed = seed
        self.edges = chunks.edges
        self.num_steps = num_steps
        self.get_batch = get_batch
        self.read_order = read_order
        begin, end = get_batch(0)
        rows_in_memory = int(self.edges[-1]) * chunks.slots // (len(self.edges) - 1)
        max_steps = min(num_steps // MIN_POOLS, rows_in_memory // 2 // (end - begin))
        self.pool_steps = max(1, min(MAX_POOL_STEPS, max_steps))
        self._get_pool = lru_cache(maxsize=2)(self._make_pool)

    def indices_of_step(self, epoch: int, step: int) -> IndexArray:
        """Return the data-set indices of a step of an epoch, the shortest sample first."""
        number, place = divmod(step, self.pool_steps)
        return self._get_pool(epoch, number)[place]

    def _make_pool(self, epoch: int, number: int) -> list[IndexArray]:
        """Return the samples of each step of a pool."""
        first = number * self.pool_steps
        end = min(first + self.pool_steps, self.num_steps)
        batches = [self.get_batch(step) for step in range(first, end)]
        indices = np.concatenate([self.read_order(epoch, lo, hi) for lo, hi in batches])
        by_length = indices[np.argsort(self._find_places(indices), kind="stable")]
        sizes = [hi - lo for lo, hi in batches]
        parts = np.split(by_length, np.cumsum(sizes)[:-1])
        # The last step of an epoch may have another size: then it stays the last.
        count = len(parts) if sizes[-1] == sizes[0] else len(parts) - 1
        shuffled = make_permutation(count, derive_seed(self.seed, "pool", epoch, number))
        return [*(parts[place] for place in shuffled.tolist()), *parts[count:]]

    def _find_places(self, indices: IndexArray) -> np.ndarray:
        """Return where samples are in their chunks, from 0 for the shortest to below 1."""
        chunks = self.edges.searchsorted(indices, "right") - 1
        starts = self.edges[chunks]
        return np.asarray((indices - starts) / (self.edges[chunks + 1] - starts))
