"""Several optimizers in one job, used as one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from stepladder.core.errors import InputError
from stepladder.rank.torch_fixes import BareStep, count_memory_users

Rate = torch.Tensor | float
# Optimizers of torch.optim. What a step of them does to an element depends on that element alone.
ELEMENTWISE_OPTIMIZERS = [
    "SGD",
    "Adam",
    "AdamW",
    "RMSprop",
    "Adagrad",
    "Adadelta",
    "Adamax",
    "NAdam",
    "RAdam",
    "Rprop",
]
# What a step of these does to an element depends on all elements of its parameter.
PARAMETERWISE_OPTIMIZERS = ["Adafactor", "Muon"]


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
        for optimizer in optimizers:
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise InputError(
                    f"Optimizers got a {type(optimizer).__name__}",
                    "Optimizers(torch.optim.SGD(model.parameters(), lr=0.1))",
                )
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


def load_state(optimizer: torch.optim.Optimizer, stored: dict[str, Any]) -> None:
    """Load what the optimizer's `state_dict` has returned.

    torch gives floating-point state the type of its weight: moments of 32 bits for weights of 16
    would be rounded. Here each tensor keeps the type that it was stored with.
    """
    optimizer.load_state_dict(stored)
    kinds: list[Any] = list(map(type, list_optimizers(optimizer)))
    if all(kind.load_state_dict is torch.optim.Optimizer.load_state_dict for kind in kinds):
        params = [param for group in optimizer.param_groups for param in group["params"]]
        for number, state in stored["state"].items():
            loaded = optimizer.state[params[number]]
            loaded.update(_restore_types(loaded, state))


def _restore_types(loaded: Any, stored: Any) -> Any:
    """Return what was loaded, where tensors have the types that they were stored with."""
    if isinstance(stored, torch.Tensor):
        return loaded if loaded.dtype == stored.dtype else stored.to(loaded.device, copy=True)
    if isinstance(stored, dict):
        return {key: _restore_types(value, stored[key]) for key, value in loaded.items()}
    if isinstance(stored, (list, tuple)):
        return type(stored)(map(_restore_types, loaded, stored))
    return loaded


def name_params(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the names of an optimizer's parameters in its order, by which its state is saved."""
    names = {id(param): name for name, param in model.named_parameters()}
    groups = optimizer.param_groups
    return [names.get(id(param), "") for group in groups for param in group["params"]]


def is_from_torch(part: Any) -> bool:
    """Tell whether an optimizer or a schedule is of one of torch's own classes."""
    return type(part).__module__.startswith("torch.optim.")


def read_rates(optimizer: torch.optim.Optimizer) -> list[Rate]:
    """Return the learning rate of each group, as it is now: a schedule writes into a tensor."""
    rates = [group["lr"] for group in optimizer.param_groups]
    return [rate.clone() if isinstance(rate, torch.Tensor) else rate for rate in rates]


def is_plateau(schedule: Any) -> bool:
    """Tell whether a schedule follows a metric: ReduceLROnPlateau, or a class made of it."""
    return isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau)


def find_elementwise_params(optimizer: torch.optim.Optimizer) -> set[torch.nn.Parameter]:
    """Return the parameters that can be cut anywhere."""
    return {
        param
        for member in list_optimizers(optimizer)
        if type(member).__name__ in ELEMENTWISE_OPTIMIZERS
        for group in member.param_groups
        for param in group["params"]
    }


def validate_unobserved(optimizer: torch.optim.Optimizer, shard: str) -> None:
    """Raise InputError if a hook would see the slices that an optimizer steps with --shard."""
    for member in (optimizer, *list_optimizers(optimizer)):
        if BareStep(member).is_observed:
            raise InputError(
                f"--shard {shard}: a hook of {type(member).__name__}'s step, or a function in place"
                " of it, would see slices of the weights",
                "leave --shard out, or do without the hook",
            )


def validate_optimizer(optimizer: torch.optim.Optimizer, known: list[str], shard: str) -> None:
    """Check that the step of an optimizer stays the same when its parameters are cut.

    Args:
        optimizer: The job's optimizer.
        known: The names of torch's optimizers that can be used.
        shard: The value of --shard.

    Raises:
        InputError: The optimizer is none of these, or something observes its steps.
    """
    validate_unobserved(optimizer, shard)
    for group in optimizer.param_groups:
        for param in group["params"]:
            if count_memory_users(param) > count_memory_users(nn.Parameter(torch.empty(1))):
                raise InputError(
                    f"--shard {shard}: another tensor lies in the memory of a weight of shape"
                    f" {list(param.shape)}, and would keep its old values",
                    "make it a copy by .clone(), or leave --shard out",
                )
    for kind in map(type, list_optimizers(optimizer)):
        is_from_torch = f"{kind.__module__}.".startswith("torch.optim.")
        if not is_from_torch or kind.__name__ not in known:
            raise InputError(
                f"--shard {shard}: a step of {kind.__name__} on slices of its parameters may have"
                " another result",
                f"one of torch.optim's {', '.join(known)}, or leave --shard out",
            )
