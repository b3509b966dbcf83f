"""Staging a snapshot: the copy of a nested state into host memory, for which training waits."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stepladder.core.errors import InputError
from stepladder.core.process_count import count_cores

# What torch.load reads with weights_only=True.
SAFE_TYPES = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
Keys = tuple[Any, ...]  # the keys and indices that lead to a tensor in a nested state
COPY_CHUNK_BYTES = 1 << 23
MAX_COPY_THREADS = 4  # one thread does not use a machine's whole memory bandwidth


class HostBuffers:
    """Host memory for copies of one state, allocated at the first copy and reused.

    A fresh clone of a large model takes ten times as long as the copy.
    """

    def __init__(self) -> None:
        self.buffers: dict[Keys, Tensor] = {}  # by the keys that lead to a tensor
        # Chunks of large tensors that are still to be copied.
        self.targets: list[Tensor] = []
        self.sources: list[Tensor] = []

    def copy(self, tree: Any) -> Any:
        """Return `tree` with every tensor copied into its own buffer."""
        result = self._copy(tree, ())
        if self.targets:
            num_threads = min(MAX_COPY_THREADS, count_cores())
            with ThreadPoolExecutor(num_threads) as pool:
                list(pool.map(_copy_bytes, self.targets, self.sources))
            self.targets.clear()
            self.sources.clear()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return result

    def _copy(self, tree: Any, keys: Keys) -> Any:
        if isinstance(tree, Tensor):
            return self._copy_tensor(tree, keys)
        if isinstance(tree, dict):
            items = tree.items()
            return {self._copy(key, keys): self._copy(value, (*keys, key)) for key, value in items}
        if isinstance(tree, (list, tuple)) and not hasattr(tree, "_fields"):
            return type(tree)(self._copy(value, (*keys, i)) for i, value in enumerate(tree))
        # A NumPy scalar would need pickle to be read. As a number of Python, a smaller one would
        # be computed with in other bits.
        if isinstance(tree, np.generic) and not isinstance(tree, (np.float16, np.float32)):
            return tree.item()
        if tree is None or type(tree) in SAFE_TYPES:  # none of a class made of them, as an Enum
            return tree
        raise InputError(
            f"state {'/'.join(map(str, keys))} is a {type(tree).__name__},"
            " which cannot be read back safely",
            "leave it out of state_dict; numbers, texts, lists, dicts and tensors can be stored",
        )

    def _copy_tensor(self, tensor: Tensor, keys: Keys) -> Tensor:
        buffer = self.buffers.get(keys)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self.buffers[keys] = buffer
        if not _is_large(tensor):
            return buffer.copy_(tensor.detach(), non_blocking=True)
        self.targets += _split_bytes(buffer)
        self.sources += _split_bytes(tensor.detach())
        return buffer


def _is_large(tensor: Tensor) -> bool:
    """Return whether several threads can copy the tensor as plain bytes, and gain by it."""
    is_contiguous = (
        tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and tensor.layout == torch.strided
        and not (tensor.is_conj() or tensor.is_neg())
    )
    return is_contiguous and tensor.nbytes > COPY_CHUNK_BYTES


def _split_bytes(tensor: Tensor) -> list[Tensor]:
    return list(tensor.view(-1).view(torch.uint8).split(COPY_CHUNK_BYTES))


def _copy_bytes(target: Tensor, source: Tensor) -> None:
    np.copyto(target.numpy(), source.numpy())  # it needs neither the GIL nor threads of its own


def split_tied_tensors(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Separate tensors that share memory, which a safetensors file cannot contain twice.

    Sharded tensors are left out.

    Returns:
        The tensors to store, each once, and for each other name of a tied tensor the name under
        which it is stored.
    """
    stored: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    names: dict[tuple[object, ...], str] = {}
    for name, tensor in state.items():
        if hasattr(tensor, "to_local"):
            continue
        memory = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and memory in names:
            aliases[name] = names[memory]
        else:
            names[memory] = name
            stored[name] = tensor
    return stored, aliases
