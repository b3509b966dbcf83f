"""What is computed: which sample, at which step, in which microbatch, on which share.

Pure arithmetic.

A run is defined by (samples, global batch, microbatch, seed). The number of processes only decides
which process computes what. Everything random is a function of (seed, epoch or step, sample or
microbatch), and never of a rank. Separating the two follows EasyScale (Li et al., SC 2023).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from stepladder.core.arguments import validate_types
from stepladder.core.errors import InputError
from stepladder.core.length_pools import LengthPools
from stepladder.core.order import (
    FEISTEL,
    MAX_SORTED,
    SORT,
    Chunks,
    FeistelOrder,
    IndexArray,
    StreamOrder,
    derive_seed,
    find_largest_divisor,
    make_order,
)
from stepladder.core.typed_file import convert

FLAGS = ("drop_last", "by_length")  # of a plan, which config.json has only where they are set


@dataclass(frozen=True)
class Span:
    """One microbatch, or several neighbours fused into one pass.

    Args:
        number: The index of the first microbatch within its step, which keys its randomness.
        lo: The first position within the global batch.
        hi: The position after the last one.
    """

    number: int
    lo: int
    hi: int

    def __len__(self) -> int:
        return self.hi - self.lo


class IdleSpan(Span):
    """A pass that adds nothing, which a rank makes only because the other ranks make one.

    It reads the samples of its positions to have an input for the model, but its length is 0.
    """

    def __len__(self) -> int:
        return 0


@dataclass(frozen=True)
class Plan:
    """What a run computes, whatever the number of processes.

    Steps count from 0 here; "after step n" in files means that n steps are done.

    Args:
        num_samples: Samples of the training set.
        global_batch: Samples per optimizer step.
        microbatch: Samples per pass; its boundaries are the same for every number of processes.
        seed: The number from which everything random follows.
        min_microbatch: The fewest samples of a pass: 2 with batch norm, which refuses one sample. A
            shorter remainder joins the microbatch before it.
        chunks: How the rows are divided into files, or None for data in memory. Data in files are
            read in an order that goes chunk by chunk.
        shuffle: How samples, or chunks, are put in order: "sort", or "feistel", which keeps no
            order in memory. By default "feistel" for more than 65,536 of them.
        drop_last: Whether the samples at the end of an epoch that do not fill a global batch are
            left out; others in each epoch.
        by_length: Whether batches hold samples of similar lengths. The samples of each chunk, or
            all without chunks, must be in the order of their lengths.
    """

    num_samples: int
    global_batch: int
    microbatch: int
    seed: int = 0
    min_microbatch: int = 1
    chunks: Chunks | None = None
    shuffle: str = ""
    drop_last: bool = False
    by_length: bool = False
    _orders: dict[int, IndexArray] = field(
        init=False, default_factory=dict, compare=False, repr=False
    )
    _shares: dict[tuple[int, int, int, bool], list[Span]] = field(
        init=False, default_factory=dict, compare=False, repr=False
    )

    def __post_init__(self) -> None:
        validate_types(Plan, vars(self))
        if self.num_samples < 1:
            raise InputError("the training data holds no sample", "data with one sample or more")
        for name in ("global_batch", "microbatch"):
            value = getattr(self, name)
            if value < 1:
                raise InputError(f"{name}={value}", f"{name} must be at least 1")
        self._validate_batches()
        if not self.shuffle:
            object.__setattr__(self, "shuffle", self._choose_shuffle())
        if self.shuffle not in (SORT, FEISTEL):
            raise InputError(
                f"shuffle={self.shuffle!r}", f"{SORT} or {FEISTEL}, or a newer stepladder"
            )

    def _validate_batches(self) -> None:
        if self.global_batch % self.microbatch:
            raise InputError(
                f"--global-batch {self.global_batch} is not a multiple of"
                f" --microbatch {self.microbatch}",
                f"--microbatch {find_largest_divisor(self.global_batch, self.microbatch)}",
            )
        largest_pass = min(self.num_samples, self.microbatch)
        if largest_pass < self.min_microbatch:
            raise InputError(
                f"batch norm needs {self.min_microbatch} samples per microbatch, found"
                f" {largest_pass}",
                f"--microbatch {self.min_microbatch} or more",
            )
        if self.drop_last and self.num_samples < self.global_batch:
            raise InputError(
                f"drop_last leaves no batch: {self.num_samples} samples for a global batch of"
                f" {self.global_batch}",
                f"a global batch of {self.num_samples} at most, or drop_last=False",
            )

    def _choose_shuffle(self) -> str:
        count = self.num_samples
        if self.chunks is not None:
            count = len(self.chunks.edges) - 1
        return SORT if count <= MAX_SORTED else FEISTEL

    @property
    def num_microbatches(self) -> int:
        """The number of microbatches of a full step, and the most processes that can share it."""
        return self.global_batch // self.microbatch

    @cached_property
    def steps_per_epoch(self) -> int:
        """The number of optimizer steps of an epoch, with a shorter last one."""
        full_steps, remainder = divmod(self.num_samples, self.global_batch)
        has_short_step = not self.drop_last and remainder >= self.min_microbatch
        return max(1, full_steps + has_short_step)

    @property
    def num_dropped(self) -> int:
        """The number of samples that each epoch leaves out, because they do not fill a batch."""
        _, end = self.batch(self.steps_per_epoch - 1)
        return self.num_samples - end

    def epoch_of_step(self, step: int) -> int:
        """Return the epoch, counted from 0, that a step belongs to."""
        return step // self.steps_per_epoch

    def batch(self, step: int) -> tuple[int, int]:
        """Return the positions [lo, hi) of the epoch's order that a step trains.

        The last batch of an epoch may be shorter or, by less than `min_microbatch`, longer.
        """
        step_of_epoch = step % self.steps_per_epoch
        lo = step_of_epoch * self.global_batch
        if step_of_epoch == self.steps_per_epoch - 1 and not self.drop_last:
            return lo, self.num_samples
        return lo, lo + self.global_batch

    def microbatches(self, step: int) -> list[Span]:
        """Return the step's microbatches, in order."""
        return self.share(step, 0, 1)

    def share(self, step: int, rank: int, world_size: int, round_robin: bool = False) -> list[Span]:
        """Return the microbatches of one rank in a step, possibly none.

        Args:
            step: The step, counted from 0.
            rank: The rank.
            world_size: The number of ranks.
            round_robin: Whether ranks take turns, one microbatch each. By default each rank has
                neighbouring microbatches, and their count differs by one at most between ranks.
        """
        lo, hi = self.batch(step)
        return self._share_of_size(hi - lo, rank, world_size, round_robin)

    def _share_of_size(
        self, size: int, rank: int, world_size: int, round_robin: bool
    ) -> list[Span]:
        key = (size, rank, world_size, round_robin)
        if key not in self._shares:  # an epoch has two sizes: full and last
            edges = [*range(0, size, self.microbatch), size]
            if len(edges) > 2 and edges[-1] - edges[-2] < self.min_microbatch:
                del edges[-2]
            spans = [Span(number, lo, hi) for number, (lo, hi) in enumerate(pairwise(edges))]
            if round_robin:
                self._shares[key] = spans[rank::world_size]
            else:
                first, end = split_evenly(len(spans), rank, world_size)
                self._shares[key] = spans[first:end]
        return self._shares[key]

    @cached_property
    def stream(self) -> StreamOrder | None:
        """The order of data in files, or None for data in memory."""
        if self.chunks is None:
            return None
        return StreamOrder(
            self.chunks,
            self.seed,
            self.num_samples,
            self.global_batch,
            self.num_microbatches,
            self.shuffle,
        )

    @cached_property
    def length_pools(self) -> LengthPools | None:
        """The order of batches of similar lengths, or None for another order."""
        if not self.by_length:
            return None
        return LengthPools(
            self.seed,
            self.chunks or Chunks(((self.num_samples, self.num_samples),), slots=2),
            self.steps_per_epoch,
            self.batch,
            self._shuffled_indices_at,
        )

    def order(self, epoch: int) -> IndexArray:
        """Return the epoch's permutation of the data set, shape (num_samples,)."""
        if not self.is_made_by_step:
            return self._permutation(epoch)
        batches = map(self.batch, range(self.steps_per_epoch))
        return np.concatenate([self.indices_at(epoch, lo, hi) for lo, hi in batches])

    @property
    def is_made_by_step(self) -> bool:
        """Whether `indices_at` gives positions of one step at a time."""
        return self.by_length or self.chunks is not None

    def _permutation(self, epoch: int) -> IndexArray:
        order = self._orders.get(epoch)
        # Not `epoch in self._orders`: a prefetching thread may clear the orders meanwhile.
        if order is None:
            order = make_order(self.num_samples, self._seed_of_epoch(epoch), self.shuffle)
            if self.shuffle == SORT:
                self._orders.clear()
                self._orders[epoch] = order
        return order

    def indices_at(self, epoch: int, lo: int, hi: int) -> IndexArray:
        """Return the data-set indices at the positions [lo, hi) of the epoch, shape (hi - lo,).

        If `is_made_by_step`, all positions must belong to one step.
        """
        if self.length_pools is None:
            return self._shuffled_indices_at(epoch, lo, hi)
        step = min(lo // self.global_batch, self.steps_per_epoch - 1)
        start, _ = self.batch(step)
        return self.length_pools.indices_of_step(epoch, step)[lo - start : hi - start]

    def _shuffled_indices_at(self, epoch: int, lo: int, hi: int) -> IndexArray:
        """Return what `indices_at` does in an order that knows no lengths."""
        if self.stream is not None:
            return self.stream.indices(epoch, lo, hi)
        if self.shuffle == SORT:
            return self._permutation(epoch)[lo:hi]
        order = _make_feistel_order(self.num_samples, self._seed_of_epoch(epoch))
        return order.indices_at(np.arange(lo, hi))

    def indices(self, step: int, span: Span) -> IndexArray:
        """Return the data-set indices of one span, shape (len(span),)."""
        [(_, indices)] = self.requests(step, [span])
        return indices

    def requests(self, step: int, spans: Iterable[Span]) -> Iterator[tuple[int, IndexArray]]:
        """Yield what a source reads for spans of a step: its epoch, and the data-set indices."""
        epoch = self.epoch_of_step(step)
        start = step % self.steps_per_epoch * self.global_batch
        for span in spans:
            yield epoch, self.indices_at(epoch, start + span.lo, start + span.hi)

    def indices_of_rank(self, step: int, rank: int, world_size: int) -> IndexArray:
        """Return the data-set indices of one rank's share of a step, shape (samples,)."""
        share = fuse_spans(self.share(step, rank, world_size))
        if not share:
            return np.empty(0, np.int64)
        return self.indices(step, share[0])

    def _seed_of_epoch(self, epoch: int) -> int:
        return derive_seed(self.seed, "order", epoch)

    def as_json(self) -> dict[str, Any]:
        """Return the plan as a dict of JSON values, from which `from_json` makes an equal plan."""
        names = ("num_samples", "global_batch", "microbatch", "seed", "min_microbatch", "shuffle")
        values = {name: getattr(self, name) for name in names}
        values |= {name: True for name in FLAGS if getattr(self, name)}
        if self.chunks is None:
            return values
        shards = [list(shard) for shard in self.chunks.shards]
        return values | {"chunks": {"shards": shards, "slots": self.chunks.slots}}

    @staticmethod
    def from_json(stored: dict[str, Any]) -> Plan:
        """Return the plan that a config.json holds.

        Raises:
            TypeError: If a value is missing, or there is a value that is no field of a plan, as
                one of a newer version may be.
            ValueError: If a value has the wrong type, or if values contradict each other.
        """
        numbers = dict(stored)
        shuffle = convert(numbers.pop("shuffle", SORT), str)
        flags = {name: convert(numbers.pop(name, False), bool) for name in FLAGS}
        chunks: Chunks | None = convert(numbers.pop("chunks", None), Chunks | None)
        if chunks is not None and not chunks.can_hold(numbers.get("num_samples")):
            raise ValueError("the plan's chunks do not hold its samples")
        return Plan(**convert(numbers, dict[str, int]), chunks=chunks, shuffle=shuffle, **flags)


# Cached, since every pass of a step needs the epoch's order, and deriving the keys of the order
# takes as long as computing the indices of one pass.
_make_feistel_order = lru_cache(maxsize=2)(FeistelOrder)


def split_evenly(count: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return the range [lo, hi) of one rank in `count` items; sizes differ by one at most."""
    return count * rank // world_size, count * (rank + 1) // world_size


def fuse_spans(spans: list[Span]) -> list[Span]:
    """Return neighbouring spans fused into one pass; the first span keys its randomness."""
    if not spans:
        return []
    return [Span(spans[0].number, spans[0].lo, spans[-1].hi)]


def add_idle_spans(spans: list[Span], shares: list[list[Span]]) -> list[Span]:
    """Return one rank's passes, with idle ones until all ranks make the same number of passes.

    Each pass gathers sharded weights, so all ranks must take part in it.

    Args:
        spans: The rank's own passes.
        shares: The passes of every rank.
    """
    first = next(span for share in shares for span in share)
    idle = IdleSpan(first.number, first.lo, first.hi)
    num_passes = max(map(len, shares))
    return [*spans, *[idle] * (num_passes - len(spans))]


def choose_microbatch(global_batch: int) -> int:
    """Return the default microbatch, which splits the global batch into at most 8 equal parts."""
    return global_batch // find_largest_divisor(global_batch, 8)
