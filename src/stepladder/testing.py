"""Tests that a user's own code can be held against."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from stepladder.core.errors import InputError
from stepladder.core.order import IndexArray
from stepladder.data.source import Source, is_source, make_chunks
from stepladder.data.table import Ragged

if TYPE_CHECKING:
    from stepladder.train.comm import Comm

MAX_SAMPLES = 64  # that are compared
READ_AGAIN = {
    "again": slice(None),
    "backwards": slice(None, None, -1),  # last: it shows a buffer that is used twice
}
CALL_HINT = "return the same sample for an index, whatever else is read"


def check_source(source: Source) -> None:
    """Test that an object keeps the contract of `stepladder.Source`.

    It reads up to 64 samples, among them both sides of chunk edges: alone and in batches, forwards,
    backwards and again. Training reads them so on different numbers of processes, after a resume
    and when a batch is recomputed.

    Args:
        source: The object, with at least one sample.

    Raises:
        AssertionError: It breaks the contract; the message says where.
    """
    assert is_source(source), "it lacks one of __len__, chunk_edges and read(indices)"
    try:
        chunks = make_chunks(source)
    except InputError as error:
        raise AssertionError(str(error)) from error
    assert len(source) > 0, "it has no samples"
    indices = _choose_samples(len(source), chunks.edges if chunks else None)
    batch = read(source, indices)
    first_values = [column.copy() for column in batch]
    for position, index in enumerate(indices.tolist()):
        row = slice(position, position + 1)
        _expect_rows(read(source, indices[row]), first_values, row, f"sample {index}")
    for name, rows in READ_AGAIN.items():
        _expect_rows(read(source, indices[rows]), first_values, rows, f"the batch read {name}")
    _expect_rows(batch, first_values, slice(None), "a batch, after others were read,")


def assert_same_on_ranks(tensor: Tensor) -> None:
    """Assert that a tensor is the same on all ranks, bit for bit. A collective.

    Args:
        tensor: This rank's.

    Raises:
        AssertionError: It differs, on all ranks alike; the message names the ranks that differ from
            rank 0, and the first value.
    """
    tensors: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(tensors, tensor.detach().cpu())
    differences = {
        rank: difference
        for rank, other in enumerate(tensors)
        if (difference := _describe_difference(other, tensors[0]))
    }
    if differences:
        texts = [f"rank {rank} differs from rank 0: {text}" for rank, text in differences.items()]
        raise AssertionError("; ".join(texts))


def _describe_difference(tensor: Tensor, expected: Tensor) -> str:
    """Return in what a tensor differs from another one, "" if it does not."""
    form = f"{tensor.dtype}, {list(tensor.shape)}"
    expected_form = f"{expected.dtype}, {list(expected.shape)}"
    if form != expected_form:
        return f"{form}, not {expected_form}"
    differs = (tensor != expected) & ~(tensor.isnan() & expected.isnan())
    places = differs.nonzero().tolist()
    if not places:
        return ""
    first = tuple(places[0])
    return (
        f"{len(places)} of {tensor.numel()} values, the first at {list(first)}:"
        f" {tensor[first].item()}, not {expected[first].item()}"
    )


def assert_parity(function: Callable[[Comm], Any], ranks: int = 2, rtol: float = 1e-5) -> None:
    """Assert that a function returns on each of several ranks what it returns on one process.

    The processes are new ones, which takes some seconds.

    Args:
        function: It is called with the collectives of its ranks, and returns a tensor, a number, or
            a list or dict of them.
        ranks: The number of processes that are compared with one.
        rtol: The relative difference that rounding may make.

    Raises:
        AssertionError: A rank returns something else.
    """
    from stepladder.launcher.function import launch

    [expected] = launch(_call_with_comm, function, nproc=1)
    for rank, value in enumerate(launch(_call_with_comm, function, nproc=ranks)):
        try:
            torch.testing.assert_close(value, expected, rtol=rtol, atol=rtol)
        except AssertionError as error:
            text = " ".join(str(error).split())
            raise AssertionError(f"rank {rank} of {ranks} and one process differ: {text}") from None


def _call_with_comm(function: Callable[[Comm], Any]) -> Any:
    from stepladder.train.process_group import process_group

    with process_group(device=torch.device("cpu")) as comm:
        return function(comm)


def _choose_samples(num_samples: int, edges: IndexArray | None) -> IndexArray:
    """Return samples from the whole range in random order, and those at the first chunk edges."""
    generator = np.random.default_rng(0)
    chosen = generator.choice(num_samples, min(num_samples, MAX_SAMPLES // 2), replace=False)
    at_edges = np.array([0, num_samples - 1])
    if edges is not None:
        inner_edges = edges[1:-1][: MAX_SAMPLES // 4]
        at_edges = np.concatenate([at_edges, inner_edges - 1, inner_edges])
    return generator.permutation(np.union1d(chosen, at_edges)).astype(np.int64)


def read(source: Source, indices: IndexArray) -> list[np.ndarray]:
    """Read a batch, check its form, and return its columns as arrays."""
    requested = indices.copy()
    batch = source.read(indices)
    assert np.array_equal(indices, requested), "read(indices) changes the indices that it is given"
    columns = [_to_array(column) for column in _list_columns(batch)]
    lengths = [len(column) for column in columns]
    assert set(lengths) == {len(indices)}, (
        f"a batch of {len(indices)} samples has columns of {lengths} rows"
    )
    return columns


def _list_columns(batch: Any) -> list[Any]:
    if isinstance(batch, dict):
        return list(batch.values())
    if isinstance(batch, (tuple, list)) and not isinstance(batch, Ragged):
        return list(batch)
    return [batch]


def _to_array(column: Any) -> np.ndarray:
    """Return a column as an array that shares its memory; of lists each row is an array."""
    if isinstance(column, Ragged):
        offsets = column.offsets.tolist()
        rows = np.empty(len(offsets) - 1, object)
        for row, (begin, end) in enumerate(pairwise(offsets)):
            values = column.values[begin:end]
            rows[row] = values.tolist()
        return rows
    assert isinstance(column, (Tensor, np.ndarray)), (
        f"a batch holds a {type(column).__name__}, not a tensor or an array"
    )
    array: np.ndarray = column.numpy(force=True) if isinstance(column, Tensor) else column
    assert array.ndim > 0, "a batch holds a single number, not a row for each sample"
    return array


def _expect_rows(
    columns: list[np.ndarray], batch: list[np.ndarray], rows: slice, name: str
) -> None:
    """Compare columns with rows of the batch that was read first."""
    assert len(columns) == len(batch), (
        f"{name} has {len(columns)} columns, others have {len(batch)}"
    )
    for number, column in enumerate(columns):
        expected = batch[number][rows]
        assert describe(column) == describe(expected), (
            f"{name} has another type or shape than in a batch with others (column {number}):"
            f" {describe(column)}, {describe(expected)}"
        )
        if column.dtype == object:
            is_equal = column.tolist() == expected.tolist()
        else:
            is_equal = column.tobytes() == expected.tobytes()
        assert is_equal, f"{name} has other values than before (column {number}): {CALL_HINT}"


def describe(column: np.ndarray) -> str:
    return f"{column.dtype} {list(column.shape)}"
