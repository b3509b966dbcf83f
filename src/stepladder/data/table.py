"""Tables: the inputs that shards are written from, as columns whose rows come in blocks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stepladder.core.errors import InputError

Block = dict[str, Any]  # by column: an array (rows, *shape), or Ragged
BLOCK_ROWS = 4096
BLOCK_BYTES = 1 << 20
MAX_NUMBER_BYTES = 8  # torch has no longer numbers
LENGTH_BYTES = 16  # of a row of a list: where it ends, in memory and in the file
REPAIR_HINT = "repair or replace the file"


@dataclass(frozen=True)
class Column:
    """One array of a data set.

    Args:
        dtype: The type of its numbers.
        shape: The shape of one row.
        is_list: Whether each row is a list of its own length; `shape` is () then.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...] = ()
    is_list: bool = False

    @property
    def row_bytes(self) -> int:
        """The bytes of a row; of a list only those of its length."""
        if self.is_list:
            return LENGTH_BYTES
        return self.dtype.itemsize * math.prod(self.shape)

    def __str__(self) -> str:
        if self.is_list:
            return f"lists of {self.dtype}"
        if not self.shape:
            return str(self.dtype)
        return f"{' x '.join(map(str, self.shape))} {self.dtype}"


class Ragged(NamedTuple):
    """Lists one after the other, as EmbeddingBag and nested tensors take them.

    List i is values[offsets[i] : offsets[i + 1]].
    """

    values: Any
    offsets: Any


def join_lists(lists: list[np.ndarray]) -> Ragged:
    """Return lists of numbers as one Ragged."""
    offsets = np.zeros(len(lists) + 1, np.int64)
    np.cumsum([len(values) for values in lists], out=offsets[1:])
    return Ragged(np.concatenate(lists), offsets)


def split_lists(lists: Ragged) -> list[Any]:
    """Return the lists of one Ragged."""
    edges = np.asarray(lists.offsets).tolist()
    return [lists.values[lo:hi] for lo, hi in pairwise(edges)]


def find_column(values: Any) -> Column | None:
    """Return the column that arrays or Ragged of a batch belong to; None if they are neither."""
    if isinstance(values, Ragged):
        return Column(values.values.dtype, (), is_list=True)
    return Column(values.dtype, values.shape[1:]) if isinstance(values, np.ndarray) else None


@dataclass(frozen=True)
class Table:
    """An input that is read from its start.

    Args:
        name: Its name in messages.
        columns: The columns that are read.
        identity: Two inputs with the same identity have the same rows.
        read: Yields all rows of the table, in blocks of any size.
        rows: The number of rows, where it is known in advance, else 0.
    """

    name: str
    columns: dict[str, Column]
    identity: dict[str, Any]
    read: Callable[[Table], Iterator[Block]]
    rows: int = 0

    def blocks(self, skip: int) -> Iterator[Block]:
        """Yield the rows after the first `skip`."""
        for block in self.read(self):
            size = count_rows(block)
            if skip < size:
                yield _slice_block(block, skip, size)
            skip = max(0, skip - size)


def select_columns(names: tuple[str, ...], known: Iterable[str], source: object) -> list[str]:
    """Return the columns to read: those that the user names, in that order, or all.

    Args:
        names: The columns that the user names; empty for all.
        known: The columns of the source.
        source: The source's name in messages.

    Returns:
        The names of the columns.

    Raises:
        InputError: A column does not exist, exists twice, or is named twice.
    """  # noqa: DOC501 - input_error makes an InputError
    known_counts = Counter(list(known))  # a mapping would be taken for counts
    name_counts = Counter(names)
    selected = list(name_counts or known_counts)
    for name in selected:
        if name not in known_counts:
            raise InputError(
                f"{source} has no column {name!r}", f"its columns are: {', '.join(known_counts)}"
            )
        if known_counts[name] > 1:
            problem = f"{known_counts[name]} columns are called {name!r}"
            raise input_error(source, problem, "columns= without it")
        if name_counts[name] > 1:
            raise InputError(
                f"column {name!r} of {source} is named twice", f"columns={','.join(selected)}"
            )
    return selected


def row_bytes(columns: dict[str, Column]) -> int:
    return sum(column.row_bytes for column in columns.values())


def rows_per_block(columns: dict[str, Column]) -> int:
    """Return the number of rows that have about BLOCK_BYTES, the memory of a reader."""
    return max(1, min(BLOCK_ROWS, BLOCK_BYTES // max(1, row_bytes(columns))))


def count_rows(block: Block) -> int:
    first = next(iter(block.values()))
    return len(first.offsets) - 1 if isinstance(first, Ragged) else len(first)


def _slice_block(block: Block, lo: int, hi: int) -> Block:
    """Return the rows [lo, hi) of a block; the offsets of lists start at 0."""
    rows = {}
    for name, column in block.items():
        if isinstance(column, Ragged):
            offsets = column.offsets[lo : hi + 1]
            values = column.values[offsets[0] : offsets[-1]]
            rows[name] = Ragged(values, offsets - offsets[0])
        else:
            rows[name] = column[lo:hi]
    return rows


def concatenate_blocks(blocks: list[Block]) -> Block:
    if len(blocks) == 1:
        return blocks[0]
    return {name: _concatenate_columns([block[name] for block in blocks]) for name in blocks[0]}


def _concatenate_columns(parts: list[Any]) -> Any:
    if not isinstance(parts[0], Ragged):
        return np.concatenate(parts)
    return join_lists([values for part in parts for values in split_lists(part)])


def rechunk(blocks: Iterable[Block], rows: int) -> Iterator[Block]:
    """Yield the same rows in blocks of exactly `rows`; the last one may be shorter."""
    pending: list[Block] = []
    count = 0
    for block in blocks:
        pending.append(block)
        count += count_rows(block)
        if count < rows:
            continue
        joined = concatenate_blocks(pending)
        remainder = count % rows
        end = count - remainder
        for lo in range(0, end, rows):
            yield _slice_block(joined, lo, lo + rows)
        pending = [_slice_block(joined, end, count)]
        count = remainder
    if count:
        yield concatenate_blocks(pending)


def identify_files(kind: str, *paths: Path) -> dict[str, Any]:
    """Return names, sizes and times of files: if they are the same later, so are the files."""
    files = []
    for path in paths:
        status = path.stat()
        files.append([path.name, status.st_size, status.st_mtime_ns])
    return {"kind": kind, "files": files}


def input_error(path: object, problem: str, hint: str = REPAIR_HINT) -> InputError:
    """Make the error for an input that cannot be used."""
    return InputError(f"cannot use {path}: {problem}", hint)
