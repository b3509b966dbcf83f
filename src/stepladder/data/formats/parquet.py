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

from stepladder.data import table
from stepladder.data.table import Block, Column, Ragged, Table, unusable

DAMAGE = (pa.ArrowException, OSError)


def parquet_table(path: Path, names: tuple[str, ...]) -> Table:
    """Numbers, lists and fixed-size lists of numbers. Memory: a row group of the columns at most."""
    with table.reading(path, DAMAGE):
        file = pq.ParquetFile(path)
    kinds = {field.name: field.type for field in file.schema_arrow}
    chosen = table.chosen(names, file.schema_arrow.names, path)
    columns = {name: arrow_column(path, name, kinds[name]) for name in chosen}
    total = file.metadata.num_rows * table.row_bytes(columns)
    return Table(
        str(path), columns, table.identity("parquet", path), partial(read_parquet, path), total
    )


def read_parquet(path: Path, rows: Table) -> Iterator[Block]:
    done = 0
    with table.reading(path, DAMAGE):
        file = pq.ParquetFile(path)
        for batch in file.iter_batches(
            table.rows_per_block(rows.columns), columns=list(rows.columns)
        ):
            block = {
                n: arrow_values(path, n, c, batch.column(n), done) for n, c in rows.columns.items()
            }
            done += len(batch)
            rows.done = done * table.row_bytes(rows.columns)
            yield block


def arrow_column(path: Path, name: str, kind: Any) -> Column:
    is_list = types.is_list(kind) or types.is_large_list(kind)
    shape = (kind.list_size,) if types.is_fixed_size_list(kind) else ()
    inner = kind.value_type if is_list or shape else kind
    if not (types.is_integer(inner) or types.is_floating(inner) or types.is_boolean(inner)):
        raise unusable(
            path, f"column {name} is {kind}, not numbers or lists of them", "--columns without it"
        )
    return Column(np.dtype(inner.to_pandas_dtype()), shape, is_list)


def arrow_values(path: Path, name: str, column: Column, array: Any, row: int) -> Any:
    if array.null_count or ((column.is_list or column.shape) and array.flatten().null_count):
        first = next((place for place, value in enumerate(array.is_null().to_pylist()) if value), 0)
        raise unusable(
            path, f"column {name} has an empty value in row {row + first}", "--columns without it"
        )
    if column.is_list:
        offsets = array.offsets.to_numpy(zero_copy_only=False).astype(np.int64)
        return Ragged(array.flatten().to_numpy(zero_copy_only=False), offsets - offsets[0])
    flat = array.flatten() if column.shape else array
    return flat.to_numpy(zero_copy_only=False).reshape(len(array), *column.shape)
