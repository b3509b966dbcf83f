"""Writes shards. Each file is complete or absent, and a writer that was stopped can continue.

One chunk is in memory at a time.
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from numbers import Integral
from pathlib import Path

from stepladder.core.arguments import validate_arguments
from stepladder.core.errors import InputError, as_input_error
from stepladder.data.local_files import Feedback, output_folder
from stepladder.data.shards.journal import ShardJournal, open_journal_file, validate_settings
from stepladder.data.shards.samples import Sample, samples_table
from stepladder.data.shards.shard import (
    SHARD_INDEX,
    SHARD_JOURNAL,
    find_h5_files,
    recommend_chunk_rows,
)
from stepladder.data.shards.shard_file import ShardSettings, write_shard
from stepladder.data.table import Block, Table, count_rows, rechunk, row_bytes

SHARD_BYTES = 64 << 20  # the size of a file, where the user names no number of rows
MAX_CHUNK_MEMORY_BYTES = 1 << 30
MAX_COLUMN_NAME_LENGTH = 255
MAX_GZIP_RATIO = 1032  # gzip stores at most so many bytes in one
# What a list in a row is taken to have when the size of a chunk is chosen. Lengths are not known
# before the lists are read.
ESTIMATED_LIST_BYTES = 256


@validate_arguments
def write_shards(
    samples: Iterable[Sample],
    out: str | Path,
    chunk_rows: int | None = None,
    rows_per_shard: int | None = None,
    compress: bool = False,
) -> Path:
    """Write samples as shards.

    After a kill, call it again with the same samples: those that are in complete shards are read
    and skipped.

    Args:
        samples: Dicts with the columns of the first one. Values are numbers (int64, float32),
            arrays of one shape and type, or Python lists of numbers, whose lengths may differ.
        out: The folder for the shards.
        chunk_rows: The rows that are read at once; by default about 0.4 MB of them.
        rows_per_shard: The rows of a file; by default about 64 MB of them.
        compress: Whether chunks are compressed by gzip.

    Returns:
        The path of the index.

    Raises:
        InputError: A sample does not fit, or the folder has something else or cannot be written.
    """
    return write_table(samples_table(samples), Path(out), chunk_rows, rows_per_shard, compress)


def write_table(
    table: Table,
    out: Path,
    chunk_rows: int | None = None,
    rows_per_shard: int | None = None,
    compress: bool = False,
    feedback: Feedback = Feedback(),  # noqa: B008 - frozen
) -> Path:
    """Write a table as shards.

    Args:
        table: The table.
        out: The folder for the shards.
        chunk_rows: The rows that are read at once; by default about 0.4 MB of them.
        rows_per_shard: The rows of a file; by default about 64 MB of them.
        compress: Whether chunks are compressed by gzip.
        feedback: Shows the progress.

    Returns:
        The path of the index.

    Raises:
        InputError: The table cannot be used, or the folder has something else or cannot be written.
    """
    settings = _make_settings(table, chunk_rows, rows_per_shard, compress)
    if (out / SHARD_INDEX).is_file():
        _validate_finished(out, settings)
        (out / SHARD_JOURNAL).unlink(missing_ok=True)  # left by a kill right after the index
        feedback.on_message(f"{out}: here already")
        return out / SHARD_INDEX
    with output_folder(out), open_journal_file(out) as file:
        journal = ShardJournal(out, settings, file)
        try:
            return _write_remaining(table, journal, feedback)
        except InputError:
            # The journal names the input. Without shards it is dropped, so that it does not refuse
            # the input that the user has corrected.
            if not find_h5_files(out):
                (out / SHARD_JOURNAL).unlink()
            raise


def _validate_finished(out: Path, settings: ShardSettings) -> None:
    """Raise InputError if the shards of a finished folder were made from something else."""
    path = out / SHARD_INDEX
    hint = f"rm -r {shlex.quote(str(out))}"
    with as_input_error(f"cannot use {path}", hint, (OSError, ValueError)):
        index = json.loads(path.read_bytes())
    made_from = index.get("made_from") if isinstance(index, dict) else None
    validate_settings(made_from, settings, out)


def _write_remaining(table: Table, journal: ShardJournal, feedback: Feedback) -> Path:
    """Write the shards after those of the journal, and the index."""
    out = journal.folder
    settings = journal.settings
    num_rows = journal.num_rows
    if num_rows:
        feedback.on_message(
            f"{out}: going on after {num_rows:,} rows in {len(journal.entries)} shards"
        )
    _validate_free_space(table, settings, out, num_rows)
    chunks_per_shard = -(-settings.rows_per_shard // settings.chunk_rows)  # rounded up
    blocks = _show_progress(table, num_rows, feedback)
    chunks = rechunk(blocks, settings.chunk_rows)
    for first_chunk in chunks:
        path = out / f"shard-{len(journal.entries):05d}.h5"
        shard_chunks = chain([first_chunk], islice(chunks, chunks_per_shard - 1))
        entry = write_shard(path, table, settings, shard_chunks)
        journal.add(entry)
        feedback.on_message(f"{path.name}: {entry.rows:,} rows, {entry.bytes:,} bytes")
    if not journal.entries:
        raise InputError(f"{table.name} has no rows", "give an input with at least one")
    return journal.write_index()


def _show_progress(table: Table, first_row: int, feedback: Feedback) -> Iterator[Block]:
    """Yield the rows of a table from one on, and show how many of its bytes they are."""
    bytes_per_row = row_bytes(table.columns)
    done = first_row
    for block in table.blocks(first_row):
        yield block
        done += count_rows(block)
        feedback.on_progress(table.name, done * bytes_per_row, table.rows * bytes_per_row)


def _validate_free_space(
    table: Table, settings: ShardSettings, out: Path, rows_written: int
) -> None:
    """Check that the remaining rows can fit on the disk: a sparse input can claim any size.

    Args:
        table: The table to write.
        settings: Whether the shards are compressed.
        out: The folder of the shards.
        rows_written: The number of rows that are in shards already.

    Raises:
        InputError: The rows need more bytes than the disk has free.
    """
    needed = (table.rows - rows_written) * row_bytes(table.columns)
    free = shutil.disk_usage(out).free
    ratio = MAX_GZIP_RATIO if settings.compress else 1
    if needed > free * ratio:
        raise InputError(
            f"{table.name} has {needed:,} bytes to write, and {out} has {free:,} free",
            "free some space, or another --out DIR",
        )


# -- settings --------------------------------------------------------------------------------------


def _make_settings(
    table: Table, chunk_rows: int | None, rows_per_shard: int | None, compress: bool
) -> ShardSettings:
    """Return the settings, with sizes for the table's columns where the user gave none."""
    _validate_positive("--chunk-rows", chunk_rows)
    _validate_positive("--rows-per-shard", rows_per_shard)
    _validate_columns(table)
    columns = table.columns.values()
    num_lists = sum(column.is_list for column in columns)
    estimated_row_bytes = row_bytes(table.columns) + ESTIMATED_LIST_BYTES * num_lists
    if chunk_rows is None:
        chunk_rows = recommend_chunk_rows(estimated_row_bytes)
        if rows_per_shard is not None:
            chunk_rows = min(chunk_rows, rows_per_shard)
    chunk_bytes = chunk_rows * estimated_row_bytes
    if chunk_bytes > MAX_CHUNK_MEMORY_BYTES:
        raise InputError(
            f"chunks of {chunk_rows:,} rows have {chunk_bytes:,} bytes, more than"
            f" {MAX_CHUNK_MEMORY_BYTES:,}",
            f"--chunk-rows {recommend_chunk_rows(estimated_row_bytes)}",
        )
    if rows_per_shard is None:
        rows_per_shard = max(1, SHARD_BYTES // max(chunk_rows, chunk_bytes)) * chunk_rows
    stored_columns = {
        name: {"dtype": column.dtype.name, "shape": list(column.shape), "is_list": column.is_list}
        for name, column in table.columns.items()
    }
    return ShardSettings(
        source=table.identity,
        columns=stored_columns,
        chunk_rows=min(chunk_rows, rows_per_shard),
        rows_per_shard=rows_per_shard,
        compress=compress,
    )


def _validate_positive(flag: str, value: int | None) -> None:
    if value is not None and not (isinstance(value, Integral) and value >= 1):
        raise InputError(f"{flag} {value}", f"{flag} must be at least 1")


def _validate_columns(table: Table) -> None:
    """Raise InputError if a column has no bytes, or a name that HDF5 does not take."""
    if not table.columns:
        raise InputError(f"{table.name} has no columns", "give an input with at least one")
    for name, column in table.columns.items():
        if not _is_h5_name(name):
            raise InputError(
                f"{table.name}: column {name!r} is not a valid name in HDF5",
                "rename it, or --columns without it",
            )
        if not column.row_bytes:
            raise InputError(
                f"{table.name}: the rows of column {name} hold nothing", "--columns without it"
            )


def _is_h5_name(name: str) -> bool:
    is_path = not isinstance(name, str) or "/" in name or name in (".", "..")
    return not is_path and name.isprintable() and 0 < len(name) <= MAX_COLUMN_NAME_LENGTH
