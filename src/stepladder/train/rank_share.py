"""The passes of one rank in each step, and the samples that they read."""

from __future__ import annotations

from collections.abc import Iterator

from stepladder.core.plan import Span, fuse_spans
from stepladder.core.world import World
from stepladder.data.sources import Request
from stepladder.train.layout.base import StateLayout
from stepladder.train.run_spec import RunSpec


class RankShare:
    """The passes that one rank makes in each step of a run.

    A pass is a `Span` of the global batch: one microbatch, or the rank's whole share. The last
    batch of an epoch may be smaller than the others, so there are two lists of passes.

    Args:
        spec: The run.
        world: The ranks that share each step.
        layout: Says which passes this rank makes.
    """

    def __init__(self, spec: RunSpec, world: World, layout: StateLayout) -> None:
        self.spec = spec
        self.world = world
        self.layout = layout
        self.full_batch = self._spans_of(0)
        self.last_batch = self._spans_of(-1)

    def spans(self, step: int) -> list[Span]:
        """Return this rank's passes of one step, counted from 0."""
        if (step + 1) % self.spec.plan.steps_per_epoch == 0:
            return self.last_batch
        return self.full_batch

    def requests(self, first_step: int) -> Iterator[Request]:
        """Yield what this rank reads, pass by pass, from `first_step` to the end of the run."""
        plan = self.spec.plan
        for step in range(first_step, self.spec.num_steps):
            yield from plan.requests(step, self.spans(step))

    def _spans_of(self, step: int) -> list[Span]:
        plan = self.spec.plan
        num_ranks = self.world.world_size
        in_rounds = self.spec.settings.is_round_robin
        by_rank = []
        for rank in range(num_ranks):
            spans = plan.share(step, rank, num_ranks, in_rounds)
            if not self.spec.by_microbatch:
                spans = fuse_spans(spans)
            by_rank.append(spans)
        return self.layout.microbatches(by_rank)
