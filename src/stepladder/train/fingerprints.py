"""Short hashes of tensors, values, data and orders, by which ranks compare what they hold."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import torch

from stepladder.core.order import SORT
from stepladder.core.plan import Plan
from stepladder.data.source import get_contents
from stepladder.data.sources import BatchSource, StreamSource, TensorSource

HASH_BYTES = 8
TOTAL_HASH_BYTES = 16
MAX_SAMPLES_COMPARED = 32
MAX_INDICES_COMPARED = 1024


def fingerprint(value: Any) -> bytes:
    """Return 8 bytes that depend on every bit and the shape of a tensor, or on a value's repr."""
    if not isinstance(value, torch.Tensor):
        return blake2b(repr(value).encode(), digest_size=HASH_BYTES).digest()
    if parts := _list_parts(value):
        return fingerprint([fingerprint(part) for part in parts])
    host = value.detach().cpu().contiguous()
    header = f"{host.dtype} {list(host.shape)}".encode()
    tensor_hash = blake2b(header, digest_size=HASH_BYTES)
    tensor_hash.update(host.reshape(-1).view(torch.uint8).numpy().data)
    return tensor_hash.digest()


def _list_parts(value: torch.Tensor) -> list[torch.Tensor]:
    """Return the dense tensors that make up a nested or a sparse tensor; none for a dense one."""
    if value.layout is torch.strided and not value.is_nested:
        return []
    if value.is_nested:  # its shape has a symbol, which is another one each time
        return list(value.unbind())
    shape = torch.tensor(value.shape)
    if value.layout is torch.sparse_coo:
        return [shape, value._indices(), value._values()]
    if value.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [shape, value.crow_indices(), value.col_indices(), value.values()]
    return [shape, value.ccol_indices(), value.row_indices(), value.values()]


def count_writes(tensor: torch.Tensor) -> int:
    """Return torch's count of writes to a tensor; 0 for one of inference mode, which has none."""
    return 0 if tensor.is_inference() else tensor._version


def digest(data: bytes) -> bytes:
    """Return 16 bytes that depend on every byte of many fingerprints."""
    return blake2b(data, digest_size=TOTAL_HASH_BYTES).digest()


def split_fingerprints(data: bytes) -> list[bytes]:
    """Return fingerprints that were joined."""
    return [data[begin : begin + HASH_BYTES] for begin in range(0, len(data), HASH_BYTES)]


def fingerprint_source(source: BatchSource | None) -> bytes:
    """Return 8 bytes that depend on a few samples of data in memory or files, else zeros."""
    if isinstance(source, StreamSource):
        return fingerprint([digest for _, digest in get_contents(source.source) or ()])
    if not isinstance(source, TensorSource) or not len(source):
        return bytes(HASH_BYTES)
    last = len(source) - 1
    positions = torch.linspace(0, last, MAX_SAMPLES_COMPARED, dtype=torch.float64)
    indices = positions.long().to(source.device)
    samples = [tensor[indices] for tensor in source.tensors]
    return fingerprint([fingerprint(tensor) for tensor in samples])


@lru_cache(maxsize=1)
def fingerprint_order(plan: Plan, epoch: int) -> bytes:
    """Return 8 bytes that depend on the order in which an epoch reads its samples."""
    if plan.stream is not None:
        order = plan.stream.chunk_order(epoch)
    elif plan.shuffle == SORT:
        order = plan.order(epoch)
    else:  # every index comes from the same keys
        _, end = plan.batch(0)
        order = plan.indices_at(epoch, 0, min(end, MAX_INDICES_COMPARED))
    return blake2b(order.data, digest_size=HASH_BYTES).digest()


def find_minority(values: list[bytes]) -> list[int]:
    """Return the ranks whose value is not the most common one; rank 0's value wins a tie."""
    counts = Counter(values)
    common = max(counts, key=lambda value: (counts[value], value == values[0]))
    return [rank for rank, value in enumerate(values) if value != common]
