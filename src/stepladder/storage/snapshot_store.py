"""The snapshots of one run: saved in the background, verified when read, old ones deleted."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import torch

from stepladder.core import durable, typed_file
from stepladder.core.errors import InputError, as_input_error
from stepladder.storage.run_dir_access import FREE_SPACE_HINT
from stepladder.storage.run_files import MANIFEST_FILE, list_snapshots
from stepladder.storage.snapshot import Snapshot, read_snapshot, write_snapshot_files
from stepladder.storage.snapshot_parts import BackgroundWrite, PartsAbandoned, collect_parts
from stepladder.storage.snapshot_slices import DamagedSnapshot, JsonObject
from stepladder.storage.staging import HostBuffers, split_tied_tensors


class Snapshots:
    """The snapshots of one run: saved in the background, verified when read, old ones deleted.

    Args:
        folder: The folder of the snapshots.
        keep: How many of the newest remain. The one with the best `score` in its manifest remains
            too.
        guard: Called before anything is written; it raises if this process may not write here
            any more.
    """

    def __init__(
        self, folder: Path, keep: int = 3, guard: Callable[[], None] = lambda: None
    ) -> None:
        self.folder = folder
        self.max_newest = max(1, keep)
        self.guard = guard
        self._buffers = HostBuffers()
        self._write = BackgroundWrite()
        self._abandoned = threading.Event()
        # The folder that `begin` has created for all ranks, until `save` completes it.
        self._shared_folder: AbstractContextManager[Path] | None = None

    def save(
        self,
        step: int,
        model: torch.nn.Module,
        state: JsonObject,
        manifest: JsonObject | None = None,
        parts: int = 0,
    ) -> None:
        """Copy everything now, and write it in the background.

        Waits for the previous write first, and raises its error.

        Args:
            step: Optimizer steps done.
            model: The model.
            state: Tensors, numbers, strings, and lists, tuples and dicts of them.
            manifest: Further entries of the manifest.
            parts: Number of parts that ranks write into the folder of `begin`; the snapshot is
                complete once all of them are on disk.
        """
        if parts:
            assert self._shared_folder is not None, "begin() comes first"
            folder = self._shared_folder
        else:
            self.wait()
            folder = self.create(step)
        tensors, aliases = split_tied_tensors(model.state_dict())
        copies = self._buffers.copy({"model": tensors, "state": state})
        entries = {"step": step, "aliases": aliases, **(manifest or {})}
        self._write.start(partial(self._write_files, folder, copies, entries, parts))

    def begin(self, step: int) -> str:
        """Create the folder for the parts that all ranks write.

        Raises the previous write's error.

        Returns:
            The path of the folder.
        """
        self.wait()
        self._abandoned = threading.Event()
        stack = ExitStack()
        with as_input_error(f"snapshot in {self.folder} could not be written", FREE_SPACE_HINT):
            path = stack.enter_context(self.create(step))
        self._shared_folder = _complete(stack, path)
        return str(path)

    def abandon_parts(self) -> None:
        """Stop waiting for the parts of a lost rank."""
        self._abandoned.set()

    def end(self, timeout_s: float) -> None:
        """Finish the write under way; its error is ignored, as `wait` or the caller reports one.

        Args:
            timeout_s: How long to wait for the parts of ranks that may be lost.
        """
        self._write.join(timeout_s)
        self.abandon_parts()
        with suppress(Exception):
            self.wait()

    @contextmanager
    def create(self, step: int) -> Iterator[Path]:
        """Yield a temporary folder, which becomes the snapshot of `step` if nothing is raised."""
        self.guard()
        durable.make_folder(self.folder)
        with durable.replace_folder(self.folder / f"step_{step:08d}", check=self.guard) as path:
            yield path
        self.guard()
        self._delete_old()

    def wait(self) -> None:
        """Wait until the snapshot under way is on disk.

        Raises InputError if it could not be written, and any other error of the thread as it is.
        """
        message = f"snapshot in {self.folder} could not be written"
        with suppress(PartsAbandoned), as_input_error(message, FREE_SPACE_HINT):
            self._write.wait()

    def latest(self, report: Callable[[str], None] = print) -> Snapshot | None:
        """Return the newest undamaged snapshot, None if there is none at all.

        Damaged snapshots that are newer are renamed to `step_*.damaged`.

        Args:
            report: Called with a line for each of them.

        Raises:
            InputError: If all snapshots are damaged. They remain as they are, so that the next
                start fails again instead of training from step 0.
        """
        durable.remove_unfinished(self.folder, "step_")
        damaged: dict[Path, str] = {}
        for path in reversed(self.paths()):
            try:
                snapshot = read_snapshot(path)
            except DamagedSnapshot as error:
                damaged[path] = f"snapshot {path.name} is damaged ({error})"
                continue
            for damaged_path, message in damaged.items():
                report(f"{message}; set aside, the one before it is taken")
                target = damaged_path.with_suffix(".damaged")
                durable.remove(target)
                damaged_path.rename(target)
            return snapshot
        if damaged:
            first_message = next(iter(damaged.values()))
            raise InputError(
                f"all {len(damaged)} snapshots in {self.folder} are damaged: {first_message}",
                "--fresh to begin again beside them",
            )
        return None

    def paths(self) -> list[Path]:
        """Return the complete snapshots, oldest first."""
        return list_snapshots(self.folder)

    def _write_files(
        self,
        folder: AbstractContextManager[Path],
        copies: JsonObject,
        entries: JsonObject,
        num_parts: int,
    ) -> None:
        with folder as path:
            parts = collect_parts(path, num_parts, self._abandoned)
            write_snapshot_files(path, copies, entries, parts)

    def _delete_old(self) -> None:
        """Delete old snapshots; called only once a newer one is complete on disk."""
        paths = self.paths()
        scores = {path: score for path in paths if (score := _read_score(path)) is not None}
        best = max(scores, key=lambda path: (scores[path], path)) if scores else None
        for path in paths[: -self.max_newest]:
            if path != best:
                # Renamed first: half of a deleted snapshot must not look like a complete one.
                unfinished = path.with_suffix(durable.UNFINISHED_SUFFIX)
                path.rename(unfinished)
                durable.remove(unfinished)


@contextmanager
def _complete(stack: ExitStack, path: Path) -> Iterator[Path]:
    """Yield the folder that `stack` has opened, and close the stack after the block."""
    with stack:
        yield path


def _read_score(path: Path) -> float | None:
    """Return a snapshot's score, None if it has none or NaN, which would compare as the best."""
    try:
        manifest = typed_file.parse_json(typed_file.read_file(path / MANIFEST_FILE), dict)
        score = float(manifest["score"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None
    return None if math.isnan(score) else score
