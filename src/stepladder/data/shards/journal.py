"""The journal of shards that are being written: which of them are complete.

A shard is written under a temporary name, fsynced and renamed, and then recorded in
`index.json.part`, one line a shard. The index is written last. After a kill the next start keeps
the recorded shards and continues after them.
"""

from __future__ import annotations

import io
import json
import os
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stepladder.core import durable
from stepladder.core.errors import InputError, as_input_error
from stepladder.core.typed_file import parse_json
from stepladder.data.local_files import open_locked
from stepladder.data.shards.index import StoredShard
from stepladder.data.shards.shard import SHARD_INDEX, SHARD_JOURNAL, find_h5_files
from stepladder.data.shards.shard_file import CONTINUE_HINT, ShardSettings


def open_journal_file(folder: Path) -> io.FileIO:
    """Open and lock the journal's file.

    Returns:
        The open file, which holds the lock until it is closed.

    Raises:
        InputError: Another process writes the file, or the folder has HDF5 files without a journal.
    """
    with durable.name_write_errors(folder, CONTINUE_HINT):
        if not (folder / SHARD_JOURNAL).exists() and find_h5_files(folder):
            raise InputError(
                f"{folder} holds HDF5 files that this command did not write", "another --out DIR"
            )
        return open_locked(folder / SHARD_JOURNAL)


class ShardJournal:
    """The complete shards of a folder, recorded in a locked file."""

    def __init__(self, folder: Path, settings: ShardSettings, file: io.FileIO) -> None:
        """Read the journal, and remove the temporary files of a killed writer.

        Args:
            folder: The folder of the shards.
            settings: The settings that the shards are written with.
            file: The file of `open_journal_file`.

        Raises:
            InputError: The folder's shards were written with other settings.
        """
        self.folder = folder
        self.settings = settings
        self.file = file
        self.entries: list[StoredShard] = []
        with durable.name_write_errors(folder, CONTINUE_HINT):
            for prefix in (SHARD_INDEX, "shard-"):
                durable.remove_unfinished(folder, prefix)
            self._read()

    @property
    def num_rows(self) -> int:
        return sum(entry.rows for entry in self.entries)

    def _read(self) -> None:
        """Keep the entries that are complete and whose files exist; write the header if none is."""
        self.file.seek(0)
        *lines, _torn_line = self.file.readall().split(b"\n")
        if not lines:
            self.file.truncate(0)
            self._append(asdict(self.settings))
            return
        problem = f"cannot use {self.folder / SHARD_JOURNAL}"
        hint = f"rm -r {shlex.quote(str(self.folder))}"
        with as_input_error(problem, hint, (ValueError,)):
            validate_settings(parse_json(lines[0], dict), self.settings, self.folder)
            for line in lines[1:]:
                entry = parse_json(line, StoredShard)
                path = self.folder / entry.file
                if not path.is_file() or path.stat().st_size != entry.bytes:
                    break
                self.entries.append(entry)
        kept_lines = lines[: 1 + len(self.entries)]
        self.file.truncate(sum(len(line) + 1 for line in kept_lines))

    def add(self, entry: StoredShard) -> None:
        """Record a shard that is complete."""
        with durable.name_write_errors(self.folder / SHARD_JOURNAL, CONTINUE_HINT):
            self._append(asdict(entry))
        self.entries.append(entry)

    def _append(self, value: dict[str, Any]) -> None:
        remaining = memoryview(json.dumps(value).encode() + b"\n")
        while remaining:  # the file is unbuffered: a full disk takes only the first bytes
            count = self.file.write(remaining)
            remaining = remaining[count:]
        os.fsync(self.file.fileno())

    def write_index(self) -> Path:
        """Write the index, which makes the folder valid, and remove the journal."""
        index = {
            "schema": 1,
            "rows": self.num_rows,
            "list_bytes": max(entry.list_bytes for entry in self.entries),
            "columns": self.settings.columns,
            "chunk_rows": self.settings.chunk_rows,
            "shards": [asdict(entry) for entry in self.entries],
            "made_from": asdict(self.settings),
        }
        path = self.folder / SHARD_INDEX
        with durable.name_write_errors(path, CONTINUE_HINT):
            durable.write(path, json.dumps(index))
            (self.folder / SHARD_JOURNAL).unlink()
        return path


def validate_settings(stored: Any, settings: ShardSettings, folder: Path) -> None:
    """Check that the folder's shards come from the same input and settings as this command's.

    Args:
        stored: The settings in the folder's journal or index, parsed from JSON.
        settings: The settings of this command.
        folder: The folder of the shards.

    Raises:
        InputError: A setting differs.
    """
    expected = asdict(settings)
    if stored == expected:
        return
    if not isinstance(stored, dict):
        stored = {}
    differing = [name for name in expected if stored.get(name) != expected[name]]
    name = differing[-1] if differing else "source"
    raise InputError(
        f"{folder} holds shards with another {name}: {stored.get(name)}, not {expected[name]}",
        f"another --out DIR, or rm -r {shlex.quote(str(folder))}",
    )
