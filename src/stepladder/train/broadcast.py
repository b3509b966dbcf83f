"""What ranks send each other besides gradients: a nested state, tensor by tensor, and texts."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stepladder.train.comm import Comm


def broadcast_state(comm: Comm, state: Any, source: int, needed: bool) -> Any:
    """Send the state of rank `source` to all ranks. All ranks must call this function.

    Args:
        comm: The ranks.
        state: Tensors, numbers and texts in dicts, lists and tuples; None on the other ranks.
        source: The rank that sends.
        needed: Whether this rank needs the state. If not, it receives one tensor at a time without
            keeping it.

    Returns:
        The state of rank `source`; without the values of its tensors if the state is not needed.
    """
    file = io.BytesIO()
    if state is not None:  # the structure first, without the tensors' values
        torch.save(_map_tensors(state, lambda tensor: tensor.to("meta")), file)
    data = comm.broadcast_bytes(file.getvalue(), source)
    structure = torch.load(io.BytesIO(data), weights_only=True)

    def receive(like: Tensor) -> Tensor:
        tensor = torch.empty(like.shape, dtype=like.dtype)
        comm.broadcast(tensor, source)
        return tensor if needed else like

    def send(tensor: Tensor) -> None:
        comm.broadcast(tensor.detach().cpu().contiguous(), source)

    if state is None:
        return _map_tensors(structure, receive)
    _map_tensors(state, send)
    return state


def _map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """Replace each tensor by what `function` returns for it, in one order on all ranks."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {name: _map_tensors(item, function) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_map_tensors(item, function) for item in value)
    return value


def gather_texts(comm: Comm, text: bytes) -> list[bytes]:
    """Return every rank's text, padded with spaces to one length."""
    lengths = comm.gather_bytes(len(text).to_bytes(8, "big"))
    longest = max(int.from_bytes(length, "big") for length in lengths)
    return comm.gather_bytes(text.ljust(longest))
