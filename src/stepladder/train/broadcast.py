"""A nested state, its tensors one by one, from one rank to others."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch

from stepladder.train.comm import Comm


def broadcast_state(comm: Comm, state: Any, source: int, wanted: bool) -> Any:
    """The state of rank `source`: tensors in dicts, lists and tuples, with numbers and texts. A
    collective.

    wanted: whether this rank takes it; the others let it pass, one tensor at a time. Returns it.
    """
    file = io.BytesIO()
    if state is not None:  # first without what its tensors hold
        torch.save(_each_tensor(state, lambda tensor: tensor.to("meta")), file)
    shape = torch.load(io.BytesIO(comm.broadcast_bytes(file.getvalue(), source)), weights_only=True)

    def receive(like: torch.Tensor) -> torch.Tensor:
        tensor = torch.empty(like.shape, dtype=like.dtype)
        comm.broadcast(tensor, source)
        return tensor if wanted else like

    if state is None:
        return _each_tensor(shape, receive)
    _each_tensor(state, lambda tensor: comm.broadcast(tensor.detach().cpu().contiguous(), source))
    return state


def _each_tensor(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """The value with what `function` makes of each tensor in it, in one order on all ranks."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        return {name: _each_tensor(one, function) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_each_tensor(one, function) for one in value)
    return value
