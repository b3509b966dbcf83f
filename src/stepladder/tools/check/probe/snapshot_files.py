"""Snapshots, recognised by what is in the files: the bytes of weights that are being trained.

So it does not matter which function of which library has written them, nor in which thread.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch

from stepladder.tools.check.events import SnapshotFound
from stepladder.tools.check.probe import digests
from stepladder.tools.check.probe.patching import default_on_error
from stepladder.tools.check.probe.probe_log import current_log

MAX_FILES = 20_000
MIN_SEARCHED_BYTES = 4
MIN_CERTAIN_BYTES = 16  # no other file holds so many by chance
MAX_SEARCHED_BYTES = 256
MAX_SEARCHED_WEIGHTS = 8
MIN_BYTES_OF_UNKNOWN_FORMAT = 1 << 16  # of a file that may hold compressed weights
SETTLED_INTERVAL_S = 0.05
MAX_SETTLING_S = 10.0

SAVED_TYPES = (None, torch.float16, torch.bfloat16)  # None: that of the weight

FileState = tuple[int, int]  # its size, and when it was changed
Files = dict[str, FileState]


class SnapshotFiles:
    """The files below the script's folder, and below each folder in which it saves something."""

    def __init__(self) -> None:
        self.folders: set[str] = set()  # besides the script's own
        self.known: Files | None = None

    def watch_folder_of(self, path: str) -> None:
        """Look also at the folder of a file that the script saves elsewhere."""
        folder = os.path.dirname(path)  # noqa: PTH120  # pathlib is slow
        copy = current_log().settings.copy
        if folder and not (folder + os.sep).startswith(copy + os.sep):
            self.folders.add(folder)

    @default_on_error(bool)
    def has_new_snapshot(self, parameters: Iterable[Any]) -> bool:
        """Return whether the weights were written to a file since the last look.

        The first look only learns which files are there.

        Args:
            parameters: Those that are trained.
        """
        files = self._scan()
        if self.known is None or files == self.known:
            self.known = files
            return False
        files = self._wait_until_settled(files)
        changed = [path for path, state in files.items() if self.known.get(path) != state]
        self.known = files
        weights = list(parameters)
        forms = [list(pieces_of(weights, dtype)) for dtype in SAVED_TYPES]
        may_be_packed = current_log().settings.may_be_packed
        found = sorted(path for path in changed if holds_weights(path, forms, may_be_packed))
        if found:
            current_log().write(SnapshotFound(paths=found))
        return bool(found)

    def _wait_until_settled(self, files: Files) -> Files:
        """Wait for a thread, or another rank, that still writes."""
        deadline = time.monotonic() + MAX_SETTLING_S
        while time.monotonic() < deadline:
            time.sleep(SETTLED_INTERVAL_S)
            previous, files = files, self._scan()
            if files == previous:
                break
        return files

    def _scan(self) -> Files:
        files: Files = {}
        copy = current_log().settings.copy
        for root in (copy, *sorted(self.folders)):
            for folder, names, entries in os.walk(root):
                # Another folder, such as /tmp, may hold anything.
                is_looked_through = folder.startswith(copy)
                names[:] = [name for name in names if is_looked_through and is_visible(name)]
                for name in entries:
                    path = os.path.join(folder, name)  # noqa: PTH118
                    with suppress(OSError):
                        status = os.stat(path)  # noqa: PTH116
                        files[path] = status.st_size, status.st_mtime_ns
                if len(files) > MAX_FILES:
                    return files
        return files


snapshot_files = SnapshotFiles()


def is_visible(name: str) -> bool:
    return not name.startswith((".", "__pycache__"))


def pieces_of(parameters: Iterable[Any], dtype: torch.dtype | None) -> Iterator[bytes]:
    """Yield some bytes of some of the weights, by which a file is known to hold them.

    Args:
        parameters: The weights.
        dtype: The type in which they are saved; None for their own.
    """
    found = 0
    for parameter in parameters:
        if found == MAX_SEARCHED_WEIGHTS:
            return
        local = getattr(parameter, "_local_tensor", parameter)
        values = digests.copy_to_cpu(local).reshape(-1)[:MAX_SEARCHED_BYTES].to(dtype)
        piece = bytes(values.view(torch.uint8).numpy())
        piece = piece[:MAX_SEARCHED_BYTES]
        if len(piece) >= MIN_SEARCHED_BYTES and len(set(piece)) > 1:
            found += 1
            yield piece


def holds_weights(path: str, forms: list[list[bytes]], may_be_packed: bool) -> bool:
    """Return whether a file holds weights, or is large and of bytes that may be weights.

    Args:
        path: The file.
        forms: The pieces of weights, in each type in which they may be saved.
        may_be_packed: Whether bytes that may be weights are enough.
    """
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            size = os.fstat(file.fileno()).st_size
            if not size:  # cannot be mapped
                return False
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as contents:
                for pieces in forms:
                    found = [piece for piece in pieces if contents.find(piece) >= 0]
                    is_certain = any(len(piece) >= MIN_CERTAIN_BYTES for piece in found)
                    if is_certain or (found and found == pieces):
                        return True
                is_binary = contents.find(b"\0", 0, MAX_SEARCHED_BYTES) >= 0
                return may_be_packed and is_binary and size >= MIN_BYTES_OF_UNKNOWN_FORMAT
    except OSError:
        return False
