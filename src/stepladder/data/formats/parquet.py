"""Parquet files as tables, through pyarrow."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import types

from stepladder.data.table import (
    Block,
    Column,
    Ragged,
    Table,
    identify_files,
    input_error,
    report_damage,
    row_bytes,
    rows_per_block,
    select_columns,
)

PARQUET_DAMAGE = (pa.ArrowException, OSError, UnicodeDecodeError)
OMIT_HINT = "--columns without it"


def parquet_table(path: Path, names: tuple[str, ...]) -> Table:
    """Return a Parquet file as a table; reading takes the memory of a row group at most.

    Args:
        path: A file of numbers, lists of numbers and fixed-size lists of numbers.
        names: The columns to read, all by default.
    """
    with report_damage(path, PARQUET_DAMAGE):
        file = pq.ParquetFile(path)
    schema = file.schema_arrow
    columns = {
        name: parse_type(path, name, schema.field(name).type)
        for name in select_columns(names, schema.names, path)
    }
    total_bytes = file.metadata.num_rows * row_bytes(columns)
    read = partial(read_parquet, path)
    return Table(str(path), columns, identify_files("parquet", path), read, total_bytes)


def read_parquet(path: Path, table: Table) -> Iterator[Block]:
    block_rows = rows_per_block(table.columns)
    num_rows = 0
    with report_damage(path, PARQUET_DAMAGE):
        file = pq.ParquetFile(path)
        for batch in file.iter_batches(block_rows, columns=list(table.columns)):
            block = {
                name: convert_array(path, name, column, batch.column(name), num_rows)
                for name, column in table.columns.items()
            }
            num_rows += len(batch)
            table.bytes_read = num_rows * row_bytes(table.columns)
            yield block


def parse_type(path: object, name: str, arrow_type: Any) -> Column:
    """Return the column of an Arrow type. Raises InputError if it has no numbers."""
    is_list = types.is_list(arrow_type) or types.is_large_list(arrow_type)
    shape: tuple[int, ...] = ()
    if types.is_fixed_size_list(arrow_type):
        shape = (arrow_type.list_size,)
    value_type = arrow_type.value_type if is_list or shape else arrow_type
    is_number = types.is_integer(value_type) or types.is_floating(value_type)
    if not is_number and not types.is_boolean(value_type):
        problem = f"column {name} is {arrow_type}, not numbers or lists of them"
        raise input_error(path, problem, OMIT_HINT)
    return Column(np.dtype(value_type.to_pandas_dtype()), shape, is_list)


def convert_array(
    path: object, name: str, column: Column, array: Any, first_row: int, hint: str = OMIT_HINT
) -> Any:
    """Return an Arrow array as NumPy array or Ragged. Raises InputError for an empty value."""
    has_lists = column.is_list or bool(column.shape)
    if array.null_count or (has_lists and array.flatten().null_count):
        is_null = array.is_null().to_pylist()
        row = first_row + (is_null.index(True) if True in is_null else 0)
        raise input_error(path, f"column {name} has an empty value in row {row}", hint)
    if column.is_list:
        offsets = array.offsets.to_numpy(zero_copy_only=False).astype(np.int64)
        values = array.flatten().to_numpy(zero_copy_only=False)
        return Ragged(values, offsets - offsets[0])
    flat = array.flatten() if column.shape else array
    return flat.to_numpy(zero_copy_only=False).reshape(len(array), *column.shape)
