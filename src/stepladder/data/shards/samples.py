"""Samples that a Python program makes as a table.

A sample is a dict of numbers, of arrays of one shape, or of lists of numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from itertools import chain, islice
from typing import Any

import numpy as np

from stepladder.core.errors import InputError, as_input_error
from stepladder.data.readers.batches import NUMBER_TYPES, find_kind, round_numbers
from stepladder.data.table import Block, Column, Table, join_lists, rows_per_block

SAMPLES_PER_BLOCK = 64  # samples may come slowly
SAMPLES_HINT = "give an iterator with at least one dict"
VALUES_HINT = "give numbers, arrays of numbers, or flat lists of numbers"

Sample = Mapping[str, Any]


def samples_table(samples: Iterable[Sample]) -> Table:
    """Return samples as a table; the first one decides the columns.

    Raises:
        InputError: There are no samples, or the first one has other values than numbers.
    """
    with as_input_error("the samples of write_shards", SAMPLES_HINT, (TypeError,)):
        iterator = iter(samples)
    first = next(iterator, None)
    if first is None:
        raise InputError("there are no samples", SAMPLES_HINT)
    _validate_sample(first, 0)
    columns = {name: _infer_column(name, value) for name, value in first.items()}
    read = partial(_read_samples, chain([first], iterator))
    first_hash = blake2b(digest_size=8)
    for value in first.values():
        first_hash.update(np.asarray(value).tobytes())
    identity = {"kind": "samples", "first": first_hash.hexdigest()}
    return Table("the samples", columns, identity, read)


def _validate_sample(sample: object, number: int) -> None:
    if not isinstance(sample, Mapping):
        raise InputError(
            f"sample {number}: it is a {type(sample).__name__}", 'a dict, such as {"x": 1.5}'
        )


def _read_samples(samples: Iterator[Sample], table: Table) -> Iterator[Block]:
    block_rows = min(SAMPLES_PER_BLOCK, rows_per_block(table.columns))
    num_samples = 0
    while batch := list(islice(samples, block_rows)):
        for number, sample in enumerate(batch, num_samples):
            _validate_sample(sample, number)
            if unknown := sample.keys() - table.columns.keys():
                raise InputError(
                    f"sample {number}: the first sample has no {min(map(str, unknown))}",
                    "the same columns in every sample",
                )
        yield {
            name: _collect_column(name, column, batch, num_samples)
            for name, column in table.columns.items()
        }
        num_samples += len(batch)


def _read_value(value: Any, where: str) -> np.ndarray:
    """Return a value as an array. Raises InputError if NumPy has no such array."""
    if np.ma.is_masked(value):
        raise InputError(f"{where} has masked values", VALUES_HINT)
    # RuntimeError is torch's, for bfloat16, sparse tensors and gradients.
    errors = (ValueError, TypeError, RuntimeError, OverflowError)
    with as_input_error(where, VALUES_HINT, errors):
        if isinstance(value, (list, tuple)) and NUMBER_TYPES.keys() >= set(map(type, value)):
            return _stack_numbers(value)
        return np.asarray(value)


def _stack_numbers(numbers: Sequence[Any]) -> np.ndarray:
    """Return numbers of Python's as an array, of which NumPy would change some.

    Args:
        numbers: Values of bool, int and float.

    Raises:
        OverflowError: A whole number has more than 64 bits.
        ValueError: True or False is among other numbers.
    """
    kind = find_kind(numbers)
    if numbers and kind is object:
        raise ValueError("it has numbers, and True or False")
    return round_numbers(numbers, np.dtype(kind if numbers else float))


def _infer_column(name: str, value: Any) -> Column:
    """Return the column that a value of the first sample needs."""
    array = _read_value(value, f"sample 0: {name}")
    is_list = isinstance(value, list)
    if array.dtype.kind not in "biuf" or (is_list and array.ndim != 1):
        raise InputError(
            f"sample 0: {name} is a {type(value).__name__} of {array.dtype}", VALUES_HINT
        )
    if is_list:
        has_floats = (
            len(value) > 0 and array.dtype.kind == "f"
        )  # NumPy makes floats of an empty list
        return Column(np.dtype(np.float32 if has_floats else np.int64), (), is_list=True)
    if isinstance(value, float):
        return Column(np.dtype(np.float32), array.shape)
    return Column(array.dtype.newbyteorder("="), array.shape)


def _collect_column(name: str, column: Column, samples: list[Sample], first_number: int) -> Any:
    """Return one column of several samples.

    Args:
        name: The column's name.
        column: The column of the first sample.
        samples: The samples.
        first_number: The number of the first of them, for messages.

    Raises:
        InputError: A value does not fit the column.
    """
    values = []
    for number, sample in enumerate(samples, first_number):
        value = _read_value(sample.get(name), f"sample {number}: {name}")
        if not _fits_column(value, column):
            raise InputError(
                f"sample {number}: {name} is {value.dtype} of shape {list(value.shape)}, and"
                f" {column} in the first sample",
                "the same type and shape in every sample; a Python list where lengths differ",
            )
        with np.errstate(over="ignore"):
            stored = value.astype(column.dtype, copy=False)
        is_kept = np.isfinite(stored) == np.isfinite(value)
        if column.dtype.kind != "f":
            is_kept = stored == value
        if not np.all(is_kept):
            raise InputError(
                f"sample {number}: {name} is too large for {column.dtype}",
                "np.float64 or np.int64 values in the first sample",
            )
        values.append(stored)
    if not column.is_list:
        return np.stack(values)
    return join_lists(values)


def _fits_column(value: np.ndarray, column: Column) -> bool:
    has_shape = value.ndim == 1 if column.is_list else value.shape == column.shape
    if value.dtype.kind == "b" != column.dtype.kind:  # which NumPy casts to 0 and 1
        return False
    return has_shape and (
        value.size == 0 or np.can_cast(value.dtype, column.dtype, casting="same_kind")
    )
