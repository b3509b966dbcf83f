"""What ranks send each other besides gradients: a nested state, tensor by tensor, and texts."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import Tensor

from stepladder.rank.torch_fixes import tree_map_only
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
        torch.save(tree_map_only(Tensor, lambda tensor: tensor.to("meta"), state), file)
    data = comm.broadcast_bytes(file.getvalue(), source)
    structure = torch.load(io.BytesIO(data), weights_only=True)

    def receive(like: Tensor) -> Tensor:
        tensor = torch.empty(like.shape, dtype=like.dtype)
        comm.broadcast(tensor, source)
        return tensor if needed else like

    def send(tensor: Tensor) -> None:
        comm.broadcast(tensor.detach().cpu().contiguous(), source)

    if state is None:
        return tree_map_only(Tensor, receive, structure)
    tree_map_only(Tensor, send, state)
    return state


def gather_texts(comm: Comm, text: bytes) -> list[bytes]:
    """Return every rank's text, padded with spaces to one length."""
    lengths = comm.gather_bytes(len(text).to_bytes(8, "big"))
    longest = max(int.from_bytes(length, "big") for length in lengths)
    return comm.gather_bytes(text.ljust(longest))
