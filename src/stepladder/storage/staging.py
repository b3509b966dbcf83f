"""The copy that training waits for: a nested state in host memory, each tensor once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from stepladder.core.process_count import count_cores

READABLE = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.dtype,
    torch.device,
    torch.Size,
)  # with weights_only=True
PIECE_BYTES = 1 << 23
MOST_THREADS = 4  # one does not fill a machine's memory bandwidth, and training waits


class HostCopies:
    """Host buffers allocated once: a fresh clone of a large model costs ten times the copy."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[Any, ...], torch.Tensor] = {}
        self.large: list[
            tuple[torch.Tensor, torch.Tensor]
        ] = []  # still to be copied, in pieces of bytes

    def copy(self, tree: Any) -> Any:
        """`tree` with every tensor copied into its own buffer."""
        copied = self._copy(tree, ())
        if self.large:
            with ThreadPoolExecutor(min(MOST_THREADS, count_cores())) as pool:
                list(pool.map(_copy_bytes, *zip(*self.large, strict=True)))
            self.large.clear()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return copied

    def _copy(self, tree: Any, place: tuple[Any, ...]) -> Any:
        if isinstance(tree, torch.Tensor):
            buffer = self.buffers.get(place)
            if buffer is None or buffer.shape != tree.shape or buffer.dtype != tree.dtype:
                buffer = torch.empty(tree.shape, dtype=tree.dtype, pin_memory=tree.is_cuda)
                self.buffers[place] = buffer
            if _is_large(tree):
                self.large += zip(_pieces(buffer), _pieces(tree.detach()), strict=True)
                return buffer
            return buffer.copy_(tree.detach(), non_blocking=True)
        if isinstance(tree, dict):
            return {name: self._copy(value, (*place, name)) for name, value in tree.items()}
        if isinstance(tree, (list, tuple)):
            return type(tree)(self._copy(value, (*place, i)) for i, value in enumerate(tree))
        if isinstance(tree, np.generic):  # refused on reading, for it would need pickle
            return tree.item()
        if tree is None or isinstance(tree, READABLE):
            return tree
        raise TypeError(
            f"state {'/'.join(map(str, place))} is a {type(tree).__name__}, which cannot be read back safely"
        )


def _is_large(tensor: torch.Tensor) -> bool:
    """Whether it is worth several threads, and plain bytes in one row."""
    plain = (
        tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg())
    )
    return plain and tensor.layout == torch.strided and tensor.nbytes > PIECE_BYTES


def _pieces(tensor: torch.Tensor) -> list[torch.Tensor]:
    return list(tensor.view(-1).view(torch.uint8).split(PIECE_BYTES))


def _copy_bytes(out: torch.Tensor, given: torch.Tensor) -> None:
    np.copyto(out.numpy(), given.numpy())  # without the GIL, and without threads of its own


def without_ties(state: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors that share memory once, and {other name: stored name}: safetensors refuses shared
    memory.

    Those that are spread over ranks are left out.
    """
    kept: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    names: dict[tuple[Any, ...], str] = {}
    for name, tensor in state.items():
        if hasattr(tensor, "to_local"):
            continue
        where = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and where in names:
            aliases[name] = names[where]
        else:
            names[where] = name
            kept[name] = tensor
    return kept, aliases
