"""The parameters of a small model in one vector, which the optimizer steps as one parameter.

A step of many small tensors is mostly function calls: Adam takes 112 us for the four tensors of a
tiny MLP, and 50 us for one vector. What torch's optimizers do to an element depends on that element
alone, so the bits are the same.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from stepladder.core.settings import Settings
from stepladder.rank.torch_fixes import BareStep
from stepladder.train.comm import Comm
from stepladder.train.job import Job
from stepladder.train.layout.base import StateLayout
from stepladder.train.layout.pieces import ALIGNMENT, substitute_params
from stepladder.train.optimizers import ELEMENTWISE_OPTIMIZERS, is_from_torch
from stepladder.train.sync.ddp import FIRST_BUCKET_BYTES

State = dict[str, Any]  # an optimizer's state of one parameter, by name
NO_GRAD = torch.no_grad()


class _FlatGroup:
    """The parameters of one group of the optimizer, as views of one vector with its own gradient.

    Each view begins at a multiple of ALIGNMENT, since kernels round by where a tensor begins.
    """

    def __init__(self, group: dict[str, Any]) -> None:
        self.params = [param for param in group["params"] if param.requires_grad]
        self.sizes = [_round_up(param.numel()) for param in self.params]
        self.vector = self.params[0].detach().new_zeros(sum(self.sizes))
        self.vector.grad = torch.zeros_like(self.vector)
        self.grad_parts = self.split(self.vector.grad)
        for param, part in zip(self.params, self.split(self.vector), strict=True):
            part.copy_(param.detach())
            param.data = part
        self.addresses = [param.data_ptr() for param in self.params]

    def split(self, vector: Tensor) -> list[Tensor]:
        """Return the parameters' parts of a vector, in the parameters' shapes."""
        parts = zip(vector.split(self.sizes), self.params, strict=True)
        return [part[: param.numel()].view(param.shape) for part, param in parts]

    def copy_gradients(self) -> bool:
        """Copy the parameters' gradients into the vector's gradient.

        Returns:
            False if a parameter has no dense gradient or is not a view of the vector any more, so
            that a step of the vector would not be a step of each parameter.
        """
        grads = [param.grad for param in self.params]
        for grad in grads:
            if grad is None or grad.is_sparse:
                return False
        if [param.data_ptr() for param in self.params] != self.addresses:
            return False
        torch._foreach_copy_(self.grad_parts, grads)
        return True

    def join_state(self, states_by_param: dict[Any, State]) -> State | None:
        """Return the vector's state, or None if the parameters' states do not go together."""
        states = [states_by_param.get(param, {}) for param in self.params]
        joined: State = {}
        for name in states[0]:
            values = [state.get(name) for state in states]
            value = self._join_values(values)
            if value is None:
                return None
            joined[name] = value
        has_same_names = all(state.keys() == joined.keys() for state in states)
        return joined if has_same_names else None

    def _join_values(self, values: list[Any]) -> Tensor | None:
        if not all(isinstance(value, Tensor) for value in values):
            return None
        if [value.shape for value in values] == [param.shape for param in self.params]:
            vector = torch.zeros_like(self.vector, dtype=values[0].dtype)
            torch._foreach_copy_(self.split(vector), values)
            return vector
        if all(value.ndim == 0 and value.equal(values[0]) for value in values):
            copy: Tensor = values[0].clone()
            return copy
        return None

    def split_state(self, state: State) -> list[State]:
        """Return each parameter's part of the vector's state."""
        states: list[State] = [{} for _ in self.params]
        for name, value in state.items():
            if value.shape == self.vector.shape:
                parts = self.split(value)
            else:
                parts = [value] * len(states)
            for param_state, part in zip(states, parts, strict=True):
                param_state[name] = part
        return states


class Flat(StateLayout):
    """Each rank steps one vector per group, for as long as that is a step of each parameter.

    Outside of `step`, the optimizer has its own parameters, and their state as views of the
    vectors' state.
    """

    def __init__(self, job: Job, comm: Comm) -> None:
        super().__init__(job, comm)
        self.groups = [_FlatGroup(group) for group in self.optimizer.param_groups]
        self.bare_step = BareStep(self.optimizer)
        self.state: Any = defaultdict(dict)  # of the vectors
        self.shown_values: list[Any] = []  # the tensors of which the optimizer has views
        self.is_flat = True
        self.adopt_state()

    @classmethod
    def choose(cls, settings: Settings, job: Job, comm: Comm) -> type[StateLayout]:
        """Return this class if it helps and gives the same bits."""
        scales_loss = settings.precision == "fp16"
        return (
            cls if not scales_loss and _is_flattenable(job.optimizer, comm.device) else StateLayout
        )

    def adopt_state(self) -> None:
        """Copy the state that the optimizer has for its parameters into the vectors' state."""
        self.state.clear()
        states = [group.join_state(self.optimizer.state) for group in self.groups]
        self.is_flat = None not in states
        if self.is_flat:
            for group, state in zip(self.groups, states, strict=True):
                if state:
                    self.state[group.vector] = state
            self._show_state()

    def _show_state(self) -> None:
        """Give the optimizer views of the vectors' state, if that has new tensors."""
        values = [value for state in self.state.values() for value in state.values()]
        has_same_length = len(values) == len(self.shown_values)
        if has_same_length and all(map(operator.is_, values, self.shown_values)):
            return
        self.shown_values = values
        for group in self.groups:
            states = group.split_state(self.state.get(group.vector, {}))
            for param, state in zip(group.params, states, strict=True):
                self.optimizer.state[param] = state

    def _stop_flat_steps(self) -> None:
        """Step each parameter by itself from now on, with its own copy of what they shared."""
        self.is_flat = False
        for group in self.groups:
            for param in group.params:
                state = self.optimizer.state.get(param, {})
                for name, value in state.items():
                    if value.shape != param.shape:
                        state[name] = value.clone()

    def step(self, scaler: torch.amp.GradScaler) -> bool:
        """Take one step of the optimizer."""
        if self.is_flat and not self._prepare_flat_step():
            self._stop_flat_steps()
        if not self.is_flat:
            return super().step(scaler)
        vectors = [[group.vector] for group in self.groups]
        with substitute_params(self.optimizer, vectors, self.state), NO_GRAD:
            self.bare_step()
        self._show_state()
        return True

    def _prepare_flat_step(self) -> bool:
        """Copy the gradients into the vectors, and return whether the vectors can be stepped."""
        has_same_groups = len(self.optimizer.param_groups) == len(self.groups)
        if not has_same_groups or self.bare_step.is_observed:
            return False
        return all(map(_FlatGroup.copy_gradients, self.groups))


