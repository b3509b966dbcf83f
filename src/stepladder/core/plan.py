"""What is computed: which sample, at which step, in which microbatch, on which share. Pure
arithmetic.

A run is defined by (samples, global batch, microbatch, seed); a process count decides only who
computes what. Everything random is a function of (seed, epoch or step, sample or microbatch),
nothing of a rank. Separating the two follows EasyScale (Li et al., SC 2023).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from stepladder.core.errors import InputError
from stepladder.core.order import (
    FEISTEL,
    MOST_SORTED,
    SORT,
    Chunks,
    Feistel,
    Order,
    StreamOrder,
    key,
    largest_divisor,
    shuffled,
)
from stepladder.core.stored import fit


@dataclass(frozen=True)
class Span:
    """One microbatch, or several fused into one pass: positions [lo, hi) within the global batch.

    number: the first microbatch's place in its step, which keys its randomness.
    """

    number: int
    lo: int
    hi: int

    def __len__(self) -> int:
        return self.hi - self.lo


class IdleSpan(Span):
    """A pass that a rank makes with the others, without adding anything: of no samples, though it
    reads some.
    """

    def __len__(self) -> int:
        return 0


@dataclass(frozen=True)
class Plan:
    """The run, without the machine.

    num_samples: length of the training set.  global_batch: samples per optimizer step. microbatch:
    samples per pass; boundaries are the same for every number of processes. min_microbatch: 2 under
    batch norm, which refuses one sample: a shorter rest joins the one before it. chunks: how the
    rows lie, if they are read from files: then the order goes chunk by chunk. shuffle: how samples,
    or chunks, are put in order: "sort", or "feistel", which holds no order; by default the second
    where there are more than 65,536. Steps count from 0 here; "after step n" in files means n steps
    are done."""

    num_samples: int
    global_batch: int
    microbatch: int
    seed: int = 0
    min_microbatch: int = 1
    chunks: Chunks | None = None
    shuffle: str = ""
    _orders: dict[int, Order] = field(init=False, default_factory=dict, compare=False, repr=False)
    _shares: dict[tuple[int, int, int, bool], list[Span]] = field(
        init=False, default_factory=dict, compare=False, repr=False
    )

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise InputError("the training data holds no sample", "data with one sample or more")
        for name in ("global_batch", "microbatch"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)}", f"{name} must be at least 1")
        if self.global_batch % self.microbatch:
            raise InputError(
                f"--global-batch {self.global_batch} is not a multiple of --microbatch {self.microbatch}",
                f"--microbatch {largest_divisor(self.global_batch, self.microbatch)}",
            )
        if self.num_samples < self.min_microbatch or self.microbatch < self.min_microbatch:
            raise InputError(
                f"batch norm needs {self.min_microbatch} samples per microbatch, found"
                f" {min(self.num_samples, self.microbatch)}",
                f"--microbatch {self.min_microbatch} or more",
            )

        if not self.shuffle:
            count = self.num_samples if self.chunks is None else len(self.chunks.edges) - 1
            object.__setattr__(self, "shuffle", SORT if count <= MOST_SORTED else FEISTEL)
        if self.shuffle not in (SORT, FEISTEL):
            raise InputError(
                f"shuffle={self.shuffle!r}", f"{SORT} or {FEISTEL}, or a newer stepladder"
            )

    @property
    def num_microbatches(self) -> int:
        """Microbatches of a full step: the most processes that can share it."""
        return self.global_batch // self.microbatch

    @cached_property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of one pass over the data, a shorter last one included."""
        full, rest = divmod(self.num_samples, self.global_batch)
        return max(1, full + (rest >= self.min_microbatch))

    def epoch_of_step(self, step: int) -> int:
        """The epoch, counted from 0, that `step` belongs to."""
        return step // self.steps_per_epoch

    def batch(self, step: int) -> tuple[int, int]:
        """Positions [lo, hi) of the epoch's order that `step` trains; the last one may be shorter."""
        place = step % self.steps_per_epoch
        lo = place * self.global_batch
        return lo, self.num_samples if place == self.steps_per_epoch - 1 else lo + self.global_batch

    def microbatches(self, step: int) -> list[Span]:
        """The step's microbatches, in order."""
        return self.share(step, 0, 1)

    def share(self, step: int, rank: int, world_size: int, in_rounds: bool = False) -> list[Span]:
        """The microbatches of one rank, balanced, possibly none: neighbours.

        in_rounds: instead of that ranks take turns, one microbatch each.
        """
        lo, hi = self.batch(step)
        return self._share(hi - lo, rank, world_size, in_rounds)

    def _share(self, size: int, rank: int, world_size: int, in_rounds: bool) -> list[Span]:
        where = (size, rank, world_size, in_rounds)
        if where not in self._shares:  # an epoch has two sizes: full and last
            cuts = [*range(0, size, self.microbatch), size]
            if len(cuts) > 2 and cuts[-1] - cuts[-2] < self.min_microbatch:
                del cuts[-2]
            spans = [Span(number, a, b) for number, (a, b) in enumerate(pairwise(cuts))]
            first, last = share(len(spans), rank, world_size)
            self._shares[where] = spans[rank::world_size] if in_rounds else spans[first:last]
        return self._shares[where]

    @cached_property
    def stream(self) -> StreamOrder | None:
        """The order of data in files; None for data in memory."""
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

    def order(self, epoch: int) -> Order:
        """The epoch's permutation of the data set, shape (num_samples,)."""
        if self.stream is not None:
            steps = map(self.batch, range(self.steps_per_epoch))
            return np.concatenate([self.stream.indices(epoch, lo, hi) for lo, hi in steps])
        order = self._orders.get(epoch)
        if order is None:  # a prefetching thread may ask at the same time
            order = shuffled(self.num_samples, key(self.seed, "order", epoch), self.shuffle)
            if self.shuffle == SORT:
                self._orders.clear()
                self._orders[epoch] = order
        return order

    def at(self, epoch: int, lo: int, hi: int) -> Order:
        """Data-set indices at the positions [lo, hi) of the epoch, shape (hi - lo,); from files:
        within a step.
        """
        if self.stream is not None:
            return self.stream.indices(epoch, lo, hi)
        if self.shuffle == SORT:
            return self.order(epoch)[lo:hi]
        return _feistel(self.num_samples, key(self.seed, "order", epoch)).at(np.arange(lo, hi))

    def indices(self, step: int, span: Span) -> Order:
        """Data-set indices of one span, shape (len(span),)."""
        epoch, start = self.epoch_of_step(step), step % self.steps_per_epoch * self.global_batch
        return self.at(epoch, start + span.lo, start + span.hi)

    def as_json(self) -> dict[str, Any]:
        """What `from_json` makes the same plan of."""
        names = ("num_samples", "global_batch", "microbatch", "seed", "min_microbatch")
        stored = {name: getattr(self, name) for name in (*names, "shuffle")}
        if self.chunks is None:
            return stored
        chunks = {"shards": list(map(list, self.chunks.shards)), "slots": self.chunks.slots}
        return stored | {"chunks": chunks}

    @staticmethod
    def from_json(stored: dict[str, Any]) -> Plan:
        """The plan of a config.json. TypeError or ValueError where it is none."""
        numbers = dict(stored)
        shuffle = fit(numbers.pop("shuffle", SORT), str)
        chunks: Chunks | None = fit(numbers.pop("chunks", None), Chunks | None)
        if chunks is not None and not chunks.hold(numbers.get("num_samples")):
            raise ValueError("its chunks do not hold its samples")
        return Plan(**fit(numbers, dict[str, int]), chunks=chunks, shuffle=shuffle)


