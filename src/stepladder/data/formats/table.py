"""Tables: what shards are written from. Columns, and their rows in blocks that follow each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from stepladder.core.errors import InputError
from stepladder.data.shards.dataset import Column
from stepladder.data.shards.reader import Ragged

Block = dict[str, Any]  # per column an array (rows, *shape), or Ragged
BLOCK_ROWS = 4096
BLOCK_BYTES = 1 << 20
BLOCK_SAMPLES = 64  # from Python, where they may come slowly


@dataclass
class Table:
    """An input. blocks(skip): its rows from number `skip` on, in blocks of any size.

    name: for messages.  identity: as long as it is the same, so are the rows.  done, total: how far
    the reading is, in rows (of a CSV file: in bytes).  unit: bytes of one of them, for a progress bar.
    """

    name: str
    columns: dict[str, Column]
    blocks: Callable[[int], Iterator[Block]]
    identity: dict[str, Any]
    total: int = 0
    done: int = field(default=0, compare=False)
    unit: int = 1


def row_bytes(columns: dict[str, Column]) -> int:
    return sum(column.row_bytes for column in columns.values())


def rows_per_block(columns: dict[str, Column]) -> int:
    """Of about BLOCK_BYTES, so that a reader never holds much more than one."""
    return max(1, min(BLOCK_ROWS, BLOCK_BYTES // max(1, row_bytes(columns))))


def length(block: Block) -> int:
    first = next(iter(block.values()))
    return len(first.offsets) - 1 if isinstance(first, Ragged) else len(first)


def cut(block: Block, lo: int, hi: int) -> Block:
    """Rows [lo, hi) of a block; lists start at 0 again."""
    return {name: cut_column(column, lo, hi) for name, column in block.items()}


def cut_column(column: Any, lo: int, hi: int) -> Any:
    if not isinstance(column, Ragged):
        return column[lo:hi]
    first, last = int(column.offsets[lo]), int(column.offsets[hi])
    return Ragged(column.values[first:last], column.offsets[lo : hi + 1] - first)


def join(blocks: list[Block]) -> Block:
    if len(blocks) == 1:
        return blocks[0]
    return {name: join_column([block[name] for block in blocks]) for name in blocks[0]}


def join_column(parts: list[Any]) -> Any:
    if not isinstance(parts[0], Ragged):
        return np.concatenate(parts)
    shifts = np.cumsum([0, *(part.offsets[-1] for part in parts)])
    offsets = [part.offsets[1:] + shift for part, shift in zip(parts, shifts[:-1], strict=True)]
    return Ragged(
        np.concatenate([part.values for part in parts]), np.concatenate([np.zeros(1, np.int64), *offsets])
    )


def rechunk(blocks: Iterable[Block], rows: int) -> Iterator[Block]:
    """The same rows in blocks of exactly `rows`; the last one may be shorter."""
    held: list[Block] = []
    count = 0
    for block in blocks:
        lo, size = 0, length(block)
        while size - lo + count >= rows:
            held.append(cut(block, lo, lo + rows - count))
            lo += rows - count
            yield join(held)
            held, count = [], 0
        if lo < size:
            held.append(cut(block, lo, size))
            count += size - lo
    if held:
        yield join(held)


def skipping(blocks: Iterable[Block], rows: int) -> Iterator[Block]:
    """Without the first rows, for an input that can only be read from its start."""
    for block in blocks:
        size = length(block)
        if rows < size:
            yield cut(block, rows, size) if rows else block
        rows = max(0, rows - size)


def identity(kind: str, *paths: Path) -> dict[str, Any]:
    """Tells whether an input is still the one that shards were begun from."""
    stats = [(path, path.stat()) for path in paths]
    return {"kind": kind, "files": [[p.name, s.st_size, s.st_mtime_ns] for p, s in stats]}


def unusable(path: Path, what: str, hint: str = "") -> InputError:
    return InputError(f"cannot use {path}: {what}", hint or "mend or replace the file")


# -- samples from Python --------------------------------------------------------------------------------------


def from_samples(samples: Iterable[Mapping[str, Any]]) -> Table:
    """A table of dicts: numbers, arrays of one shape, or Python lists of numbers, which may differ in length."""
    iterator = iter(samples)
    first = next(iterator, None)
    if first is None:
        raise InputError("there are no samples", "give an iterator with at least one dict")
    columns = {name: sample_column(name, value) for name, value in first.items()}

    def blocks(skip: int) -> Iterator[Block]:
        yield from skipping(sample_blocks([first], iterator, columns), skip)

    return Table("the samples", columns, blocks, {"kind": "samples"})


def sample_column(name: str, value: Any) -> Column:
    array = np.asarray(value)
    if array.dtype.kind not in "biuf" or (isinstance(value, list) and array.ndim != 1):
        raise InputError(
            f"sample 0: {name} is a {type(value).__name__} of {array.dtype}",
            "give numbers, arrays of numbers, or flat lists of numbers",
        )
    if isinstance(value, list):
        return Column(np.dtype(np.float32 if value and array.dtype.kind == "f" else np.int64), (), True)
    return Column(np.dtype(np.float32) if isinstance(value, float) else array.dtype.newbyteorder("="), array.shape)


def sample_blocks(
    first: list[Mapping[str, Any]], rest: Iterator[Mapping[str, Any]], columns: dict[str, Column]
) -> Iterator[Block]:
    number, size = 0, min(BLOCK_SAMPLES, rows_per_block(columns))
    while held := [*first, *islice(rest, size - len(first))]:
        yield {name: sample_values(name, column, held, number) for name, column in columns.items()}
        number, first = number + len(held), []


def sample_values(name: str, column: Column, samples: list[Mapping[str, Any]], number: int) -> Any:
    """One column of these samples, the first of which is number `number`."""
    values = []
    for place, sample in enumerate(samples):
        value = np.asarray(sample.get(name))
        fits = value.ndim == 1 if column.is_list else value.shape == column.shape
        if not fits or not (value.size == 0 or np.can_cast(value.dtype, column.dtype, "same_kind")):
            raise InputError(
                f"sample {number + place}: {name} is {value.dtype} of shape {list(value.shape)}, and {column}"
                " in the first sample",
                "the same type and shape in every sample; a Python list where lengths differ",
            )
        values.append(value.astype(column.dtype, copy=False))
    if not column.is_list:
        return np.stack(values)
    return Ragged(np.concatenate(values), np.cumsum([0, *map(len, values)]))
