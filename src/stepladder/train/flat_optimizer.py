"""The parameters of a small model in one vector, which the optimizer steps as one.

A step of many small tensors is mostly calls: Adam on the four of a tiny MLP takes 112 us, on one
vector 50. What the optimizers of torch do to an element depends on that element alone, so the bits
are the same."""

from __future__ import annotations

import operator
from collections import defaultdict
from typing import Any

import torch

from stepladder.rank.torch_fixes import BareStep, step_without_dynamo
from stepladder.train.optimizer_shards import ALIGNMENT, ELEMENTWISE_OPTIMIZERS
from stepladder.train.sync.ddp import FIRST_BUCKET_BYTES

Values = dict[str, Any]
NO_GRAD = torch.no_grad()


class FlatGroup:
    """The parameters of one group of the optimizer. flat: their values, with a gradient of its own.

    Each parameter becomes a view of it, that begins where vectors do: kernels round by where a
    tensor begins."""

    def __init__(self, group: dict[str, Any]) -> None:
        self.whole = group["params"]
        self.params = [param for param in self.whole if param.requires_grad]
        sizes = [-(-param.numel() // ALIGNMENT) * ALIGNMENT for param in self.params]
        self.flat = self.params[0].detach().new_zeros(sum(sizes))
        self.flat.grad = torch.zeros_like(self.flat)
        self.sizes = sizes
        self.parts = self.cut(self.flat.grad)
        for param, part in zip(self.params, self.cut(self.flat), strict=True):
            part.copy_(param.detach())
            param.data = part
        self.places = [param.data_ptr() for param in self.params]

    def cut(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The parameters' parts of a vector like `flat`, in their shapes."""
        parts = zip(flat.split(self.sizes), self.params, strict=True)
        return [part[: param.numel()].view(param.shape) for part, param in parts]

    def take_gradients(self) -> bool:
        """Into the vector's. False where some parameters have none, or lie elsewhere now.

        A step of the vector is not theirs then.
        """
        grads = [param.grad for param in self.params]
        for grad in grads:
            if grad is None or grad.is_sparse:
                return False
        if [param.data_ptr() for param in self.params] != self.places:
            return False
        torch._foreach_copy_(self.parts, grads)
        return True

    def state_of(self, whole: dict[Any, Values]) -> Values | None:
        """The vector's state, of that of the parameters. None where theirs do not go together."""
        states = [whole.get(param, {}) for param in self.params]
        found: Values = {}
        for name in states[0]:
            values: list[Any] = [state.get(name) for state in states]
            if not all(isinstance(value, torch.Tensor) for value in values):
                return None
            if [value.shape for value in values] == [param.shape for param in self.params]:
                found[name] = torch.zeros_like(self.flat, dtype=values[0].dtype)
                torch._foreach_copy_(self.cut(found[name]), values)
            elif all(value.ndim == 0 and value.equal(values[0]) for value in values):
                found[name] = values[0].clone()
            else:
                return None
        return found if all(state.keys() == found.keys() for state in states) else None

    def spread(self, state: Values) -> list[Values]:
        """Of each parameter, its part of the vector's state."""
        of_each: list[Values] = [{} for _ in self.params]
        for name, value in state.items():
            is_whole = value.shape == self.flat.shape
            parts = self.cut(value) if is_whole else [value] * len(of_each)
            for own, part in zip(of_each, parts, strict=True):
                own[name] = part
        return of_each


class FlatOptimizer:
    """An optimizer that steps one vector per group, as long as that is a step of each of its
    parameters.

    Outside of `step` it has its parameters, and their state as views of the vectors'.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.groups = [FlatGroup(group) for group in optimizer.param_groups]
        self.bare_step = BareStep(optimizer)
        self.state: Any = defaultdict(dict)
        self.known: list[Any] = []
        self.adopt_state()

    def adopt_state(self) -> None:
        """Take the state that the optimizer has for its parameters."""
        self.state.clear()
        states = [group.state_of(self.optimizer.state) for group in self.groups]
        self.is_flat = None not in states
        if self.is_flat:
            self.state.update({g.flat: s for g, s in zip(self.groups, states, strict=True) if s})
            self._show()

    def _show(self) -> None:
        """Where the state has other tensors than before: the parameters' parts of them."""
        values = [value for state in self.state.values() for value in state.values()]
        if len(values) == len(self.known) and all(map(operator.is_, values, self.known)):
            return
        self.known = values
        for group in self.groups:
            for param, state in zip(
                group.params, group.spread(self.state.get(group.flat, {})), strict=True
            ):
                self.optimizer.state[param] = state

    def _give_up(self) -> None:
        """From now on each parameter is stepped by itself: what they shared becomes their own."""
        self.is_flat = False
        for group in self.groups:
            for param in group.params:
                for name, value in self.optimizer.state.get(param, {}).items():
                    if value.shape != param.shape:
                        self.optimizer.state[param][name] = value.clone()

    def step(self) -> None:
        """The optimizer's; during it, it has the vectors, with their gradients and their state."""
        optimizer, groups = self.optimizer, self.optimizer.param_groups
        if self.is_flat and not (
            self._is_unseen and all(map(FlatGroup.take_gradients, self.groups))
        ):
            self._give_up()
        if not self.is_flat:
            with step_without_dynamo():
                optimizer.step()
            return
        shown, optimizer.state = optimizer.state, self.state
        for group, own in zip(groups, self.groups, strict=True):
            group["params"] = [own.flat]
        try:
            with NO_GRAD:
                self.bare_step()
        finally:
            optimizer.state = shown
            for group, own in zip(groups, self.groups, strict=True):
                group["params"] = own.whole
        self._show()

    @property
    def _is_unseen(self) -> bool:
        """Whether nobody looks at the optimizer while it steps, and it has the groups that it had."""
        has_same_groups = len(self.optimizer.param_groups) == len(self.groups)
        return has_same_groups and not self.bare_step.is_observed


def make_flat_optimizer(
    optimizer: torch.optim.Optimizer, device: torch.device
) -> FlatOptimizer | None:
    """None where it would bring nothing, or nobody knows that it has the same bits."""
    kind, groups = type(optimizer), optimizer.param_groups
    if not (
        kind.__module__.startswith("torch.optim.")
        and kind.__name__ in ELEMENTWISE_OPTIMIZERS
        and device.type == "cpu"
    ):
        return None
    if any(
        group.get(name) for group in groups for name in ("fused", "capturable", "differentiable")
    ):
        return None  # the first rounds what is left of a loop by vectors in another way
    lists = [[param for param in group["params"] if param.requires_grad] for group in groups]
    params = [param for own in lists for param in own]
    if not all(lists) or len(params) == len(lists):
        return None
    if any(
        not param.is_contiguous() or param.layout != torch.strided or param.is_complex()
        for param in params
    ):
        return None
    if any(
        param.dtype != own[0].dtype or not param.numel() or not param.ndim
        for own in lists
        for param in own
    ):
        return None
    bytes_of_all = sum(param.numel() * param.element_size() for param in params)
    return FlatOptimizer(optimizer) if bytes_of_all <= FIRST_BUCKET_BYTES else None