_feistel = lru_cache(maxsize=2)(Feistel)  # a step or more per call


def share(count: int, rank: int, world_size: int) -> tuple[int, int]:
    """[lo, hi) of `count` things for one rank: contiguous, sizes differ by one at most."""
    return count * rank // world_size, count * (rank + 1) // world_size


def fuse(spans: list[Span]) -> list[Span]:
    """Neighbouring spans as one pass, keyed by the first."""
    return [Span(spans[0].number, spans[0].lo, spans[-1].hi)] if spans else []


def pass_key(base: int, step: int, number: int) -> int:
    """As `key`, for microbatch `number` of `step`; in the hot path, where a hash would cost 3 us.

    SplitMix64's finaliser (Steele et al., OOPSLA 2014) over a distinct word for each pass.
    """
    z = (base + step * 0x9E3779B97F4A7C15 + number * 0xD1342543DE82EF95) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (z ^ (z >> 31)) >> 1


def default_microbatch(global_batch: int) -> int:
    """The default cut: as many microbatches as the largest divisor of the global batch up to 8."""
    return global_batch // largest_divisor(global_batch, 8)


class PlanSampler:
    """The plan's order as a `batch_sampler` for a DataLoader in one's own loop.

    Yields this rank's data-set indices of each step, from `start_step` up to `num_steps` (in steps
    of the whole run). A rank without samples in a short last batch gets an empty list, so every
    rank makes the same number of steps; a DataLoader then needs a `collate_fn` that takes one, its
    own does not.

    Examples:
        >>> plan = Plan(num_samples=10, global_batch=4, microbatch=2, seed=0)
        >>> [len(batch) for batch in PlanSampler(plan, num_steps=3)]
        [4, 4, 2]
    """

    def __init__(
        self, plan: Plan, num_steps: int, rank: int = 0, world_size: int = 1, start_step: int = 0
    ) -> None:
        self.plan, self.rank, self.world_size = plan, rank, world_size
        self.steps = range(start_step, num_steps)

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[list[int]]:
        for step in self.steps:
            spans = self.plan.share(step, self.rank, self.world_size)
            yield [int(i) for span in fuse(spans) for i in self.plan.indices(step, span)]


def with_idle(spans: list[Span], shares: list[list[Span]]) -> list[Span]:
    """A rank's passes, and so many idle ones that all ranks have as many: each gathers weights with
    the others.
    """
    first = next(span for share in shares for span in share)
    idle = IdleSpan(first.number, first.lo, first.hi)
    return [*spans, *[idle] * (max(map(len, shares)) - len(spans))]
