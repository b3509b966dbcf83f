"""Several optimizers in one job, which the rest of the code takes for one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch


class Optimizers(torch.optim.Optimizer):
    """Several optimizers as one: `Optimizers(Muon(matrices), AdamW(others))`. They step one after
    the other.

    Each keeps its settings and may have its schedule: Job(..., schedule=(one, other)). param_groups
    are those of all, in their order. No parameter may be in two of them (ValueError)."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers: tuple[
            torch.optim.Optimizer, ...
        ] = ()  # whose state torch's __init__ would empty
        super().__init__([group for one in optimizers for group in one.param_groups], {})
        self.optimizers = optimizers
        self._join()

    @property
    def state(self) -> Any:
        """One mapping for all of them, by parameter."""
        return self._state

    @state.setter
    def state(self, state: Any) -> None:
        self._state = state
        for one in self.optimizers:
            one.state = state

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of each. closure: computes the loss anew, once, before them."""
        loss = None if closure is None else closure()
        for one in self.optimizers:
            one.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As an Optimizer's. Raises ValueError where the groups are not those of these optimizers."""
        groups, at = state_dict["param_groups"], 0
        if len(groups) != len(self.param_groups):
            raise ValueError("loaded state dict has a different number of parameter groups")
        for one in self.optimizers:
            mine = groups[at : at + len(one.param_groups)]
            at += len(mine)
            numbers = [
                number
                for group in mine
                for number in group["params"]
                if number in state_dict["state"]
            ]
            one.load_state_dict(
                {"state": {n: state_dict["state"][n] for n in numbers}, "param_groups": mine}
            )
        self._join()

    def _join(self) -> None:
        joined: Any = defaultdict(dict)
        for one in self.optimizers:
            joined.update(one.state)
        self.state = joined
        self.param_groups = [group for one in self.optimizers for group in one.param_groups]


def list_optimizers(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """Those that it consists of, or itself."""
    return optimizer.optimizers if isinstance(optimizer, Optimizers) else (optimizer,)
