"""What the ledgers of a run should hold: computed from its plan, without a look at them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepladder.core.plan import Plan
from stepladder.storage.ledger import digests


@dataclass(frozen=True)
class Planned:
    """What the ranks should have trained in steps [first, first + n): counts and digests of shape
    (n, ranks).
    """

    first: int
    epochs: NDArray[np.int64]
    counts: NDArray[np.int64]
    digests: NDArray[np.uint64]


def planned_steps(
    plan: Plan, first: int, last: int, world_size: int, in_rounds: bool = False
) -> Planned:
    """Of the steps [first, last), counted from 0. An epoch's order is made once for all that are in
    it.

    in_rounds: as `Plan.share` has it.
    """
    sizes = [hi - lo for lo, hi in map(plan.batch, range(first, last))]
    cuts = {
        size: places(plan, first + sizes.index(size), world_size, in_rounds) for size in set(sizes)
    }
    counts = np.array([list(map(len, cuts[size])) for size in sizes])
    indices = np.concatenate(list(orders(plan, first, last)))
    if in_rounds:
        starts = np.cumsum([0, *sizes[:-1]])
        indices = indices[
            np.concatenate(
                [at + np.concatenate(cuts[n]) for at, n in zip(starts, sizes, strict=True)]
            )
        ]
    epochs = np.arange(first, last) // plan.steps_per_epoch
    return Planned(
        first, epochs, counts, digests(indices, counts.ravel().tolist()).reshape(counts.shape)
    )


def places(plan: Plan, step: int, world_size: int, in_rounds: bool) -> list[NDArray[np.int64]]:
    """Where in the step's order each rank's samples are."""
    shares = [plan.share(step, rank, world_size, in_rounds) for rank in range(world_size)]
    return [
        np.concatenate([np.empty(0, np.int64), *(np.arange(s.lo, s.hi) for s in spans)])
        for spans in shares
    ]


def orders(plan: Plan, first: int, last: int) -> Iterator[NDArray[np.int64]]:
    """The data-set indices of these steps, one after the other."""
    while first < last:
        end = min(last, (first // plan.steps_per_epoch + 1) * plan.steps_per_epoch)
        if plan.stream is None:
            yield plan.indices_at(
                plan.epoch_of_step(first), plan.batch(first)[0], plan.batch(end - 1)[1]
            )
        else:
            yield from (
                plan.stream.indices(plan.epoch_of_step(s), *plan.batch(s))
                for s in range(first, end)
            )
        first = end
