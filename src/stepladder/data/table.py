"""Tables: what shards are written from. Columns, and their rows in blocks that follow each other."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stepladder.core.errors import InputError, as_input_error

Block = dict[str, Any]  # per column an array (rows, *shape), or Ragged
BLOCK_ROWS = 4096
BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class Column:
    """One array of a data set. shape: of one row.  is_list: rows have lengths of their own, shape
    is ().
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...] = ()
    is_list: bool = False

    @property
    def row_bytes(self) -> int:
        """Bytes of a row; of a list only what its length takes."""
        return 16 if self.is_list else self.dtype.itemsize * math.prod(self.shape)

    def __str__(self) -> str:
        if self.is_list:
            return f"lists of {self.dtype}"
        return " x ".join(map(str, self.shape)) + " " * bool(self.shape) + str(self.dtype)


class Ragged(NamedTuple):
    """Lists in a row: list i is values[offsets[i]:offsets[i + 1]]. As EmbeddingBag and nested
    tensors want it.
    """

    values: Any
    offsets: Any


@dataclass
class Table:
    """An input that is read from its start.

    name: for messages.  columns: those that are read.  identity: as long as it is the same, so are
    the rows. read: all rows, in blocks of any size; it keeps `done` up to date.  total: bytes of
    the input, as far as known. done: how many of them are read.  rows: where it is known before
    they are read, else 0."""

    name: str
    columns: dict[str, Column]
    identity: dict[str, Any]
    read: Callable[[Table], Iterator[Block]]
    total: int = 0
    done: int = 0
    rows: int = 0

    def blocks(self, skip: int) -> Iterator[Block]:
        """The rows from number `skip` on."""
        for block in self.read(self):
            size = length(block)
            if skip < size:
                yield cut(block, skip, size)
            skip = max(0, skip - size)


def chosen(names: tuple[str, ...], known: Iterable[str], source: object) -> list[str]:
    """The columns to read of `source`: those named, in this order, or all. InputError for an
    unknown one, and for one that is there, or named, twice."""
    there, wanted = Counter(list(known)), Counter(names)  # a table would be counts
    for name in wanted or there:
        if name not in there:
            raise InputError(
                f"{source} has no column {name!r}", f"columns there are: {', '.join(there)}"
            )
        if there[name] > 1:
            raise unusable(
                source, f"{there[name]} columns are called {name!r}", "--columns without it"
            )
        if wanted[name] > 1:
            raise InputError(
                f"column {name!r} of {source} is named twice", f"--columns {','.join(wanted)}"
            )
    return list(wanted or there)


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
    part = {}
    for name, column in block.items():
        if isinstance(column, Ragged):
            offsets = column.offsets[lo : hi + 1]
            part[name] = Ragged(column.values[offsets[0] : offsets[-1]], offsets - offsets[0])
        else:
            part[name] = column[lo:hi]
    return part


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
        np.concatenate([part.values for part in parts]),
        np.concatenate([np.zeros(1, np.int64), *offsets]),
    )


def rechunk(blocks: Iterable[Block], rows: int) -> Iterator[Block]:
    """The same rows in blocks of exactly `rows`; the last one may be shorter."""
    held: list[Block] = []
    count = 0
    for block in blocks:
        held.append(block)
        count += length(block)
        if count >= rows:
            whole, rest = join(held), count % rows
            for lo in range(0, count - rest, rows):
                yield cut(whole, lo, lo + rows)
            held, count = [cut(whole, count - rest, count)], rest
    if count:
        yield join(held)


def identity(kind: str, *paths: Path) -> dict[str, Any]:
    """Tells whether an input is still the one that shards were begun from."""
    stats = [(path, path.stat()) for path in paths]
    return {"kind": kind, "files": [[p.name, s.st_size, s.st_mtime_ns] for p, s in stats]}


def reading(path: Path, kinds: tuple[type[Exception], ...]) -> AbstractContextManager[None]:
    """What is raised in the block where the file is damaged, as InputError."""
    return as_input_error(f"cannot use {path}", "mend or replace the file", kinds)


def unusable(path: object, what: str, hint: str = "mend or replace the file") -> InputError:
    return InputError(f"cannot use {path}: {what}", hint)
