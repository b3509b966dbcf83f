"""Writing shards: whole or absent, resumable after any end, memory for one chunk.

A shard is written aside, fsynced and renamed, then noted in `index.json.part`; the index comes
last. What was noted is kept by the next start, which goes on behind it."""

from __future__ import annotations

import io
import json
import os
import shlex
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from stepladder.core import durable
from stepladder.core.errors import InputError, as_input_error
from stepladder.data import table as tables
from stepladder.data.disk import Feedback, filled_folder, open_locked
from stepladder.data.shards.dataset import INDEX, UNFINISHED, advised_chunk_rows, h5_files
from stepladder.data.shards.file import GOES_ON, ShardSettings, write_shard
from stepladder.data.table import Block, Column, Ragged, Table, rechunk, rows_per_block

SHARD_BYTES = 64 << 20
BLOCK_SAMPLES = 64  # they may come slowly
MOST_BYTES = 1 << 30  # of a chunk: one is in memory, whole
LONGEST_NAME = 255  # of a column
MOST_BY_GZIP = 1032  # that it makes of a byte
LIST_BYTES = 256  # taken for a list where a chunk's size is chosen; the index has the true figure

Sample = Mapping[str, Any]


def write_shards(
    samples: Iterable[Sample],
    out: str | Path,
    chunk_rows: int | None = None,
    rows_per_shard: int | None = None,
    compress: bool = False,
) -> Path:
    """Write dicts of numbers, arrays or lists as shards into the folder `out`. Returns the index's
    path.

    Every sample has the columns of the first one. Values: numbers (int64, float32), arrays of one
    shape and type, or Python lists of numbers, whose lengths may differ. After a kill, call it
    again with the same samples: those that are in whole shards are read and left out. InputError as
    for `write_table`."""
    iterator = iter(samples)
    first = next(iterator, None)
    if first is None:
        raise InputError("there are no samples", "give an iterator with at least one dict")
    columns = {name: sample_column(name, value) for name, value in first.items()}
    read = partial(read_samples, chain([first], iterator))
    table = Table("the samples", columns, {"kind": "samples"}, read)
    return write_table(table, Path(out), chunk_rows, rows_per_shard, compress)


def write_table(
    table: Table,
    out: Path,
    chunk_rows: int | None = None,
    rows_per_shard: int | None = None,
    compress: bool = False,
    feedback: Feedback = Feedback(),  # noqa: B008 - frozen
) -> Path:
    """Write a table as shards. InputError when `out` holds something else or cannot be written.

    chunk_rows: rows that are read at once [about 0.4 MB].  rows_per_shard: rows of a file [about 64
    MB]."""
    settings = settings_for(table, chunk_rows, rows_per_shard, compress)
    if (out / INDEX).is_file():
        with as_input_error(
            f"cannot use {out / INDEX}", f"rm -r {shlex.quote(str(out))}", (OSError, ValueError)
        ):
            index = json.loads((out / INDEX).read_bytes())
        refuse_other(index.get("made_from") if isinstance(index, dict) else None, settings, out)
        (out / UNFINISHED).unlink(missing_ok=True)  # of a kill between the two last acts
        feedback.say(f"{out}: here already")
        return out / INDEX
    with filled_folder(out, GOES_ON), open_notes(out) as file:
        notes = Notes(out, settings, file)
        try:
            return fill_folder(table, notes, feedback)
        except InputError:
            if not h5_files(out):  # what was noted would be of no use to a mended input
                (out / UNFINISHED).unlink()
            raise


