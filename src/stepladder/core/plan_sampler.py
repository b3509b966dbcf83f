"""The plan's order for a DataLoader."""

from __future__ import annotations

from collections.abc import Iterator

from stepladder.core.arguments import validate_arguments
from stepladder.core.plan import Plan


class PlanSampler:
    """The plan's order as a `batch_sampler` for a DataLoader in your own training loop.

    Yields this rank's data-set indices of each step. A rank without samples in a short last batch
    gets an empty list, so every rank makes the same number of steps; a DataLoader then needs a
    `collate_fn` that accepts an empty list, which its default does not.

    Args:
        plan: The plan.
        num_steps: The step after the last one, counted over the whole run.
        rank: This process's rank.
        world_size: The number of ranks.
        start_step: The first step.

    Examples:
        >>> plan = Plan(num_samples=10, global_batch=4, microbatch=2, seed=0)
        >>> [len(batch) for batch in PlanSampler(plan, num_steps=3)]
        [4, 4, 2]
    """

    @validate_arguments
    def __init__(
        self, plan: Plan, num_steps: int, rank: int = 0, world_size: int = 1, start_step: int = 0
    ) -> None:
        self.plan = plan
        self.rank = rank
        self.world_size = world_size
        self.steps = range(start_step, num_steps)

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[list[int]]:
        for step in self.steps:
            yield self.plan.indices_of_rank(step, self.rank, self.world_size).tolist()
