"""What takes part in every step of the training loop, besides the layout and the recorder."""

from __future__ import annotations

from stepladder.train.sync.base import Backward, StepResult


class LoopListener:
    """Is called by the training loop in each step; a method that is not overridden does nothing.

    A step calls `begin_step` and the three `after_` methods; if ranks are lost in it, `cancel`.
    """

    def begin_step(self, step: int, backward: Backward) -> Backward:
        """Prepare for the step after `step` steps, and return the function that adds gradients."""
        return backward

    def after_reduce(self, step: int, result: StepResult) -> None:
        """Act once gradients are added over all ranks, before they move a weight."""

    def after_update(self, votes: list[bool]) -> None:
        """Act once this rank has stepped what it steps; `votes` are the agreed actions."""

    def after_gather(self) -> None:
        """Act once every rank has the new weights that it holds."""

    def cancel(self) -> None:
        """Leave everything as it was before the step, which is not completed."""
