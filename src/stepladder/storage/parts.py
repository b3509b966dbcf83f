"""Snapshots that all ranks write together: each its part, beside the training; the first makes one
of them.

    part-00001.safetensors   this rank's slices
    part-00001.json          what the manifest is to say of it, once it is on disk; not in a finished snapshot

No collective is called here: it could cross those of the training. The first rank sees in the
folder who is done."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from stepladder.core import durable
from stepladder.storage.slices import PART, Rows, write_part
from stepladder.storage.staging import HostCopies

SECONDS_BETWEEN_LOOKS = 0.01


class GivenUp(Exception):
    """Some rank will not write its part."""


class Background:
    """One piece of work at a time in a thread. What it raises, `wait` raises."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def start(self, work: Callable[[], object]) -> None:
        """Begin it. Waits for the one before."""
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(work,), name="snapshot")
        self._thread.start()

    def wait(self) -> None:
        """Until it is done."""
        self.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def join(self, seconds: float | None = None) -> None:
        """The same for so long at most, and its error stays for `wait`."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _run(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:  # a thread's own end would go unnoticed
            self._error = error


class PartWriter:
    """Writes one rank's part of each snapshot, in the background."""

    def __init__(self) -> None:
        self._copies = HostCopies()
        self._background = Background()

    def save(self, aside: Path, number: int, slices: dict[str, Rows]) -> None:
        """Copy the slices now, and write them as part `number` into the folder. After `failure`."""
        copies = self._copies.copy({name: rows.values for name, rows in slices.items()})
        copied = {name: rows._replace(values=copies[name]) for name, rows in slices.items()}
        self._background.start(partial(write_noted, aside, number, copied))

    def failure(self) -> str:
        """Why the part under way could not be written; empty where it is on disk. Waits for it."""
        try:
            self._background.wait()
        except OSError as error:
            return error.strerror or str(error)
        return ""


def write_noted(folder: Path, number: int, slices: dict[str, Rows]) -> None:
    """A part and, when it is on disk, the note of it: from then on the first rank may rename the
    folder.
    """
    told = write_part(folder, number, slices)
    durable.sync(folder / told["name"])
    durable.write(
        note_of(folder, number), json.dumps(told), fsync=False
    )  # that would open the folder again


def note_of(folder: Path, number: int) -> Path:
    return folder / f"{PART}{number:05d}.json"


def gathered(folder: Path, count: int, given_up: threading.Event) -> list[dict[str, Any]]:
    """What `write_part` has returned on each rank, once all parts are on disk. Raises GivenUp."""
    notes = [note_of(folder, number) for number in range(count)]
    for note in notes:
        while not note.exists():
            if given_up.wait(SECONDS_BETWEEN_LOOKS):
                raise GivenUp
    found = [json.loads(note.read_bytes()) for note in notes]
    for note in notes:
        note.unlink()
    return found