def fill_folder(table: Table, notes: Notes, feedback: Feedback) -> Path:
    out, settings, rows = notes.out, notes.settings, sum(entry["rows"] for entry in notes.entries)
    if rows:
        feedback.say(f"{out}: going on after {rows:,} rows in {len(notes.entries)} shards")
    refuse_full_disk(table, settings, out, rows)
    chunks = rechunk(table.blocks(rows), settings.chunk_rows)
    for first in chunks:
        path = out / f"shard-{len(notes.entries):05d}.h5"
        shard = chain(
            [first], islice(chunks, -(-settings.rows_per_shard // settings.chunk_rows) - 1)
        )
        entry = write_shard(path, table, settings, shard, feedback)
        notes.add(entry)
        feedback.say(f"{path.name}: {entry['rows']:,} rows, {entry['bytes']:,} bytes")
    if not notes.entries:
        raise InputError(f"{table.name} has no rows", "give an input with at least one")
    return notes.finish()


def refuse_full_disk(table: Table, settings: ShardSettings, out: Path, done: int) -> None:
    """Raises InputError where what is left to write cannot fit: a sparse file of any size is easily
    made.
    """
    needed, free = (
        (table.rows - done) * tables.row_bytes(table.columns),
        shutil.disk_usage(out).free,
    )
    if needed > free * (MOST_BY_GZIP if settings.compress else 1):
        raise InputError(
            f"{table.name} has {needed:,} bytes to write, and {out} has {free:,} free",
            "make room, or another --out DIR",
        )


def settings_for(
    table: Table, chunk_rows: int | None, rows_per_shard: int | None, compress: bool
) -> ShardSettings:
    """With sizes for the table's columns, where they were not given."""
    for name, value in (("--chunk-rows", chunk_rows), ("--rows-per-shard", rows_per_shard)):
        if value is not None and value < 1:
            raise InputError(f"{name} {value}", f"{name} must be at least 1")
    if not table.columns:
        raise InputError(f"{table.name} has no columns", "give an input with at least one")
    for name, column in table.columns.items():
        if (
            "/" in name
            or name in (".", "..")
            or not name.isprintable()
            or not 0 < len(name) <= LONGEST_NAME
        ):
            raise InputError(
                f"{table.name}: column {name!r} is not a valid name in HDF5",
                "rename it, or --columns without it",
            )
        if not column.row_bytes:
            raise InputError(
                f"{table.name}: the rows of column {name} hold nothing", "--columns without it"
            )
    row_bytes = sum(c.row_bytes + LIST_BYTES * c.is_list for c in table.columns.values())
    chunk = chunk_rows or min(advised_chunk_rows(row_bytes), rows_per_shard or 1 << 62)
    per_shard = rows_per_shard or max(1, SHARD_BYTES // (chunk * max(1, row_bytes))) * chunk
    columns = {
        name: {"dtype": column.dtype.name, "shape": list(column.shape), "is_list": column.is_list}
        for name, column in table.columns.items()
    }
    if chunk * row_bytes > MOST_BYTES:
        found = (
            f"chunks of {chunk:,} rows have {chunk * row_bytes:,} bytes, more than {MOST_BYTES:,}"
        )
        raise InputError(found, f"--chunk-rows {advised_chunk_rows(row_bytes)}")
    return ShardSettings(table.identity, columns, min(chunk, per_shard), per_shard, compress)


def refuse_other(found: Any, settings: ShardSettings, out: Path) -> None:
    """InputError where the folder's shards come from another input or other settings."""
    wanted = asdict(settings)
    if found == wanted:
        return
    found = found if isinstance(found, dict) else {}
    name = next((name for name in wanted if found.get(name) != wanted[name]), "source")
    raise InputError(
        f"{out} holds shards with another {name}: {found.get(name)}, not {wanted[name]}",
        f"another --out DIR, or rm -r {shlex.quote(str(out))}",
    )


def open_notes(out: Path) -> io.FileIO:
    with durable.name_write_errors(out, GOES_ON):
        if not (out / UNFINISHED).exists() and h5_files(out):
            raise InputError(
                f"{out} holds HDF5 files that this command did not write", "another --out DIR"
            )
        return open_locked(out / UNFINISHED)


class Notes:
    """The shards that are whole, noted line by line in `file`, locked, so that two writers do not
    meet.
    """

    def __init__(self, out: Path, settings: ShardSettings, file: io.FileIO) -> None:
        self.out, self.settings, self.file = out, settings, file
        self.entries: list[dict[str, Any]] = []
        with durable.name_write_errors(out, GOES_ON):
            for name in (INDEX, "shard-"):
                durable.remove_unfinished(out, name)
            self._read()

    def _read(self) -> None:
        """Keep the lines that are whole and whose files are there; the header if there is none."""
        self.file.seek(0)
        lines = self.file.readall().split(b"\n")[
            :-1
        ]  # behind the last newline: nothing, or a torn line
        if not lines:
            self.file.truncate(0)
            self._append(asdict(self.settings))
            return
        refused, hint = f"cannot use {self.out / UNFINISHED}", f"rm -r {shlex.quote(str(self.out))}"
        with as_input_error(refused, hint, (ValueError, KeyError, TypeError, RecursionError)):
            refuse_other(json.loads(lines[0]), self.settings, self.out)
            for entry in map(json.loads, lines[1:]):
                path, _ = self.out / entry["file"], int(entry["rows"]) + int(entry["list_bytes"])
                if not path.is_file() or path.stat().st_size != entry["bytes"]:
                    break
                self.entries.append(entry)
        self.file.truncate(sum(len(line) + 1 for line in lines[: 1 + len(self.entries)]))

    def add(self, entry: dict[str, Any]) -> None:
        with durable.name_write_errors(self.out / UNFINISHED, GOES_ON):
            self._append(entry)
        self.entries.append(entry)

    def _append(self, value: dict[str, Any]) -> None:
        rest = memoryview(json.dumps(value).encode() + b"\n")
        while rest:  # unbuffered: a disk that fills up takes the first bytes only
            rest = rest[self.file.write(rest) :]
        os.fsync(self.file.fileno())

    def finish(self) -> Path:
        """Write the index, which makes the folder valid."""
        index = {
            "schema": 1,
            "rows": sum(entry["rows"] for entry in self.entries),
            "list_bytes": max(entry["list_bytes"] for entry in self.entries),
            "columns": self.settings.columns,
            "chunk_rows": self.settings.chunk_rows,
            "shards": self.entries,
            "made_from": asdict(self.settings),
        }
        path = self.out / INDEX
        with durable.name_write_errors(path, GOES_ON):
            durable.write(path, json.dumps(index))
            (self.out / UNFINISHED).unlink()
        return path


# -- what a Python program makes: dicts of numbers, of arrays of one shape, or of lists of numbers -


def read_samples(samples: Iterator[Sample], table: Table) -> Iterator[Block]:
    number, size = 0, min(BLOCK_SAMPLES, rows_per_block(table.columns))
    while held := list(islice(samples, size)):
        yield {
            name: sample_values(name, column, held, number)
            for name, column in table.columns.items()
        }
        number += len(held)


def sample_column(name: str, value: Any) -> Column:
    array = np.asarray(value)
    if array.dtype.kind not in "biuf" or (isinstance(value, list) and array.ndim != 1):
        raise InputError(
            f"sample 0: {name} is a {type(value).__name__} of {array.dtype}",
            "give numbers, arrays of numbers, or flat lists of numbers",
        )
    if isinstance(value, list):
        return Column(
            np.dtype(np.float32 if value and array.dtype.kind == "f" else np.int64), (), True
        )
    return Column(
        np.dtype(np.float32) if isinstance(value, float) else array.dtype.newbyteorder("="),
        array.shape,
    )


def sample_values(name: str, column: Column, samples: list[Sample], number: int) -> Any:
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
