"""Parquet files as tables, through pyarrow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from stepladder.core.errors import InputError
from stepladder.data.formats.table import Block, Table, identity, row_bytes, rows_per_block, skipping, unusable
from stepladder.data.shards.dataset import Column, one_line
from stepladder.data.shards.reader import Ragged


def parquet_table(path: Path) -> Table:
    """Numbers, lists and fixed-size lists of numbers. Memory: a row group of the columns at most."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise InputError(f"{path} needs pyarrow", "pip install 'stepladder[parquet]'") from error
    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise unusable(path, one_line(error)) from error
    columns = {field.name: arrow_column(path, field.name, field.type) for field in file.schema_arrow}
    table = Table(
        str(path),
        columns,
        lambda skip: iter(()),
        identity("parquet", path),
        file.metadata.num_rows,
        unit=row_bytes(columns),
    )

    def blocks(skip: int) -> Iterator[Block]:
        done = 0
        try:
            for batch in pq.ParquetFile(path).iter_batches(
                rows_per_block(table.columns), columns=list(table.columns)
            ):
                block = {n: arrow_values(path, n, c, batch.column(n), done) for n, c in table.columns.items()}
                done += len(batch)
                table.done = done
                yield block
        except (pa.ArrowException, OSError) as error:
            raise unusable(path, one_line(error)) from error

    table.blocks = lambda skip: skipping(blocks(skip), skip)
    return table


def arrow_column(path: Path, name: str, kind: Any) -> Column:
    import pyarrow.types as types

    is_list = types.is_list(kind) or types.is_large_list(kind)
    shape = (kind.list_size,) if types.is_fixed_size_list(kind) else ()
    inner = kind.value_type if is_list or shape else kind
    if not (types.is_integer(inner) or types.is_floating(inner) or types.is_boolean(inner)):
        raise unusable(path, f"column {name} is {kind}, not numbers or lists of them", "--columns without it")
    return Column(np.dtype(inner.to_pandas_dtype()), shape, is_list)


def arrow_values(path: Path, name: str, column: Column, array: Any, row: int) -> Any:
    if array.null_count or ((column.is_list or column.shape) and array.flatten().null_count):
        first = next((place for place, value in enumerate(array.is_null().to_pylist()) if value), 0)
        raise unusable(path, f"column {name} has an empty value in row {row + first}", "--columns without it")
    if column.is_list:
        offsets = array.offsets.to_numpy(zero_copy_only=False).astype(np.int64)
        return Ragged(array.flatten().to_numpy(zero_copy_only=False), offsets - offsets[0])
    flat = array.flatten() if column.shape else array
    return flat.to_numpy(zero_copy_only=False).reshape(len(array), *column.shape)
