"""What a run's ledgers should contain, computed from its plan alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepladder.core.plan import Plan
from stepladder.storage.ledger import NO_INDICES, Digests, Indices, compute_digests


@dataclass(frozen=True)
class PlannedSteps:
    """What the ranks should have trained in consecutive steps.

    Args:
        first: The first step, counted from 0.
        epochs: The epoch of each step, of shape (steps,).
        counts: The number of samples of each rank, of shape (steps, ranks).
        digests: The digest of each rank's samples, of shape (steps, ranks).
    """

    first: int
    epochs: NDArray[np.int64]
    counts: NDArray[np.int64]
    digests: Digests


def compute_planned_steps(
    plan: Plan, first: int, end: int, world_size: int, round_robin: bool = False
) -> PlannedSteps:
    """Return what the ranks should train in consecutive steps.

    All steps are computed at once, because the order of an epoch is costly to make.

    Args:
        plan: The run's plan.
        first: The first step, counted from 0.
        end: The step after the last one.
        world_size: The number of ranks.
        round_robin: Whether ranks take microbatches in turns, see `Plan.share`.
    """
    sizes = []
    for step in range(first, end):
        lo, hi = plan.batch(step)
        sizes.append(hi - lo)
    # Steps of one size are divided among the ranks alike.
    positions = {
        size: _locate_samples(plan, first + sizes.index(size), world_size, round_robin)
        for size in set(sizes)
    }
    counts = np.array([[len(samples) for samples in positions[size]] for size in sizes])
    # In the order of the steps. Without turns this is also the order of the ranks within a step.
    indices = np.concatenate(list(iterate_indices(plan, first, end)))
    if round_robin:
        starts = np.cumsum([0, *sizes[:-1]])
        order = [
            start + np.concatenate(positions[size])
            for start, size in zip(starts, sizes, strict=True)
        ]
        indices = indices[np.concatenate(order)]
    epochs = np.arange(first, end) // plan.steps_per_epoch
    digests = compute_digests(indices, counts.ravel().tolist()).reshape(counts.shape)
    return PlannedSteps(first, epochs, counts, digests)


def _locate_samples(plan: Plan, step: int, world_size: int, round_robin: bool) -> list[Indices]:
    """Return for each rank the positions of its samples in the order of a step."""
    positions = []
    for rank in range(world_size):
        spans = plan.share(step, rank, world_size, round_robin)
        ranges = [np.arange(span.lo, span.hi) for span in spans]
        positions.append(np.concatenate([NO_INDICES, *ranges]))
    return positions


def iterate_indices(plan: Plan, first: int, end: int) -> Iterator[Indices]:
    """Yield the data-set indices of the steps [first, end), in their order."""
    while first < end:
        epoch = plan.epoch_of_step(first)
        epoch_end = min(end, (first // plan.steps_per_epoch + 1) * plan.steps_per_epoch)
        if plan.is_made_by_step:
            for step in range(first, epoch_end):
                yield plan.indices_at(epoch, *plan.batch(step))
        else:  # all at once: the order of data in memory is made for a whole epoch
            lo, _ = plan.batch(first)
            _, hi = plan.batch(epoch_end - 1)
            yield plan.indices_at(epoch, lo, hi)
        first = epoch_end
