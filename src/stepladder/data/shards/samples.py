"""Samples that a Python program makes as a table.

A sample is a dict of numbers, of arrays of one shape, or of lists of numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import chain, islice
from typing import Any

import numpy as np

from stepladder.core.errors import InputError, as_input_error
from stepladder.data.table import Block, Column, Ragged, Table, rows_per_block

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
    if not isinstance(first, Mapping):
        raise InputError(f"sample 0: it is a {type(first).__name__}", 'a dict, such as {"x": 1.5}')
    columns = {name: infer_column(name, value) for name, value in first.items()}
    read = partial(read_samples, chain([first], iterator))
    return Table("the samples", columns, {"kind": "samples"}, read)


def read_samples(samples: Iterator[Sample], table: Table) -> Iterator[Block]:
    block_rows = min(SAMPLES_PER_BLOCK, rows_per_block(table.columns))
    num_samples = 0
    while batch := list(islice(samples, block_rows)):
        yield {
            name: collect_column(name, column, batch, num_samples)
            for name, column in table.columns.items()
        }
        num_samples += len(batch)


def infer_column(name: str, value: Any) -> Column:
    """Return the column that a value of the first sample needs."""
    with as_input_error(f"sample 0: {name}", VALUES_HINT, (ValueError,)):
        array = np.asarray(value)
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


def collect_column(name: str, column: Column, samples: list[Sample], first_number: int) -> Any:
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
        with as_input_error(f"sample {number}: {name}", VALUES_HINT, (ValueError, AttributeError)):
            value = np.asarray(sample.get(name))
        if not fits_column(value, column):
            raise InputError(
                f"sample {number}: {name} is {value.dtype} of shape {list(value.shape)}, and"
                f" {column} in the first sample",
                "the same type and shape in every sample; a Python list where lengths differ",
            )
        values.append(value.astype(column.dtype, copy=False))
    if not column.is_list:
        return np.stack(values)
    lengths = [len(value) for value in values]
    return Ragged(np.concatenate(values), np.cumsum([0, *lengths]))


def fits_column(value: np.ndarray, column: Column) -> bool:
    has_shape = value.ndim == 1 if column.is_list else value.shape == column.shape
    return has_shape and (
        value.size == 0 or np.can_cast(value.dtype, column.dtype, casting="same_kind")
    )
