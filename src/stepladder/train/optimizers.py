"""Several optimizers in one job, used as one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch


class Optimizers(torch.optim.Optimizer):
    """Several optimizers as one: `Optimizers(Muon(matrices), AdamW(other_parameters))`.

    They step one after the other. Each keeps its own settings, and may have its own schedule:
    `Job(..., schedule=(first, second))`.

    Args:
        *optimizers: The optimizers; `param_groups` are the groups of all of them, in this order.

    Raises:
        ValueError: If a parameter is in two of them.
    """

    _state: Any

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        # Empty at first: torch's __init__ sets an empty `state`, which must not reach them.
        self.optimizers: tuple[torch.optim.Optimizer, ...] = ()
        super().__init__([group for part in optimizers for group in part.param_groups], {})
        self.optimizers = optimizers
        self._join()

    @property
    def state(self) -> Any:
        """The state of all optimizers, by parameter."""
        return self._state

    @state.setter
    def state(self, state: Any) -> None:
        self._state = state
        for optimizer in self.optimizers:
            optimizer.state = state

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step each optimizer once.

        Args:
            closure: Computes the loss again, once, before the first optimizer steps.

        Returns:
            The loss that the closure has computed; None without a closure.
        """
        loss = None if closure is None else closure()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` has returned.

        Raises:
            ValueError: If its groups are not the groups of these optimizers.
        """
        groups = state_dict["param_groups"]
        if len(groups) != len(self.param_groups):
            raise ValueError("loaded state dict has a different number of parameter groups")
        states = state_dict["state"]
        first = 0
        for optimizer in self.optimizers:
            end = first + len(optimizer.param_groups)
            own_groups = groups[first:end]
            first = end
            numbers = [number for group in own_groups for number in group["params"]]
            own_states = {number: states[number] for number in numbers if number in states}
            optimizer.load_state_dict({"state": own_states, "param_groups": own_groups})
        self._join()

    def _join(self) -> None:
        """Make one state and one list of groups of those of all optimizers."""
        joined: Any = defaultdict(dict)
        for optimizer in self.optimizers:
            joined.update(optimizer.state)
        self.state = joined
        self.param_groups = [group for part in self.optimizers for group in part.param_groups]


def list_optimizers(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """Return the optimizers that an `Optimizers` consists of, or any other optimizer alone."""
    return optimizer.optimizers if isinstance(optimizer, Optimizers) else (optimizer,)