def _is_flattenable(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """Return whether steps of vectors help and give the bits of steps of each parameter."""
    kind = type(optimizer)
    if (
        not is_from_torch(optimizer)
        or kind.__name__ not in ELEMENTWISE_OPTIMIZERS
        or device.type != "cpu"
    ):
        return False
    # A fused step rounds the end of a vector differently.
    for option in ("fused", "capturable", "differentiable"):
        if any(group.get(option) for group in optimizer.param_groups):
            return False
    params_by_group = [
        [param for param in group["params"] if param.requires_grad]
        for group in optimizer.param_groups
    ]
    params = [param for group in params_by_group for param in group]
    if not all(params_by_group) or len(params) == len(params_by_group):
        return False
    for group in params_by_group:
        if not all(_can_be_flat(param, group[0].dtype) for param in group):
            return False
    size: int = sum(param.numel() * param.element_size() for param in params)
    return size <= FIRST_BUCKET_BYTES


def _can_be_flat(param: torch.nn.Parameter, dtype: torch.dtype) -> bool:
    """Return whether a parameter can be a view of a vector of this type."""
    # The end of a tensor of a half-precision type is rounded differently than a vector's elements.
    has_right_type = param.dtype == dtype and dtype in (torch.float32, torch.float64)
    is_dense = param.layout == torch.strided and param.is_contiguous()
    return has_right_type and is_dense and param.numel() > 0 and param.ndim > 0


def _round_up(size: int) -> int:
    """Return the next multiple of ALIGNMENT."""
    return -(-size // ALIGNMENT) * ALIGNMENT
