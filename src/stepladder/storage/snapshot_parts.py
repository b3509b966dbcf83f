"""Snapshots that all ranks write together: each writes its part in the background.

    part-00001.safetensors   this rank's slices
    part-00001.json          the part's entry of the manifest, written once the part is on disk

The ranks exchange no messages for it, because a collective in a background thread could interleave
with those of the training. Rank 0 waits for the notes (part-*.json) of all ranks, deletes them and
then completes the snapshot.
"""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from stepladder.core import durable
from stepladder.storage.snapshot_slices import PART_PREFIX, JsonObject, TensorSlice, write_part
from stepladder.storage.staging import HostBuffers

PART_POLL_INTERVAL_S = 0.01


class PartsAbandoned(Exception):
    """Some rank will not write its part, so the snapshot cannot be completed."""


class BackgroundWrite:
    """A thread that runs one function at a time; `wait` raises the function's exception."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def start(self, work: Callable[[], object]) -> None:
        """Run a function in the thread, after the previous one has ended."""
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(work,), name="snapshot")
        self._thread.start()

    def wait(self) -> None:
        """Wait for the function to end, and raise its exception."""
        self.join()
        error = self._error
        self._error = None
        if error is not None:
            raise error

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for the function to end; `wait` still raises its exception."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:  # `wait` raises it in the thread that waits
            self._error = error


class PartWriter:
    """Writes one rank's part of each snapshot in the background."""

    def __init__(self) -> None:
        self._buffers = HostBuffers()
        self._write = BackgroundWrite()

    def save(self, folder: Path, number: int, slices: dict[str, TensorSlice]) -> None:
        """Copy the slices now, and write them as part `number` in the background.

        `wait_for_errno` must have been called for the previous part.
        """
        values = self._buffers.copy({name: part.values for name, part in slices.items()})
        copies = {name: part._replace(values=values[name]) for name, part in slices.items()}
        self._write.start(partial(write_part_and_note, folder, number, copies))

    def wait_for_errno(self) -> int:
        """Wait for the part under way, and return the errno of its failure, or 0."""
        try:
            self._write.wait()
        except OSError as error:
            return error.errno or errno.EIO
        return 0


def write_part_and_note(folder: Path, number: int, slices: dict[str, TensorSlice]) -> None:
    """Write a part, and its note once the part is on disk; rank 0 may then rename the folder."""
    entry = write_part(folder, number, slices)
    durable.sync(folder / entry["name"])
    # Without fsync, which would open the folder again, when it may have been renamed.
    durable.write(note_path(folder, number), json.dumps(entry), fsync=False)


def note_path(folder: Path, number: int) -> Path:
    """Return the path of a part's note."""
    return folder / f"{PART_PREFIX}{number:05d}.json"


def collect_parts(folder: Path, count: int, abandoned: threading.Event) -> list[JsonObject]:
    """Wait for the notes of all parts, and delete them.

    Args:
        folder: The folder that all ranks write to.
        count: The number of parts.
        abandoned: Set if a rank was lost and will not write its part.

    Returns:
        The entries of the parts, as `write_part` returned them on each rank.

    Raises:
        PartsAbandoned: If `abandoned` is set before all notes exist.
    """
    notes = [note_path(folder, number) for number in range(count)]
    for note in notes:
        while not note.exists():
            if abandoned.wait(PART_POLL_INTERVAL_S):
                raise PartsAbandoned
    entries = [json.loads(note.read_bytes()) for note in notes]
    for note in notes:
        note.unlink()
    return entries
