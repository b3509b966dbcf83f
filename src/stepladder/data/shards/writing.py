"""Writing shards: whole or absent, resumable after any end, memory for one chunk.

A shard is written aside, fsynced and renamed, then noted in `index.json.part`; the index comes last. What was
noted is kept by the next start, which goes on behind it.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stepladder.core import durable
from stepladder.core.errors import InputError
from stepladder.data.disk import Feedback, open_locked
from stepladder.data.samples import from_samples
from stepladder.data.shards.dataset import INDEX, UNFINISHED, advised_chunk_rows, h5_files
from stepladder.data.shards.file import GOES_ON, ShardSettings, ShardWriter
from stepladder.data.table import Table, rechunk

SHARD_BYTES = 64 << 20
LIST_BYTES = 256  # taken for a list where a chunk's size is chosen; the index has the true figure


def write_shards(
    samples: Iterable[Mapping[str, Any]],
    out: str | Path,
    chunk_rows: int | None = None,
    rows_per_shard: int | None = None,
    compress: bool = False,
) -> Path:
    """Write dicts of numbers, arrays or lists as shards into the folder `out`. Returns the index's path.

    Every sample has the columns of the first one. Values: numbers (int64, float32), arrays of one shape and
    type, or Python lists of numbers, whose lengths may differ. After a kill, call it again with the same samples:
    those that are in whole shards are read and left out. InputError as for `write_table`.
    """
    return write_table(from_samples(samples), Path(out), chunk_rows, rows_per_shard, compress)


def write_table(
    table: Table,
    out: Path,
    chunk_rows: int | None = None,
    rows_per_shard: int | None = None,
    compress: bool = False,
    feedback: Feedback = Feedback(),  # noqa: B008 - frozen
) -> Path:
    """Write a table as shards. InputError when `out` holds something else or cannot be written.

    chunk_rows: rows that are read at once [about 0.4 MB].  rows_per_shard: rows of a file [about 64 MB].
    """
    settings = settings_for(table, chunk_rows, rows_per_shard, compress)
    if (out / INDEX).is_file():
        refuse_other(made_from(out / INDEX), settings, out)
        (out / UNFINISHED).unlink(missing_ok=True)  # of a kill between the two last acts
        feedback.say(f"{out}: here already")
        return out / INDEX
    with Noted(out, settings) as noted:
        rows = sum(entry["rows"] for entry in noted.entries)
        if rows:
            feedback.say(f"{out}: going on after {rows:,} rows in {len(noted.entries)} shards")
        writer = ShardWriter(out, table, settings, feedback)
        chunks = rechunk(table.blocks(rows), settings.chunk_rows)
        while (entry := writer.write(len(noted.entries), chunks)) is not None:
            noted.add(entry)
            feedback.say(f"{entry['file']}: {entry['rows']:,} rows, {entry['bytes']:,} bytes")
        if not noted.entries:
            raise InputError(f"{table.name} has no rows", "give an input with at least one")
        return noted.finish()


def settings_for(
    table: Table, chunk_rows: int | None, rows_per_shard: int | None, compress: bool
) -> ShardSettings:
    """With sizes for the table's columns, where they were not given."""
    for name, value in (("--chunk-rows", chunk_rows), ("--rows-per-shard", rows_per_shard)):
        if value is not None and value < 1:
            raise InputError(f"{name} {value}", f"{name} must be at least 1")
    row_bytes = sum(c.row_bytes + LIST_BYTES * c.is_list for c in table.columns.values())
    chunk = chunk_rows or min(advised_chunk_rows(row_bytes), rows_per_shard or 1 << 62)
    per_shard = rows_per_shard or max(1, SHARD_BYTES // (chunk * max(1, row_bytes))) * chunk
    columns = {
        name: {"dtype": column.dtype.name, "shape": list(column.shape), "is_list": column.is_list}
        for name, column in table.columns.items()
    }
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


def made_from(index: Path) -> Any:
    """What the index says of its shards' origin."""
    try:
        value = json.loads(index.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"cannot use {index}: {error}", f"rm -r {shlex.quote(str(index.parent))}") from error
    return value.get("made_from") if isinstance(value, dict) else None


class Noted:
    """The shards that are whole, noted line by line; locked, so that two writers do not meet."""

    def __init__(self, out: Path, settings: ShardSettings) -> None:
        self.out, self.settings = out, settings
        self.path = out / UNFINISHED
        self.entries: list[dict[str, Any]] = []

    def __enter__(self) -> Noted:
        with durable.writing(self.out, GOES_ON):
            self.out.mkdir(parents=True, exist_ok=True)
            if not self.path.exists() and h5_files(self.out):
                raise InputError(
                    f"{self.out} holds HDF5 files that this command did not write", "another --out DIR"
                )
            self.file = open_locked(self.path)
            try:
                for name in (INDEX, "shard-"):
                    durable.clear(self.out, name)
                self._read()
            except BaseException:
                self.file.close()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def _read(self) -> None:
        """Keep the lines that are whole and whose files are there; the header if there is none."""
        self.file.seek(0)
        lines = self.file.readall().split(b"\n")[:-1]  # behind the last newline: nothing, or a torn line
        if lines:
            refuse_other(json.loads(lines[0]), self.settings, self.out)
        kept = 0
        for kept, line in enumerate(lines[1:], 1):
            entry = json.loads(line)
            path = self.out / entry["file"]
            if not path.is_file() or path.stat().st_size != entry["bytes"]:
                kept -= 1
                break
            self.entries.append(entry)
        self.file.truncate(sum(len(line) + 1 for line in lines[: kept + 1]) if lines else 0)
        if not lines:
            self._append(asdict(self.settings))

    def add(self, entry: dict[str, Any]) -> None:
        with durable.writing(self.path, GOES_ON):
            self._append(entry)
        self.entries.append(entry)

    def _append(self, value: dict[str, Any]) -> None:
        size = os.fstat(self.file.fileno()).st_size
        try:
            rest = memoryview(json.dumps(value).encode() + b"\n")
            while rest:
                rest = rest[self.file.write(rest) :]
            os.fsync(self.file.fileno())
        except OSError:
            self.file.truncate(size)
            raise

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
        with durable.writing(path, GOES_ON):
            durable.write(path, json.dumps(index))
            self.path.unlink()
        return path
