"""Which collectives shared memory carries, decided alike on all ranks; gloo carries the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from stepladder_exchange.reduction import (
    BITWISE_AND,
    BITWISE_OR,
    BITWISE_XOR,
    MAXIMUM,
    MEAN,
    MINIMUM,
    PRODUCT,
    SUM,
    Reduction,
)

FLOAT_DTYPES = {torch.float16, torch.float32, torch.float64, torch.bfloat16}
INTEGER_DTYPES = {torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64}
SHARED_DTYPES = FLOAT_DTYPES | INTEGER_DTYPES  # as gloo has them
TENSOR_TYPES = (torch.Tensor, torch.nn.Parameter)  # no other subclass, whose data may be elsewhere
OPERATIONS: Any = dist.ReduceOp.RedOpType
REDUCTIONS = {
    OPERATIONS.SUM: SUM,
    OPERATIONS.PRODUCT: PRODUCT,
    OPERATIONS.MIN: MINIMUM,
    OPERATIONS.MAX: MAXIMUM,
}
FLOAT_REDUCTIONS = REDUCTIONS | {OPERATIONS.AVG: MEAN}
INTEGER_REDUCTIONS = REDUCTIONS | {
    OPERATIONS.BAND: BITWISE_AND,
    OPERATIONS.BOR: BITWISE_OR,
    OPERATIONS.BXOR: BITWISE_XOR,
}


def can_share(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether tensors lie in the host's memory in a form that shared memory carries."""
    return all(
        type(tensor) in TENSOR_TYPES
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.dtype in SHARED_DTYPES
        for tensor in tensors
    )


def find_reduction(operation: Any, dtype: torch.dtype) -> Reduction | None:
    """Return the reduction that torch names, None if shared memory has none for this type."""
    reductions = FLOAT_REDUCTIONS if dtype in FLOAT_DTYPES else INTEGER_REDUCTIONS
    return reductions.get(operation.op)


def have_length(tensors: Iterable[torch.Tensor], length: int) -> bool:
    """Return whether all tensors have so many elements."""
    return all(tensor.numel() == length for tensor in tensors)


def split_evenly(flat: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    """Return each rank's slice of a flat tensor; there may be no numbers."""
    return list(flat.view(ranks, len(flat) // ranks))


def count_elements(tensor: torch.Tensor, splits: Sequence[int], ranks: int) -> list[int] | None:
    """Return how many elements of a tensor are each rank's; None if the splits do not fit."""
    rows = tensor.size(0) if tensor.ndim else 0
    if splits:
        if sum(splits) != rows or len(splits) != ranks:
            return None
        row_length = tensor.numel() // max(rows, 1)
        return [split * row_length for split in splits]
    if rows % ranks or not tensor.ndim:
        return None
    return [tensor.numel() // ranks] * ranks


def _get_data(tensor: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a tensor, for code that writes to them.

    Autograd does not see what is written, as it does not see what gloo writes. Inference tensors
    are written to as well. Truth values become bytes, with which gloo computes as well.
    """
    data = tensor.data
    if data.is_inference():
        storage = data.untyped_storage()
        data = torch.empty(0, dtype=data.dtype).set_(
            storage, data.storage_offset(), data.size(), data.stride()
        )
    return data.view(torch.uint8) if data.dtype is torch.bool else data


class FlatTensors:
    """Tensors as flat ones, for a collective that writes to them."""

    def __init__(self) -> None:
        self._flat_copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a flat tensor whose numbers are those of a tensor after `write_back`."""
        data = _get_data(tensor)
        if data.ndim == 1 and data.stride(0):
            return data
        flat = data.contiguous().view(-1)
        if not data.is_contiguous():
            self._flat_copies.append((data, flat))
        return flat

    def write_back(self) -> None:
        """Copy what was written, where a tensor does not lie in one row."""
        for data, flat in self._flat_copies:
            numbers = flat.view(data.shape)
            for dim, stride in enumerate(data.stride()):
                if not stride:  # an expanded tensor: all its rows are one in memory
                    data = data.narrow(dim, 0, 1)
                    numbers = numbers.narrow(dim, 0, 1)
            data.copy_(numbers)


def get_flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a tensor, for code that only reads them, in one row."""
    data = _get_data(tensor)
    return data if data.ndim == 1 else data.reshape(-1)
