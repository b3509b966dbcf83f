"""The snapshots of one run: written in the background, verified when read, old ones deleted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from stepladder.core import durable, typed_file
from stepladder.core.arguments import validate_arguments
from stepladder.core.errors import InputError, as_input_error
from stepladder.storage.run_dir_access import FREE_SPACE_HINT
from stepladder.storage.run_files import MANIFEST_FILE, list_snapshots
from stepladder.storage.snapshot import Snapshot, read_snapshot, write_snapshot_files
from stepladder.storage.snapshot_parts import BackgroundWrite, PartsAbandoned, collect_parts
from stepladder.storage.snapshot_slices import DamagedSnapshot, JsonObject
from stepladder.storage.staging import HostBuffers, split_tied_tensors


class Snapshots:
    """Writes, reads and deletes the snapshots of one run.

    `save` writes a snapshot from one process. If all ranks write parts of it, `begin` creates
    the folder for the parts, and `save` completes it.

    Args:
        folder: The folder of the snapshots.
        keep: How many of the newest snapshots are kept, one at least. The snapshot with the best
            `score` in its manifest is kept too.
        guard: Called before anything is written or deleted. It raises an exception if this process
            may not write to the folder any more.
    """

    @validate_arguments
    def __init__(
        self, folder: str | Path, keep: int = 3, guard: Callable[[], None] = lambda: None
    ) -> None:
        self.folder = Path(folder)
        self.max_newest = max(1, keep)
        self.guard = guard
        self._buffers = HostBuffers()
        self._background_write = BackgroundWrite()
        self._parts_abandoned = threading.Event()
        # The folder that `begin` has created for the parts of all ranks, until `save` completes it.
        self._parts_folder: AbstractContextManager[Path] | None = None

    def save(
        self,
        step: int,
        model: torch.nn.Module,
        state: JsonObject,
        manifest: JsonObject | None = None,
        parts: int = 0,
    ) -> None:
        """Copy the model and the state now, and write the snapshot in the background.

        Waits for the previous snapshot first, and raises its error if it could not be written.

        Args:
            step: Optimizer steps done.
            model: The model.
            state: Tensors, numbers, strings, and lists, tuples and dicts of them.
            manifest: Further entries of the manifest.
            parts: How many parts the ranks write into the folder of `begin`, 0 without `begin`. The
                snapshot is complete once all parts are on disk.
        """
        if parts:
            assert self._parts_folder is not None, "begin() comes first"
            folder_context = self._parts_folder
        else:
            self.wait()
            folder_context = self.create(step)
        tensors, aliases = split_tied_tensors(model.state_dict())
        copies = self._buffers.copy({"model": tensors, "state": state})
        entries = {"step": step, "aliases": aliases, **(manifest or {})}
        write_files = partial(self._write_files, folder_context, copies, entries, parts)
        self._background_write.start(write_files)

    def begin(self, step: int) -> str:
        """Create the folder for the parts that all ranks write.

        Waits for the previous snapshot first, and raises its error if it could not be written.

        Returns:
            The path of the folder.
        """
        self.wait()
        self._parts_abandoned = threading.Event()
        # The folder is entered here, and left by the thread that completes the snapshot.
        stack = ExitStack()
        with as_input_error(f"snapshot in {self.folder} could not be written", FREE_SPACE_HINT):
            path = stack.enter_context(self.create(step))
        self._parts_folder = _leave_at_exit(stack, path)
        return str(path)

    def abandon_parts(self) -> None:
        """Stop waiting for the parts of a lost rank."""
        self._parts_abandoned.set()

    def end(self, timeout_s: float) -> None:
        """Wait for the write under way, and ignore its error: an earlier error may be the cause.

        Args:
            timeout_s: How long to wait for the parts of ranks that may be lost.
        """
        self._background_write.join(timeout_s)
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
        self.guard()  # the write may have taken long
        self._delete_old()

    def wait(self) -> None:
        """Wait until the snapshot that is being written is on disk.

        Raises InputError if the files could not be written, and other errors of the thread
        unchanged. That its parts were abandoned is no error.
        """
        message = f"snapshot in {self.folder} could not be written"
        with suppress(PartsAbandoned), as_input_error(message, FREE_SPACE_HINT):
            self._background_write.wait()

    def latest(self, report: Callable[[str], None] = print) -> Snapshot | None:
        """Return the newest undamaged snapshot, or None if there are no snapshots.

        Damaged snapshots that are newer are renamed to `step_*.damaged`.

        Args:
            report: Called with a line for each renamed snapshot.

        Raises:
            InputError: If all snapshots are damaged. They are not renamed, so that the next start
                fails again instead of training from step 0.
        """
        durable.remove_unfinished(self.folder, "step_")
        problems: dict[Path, str] = {}  # of the damaged snapshots, the newest first
        for path in reversed(self.paths()):
            try:
                snapshot = read_snapshot(path)
            except DamagedSnapshot as error:
                problems[path] = f"snapshot {path.name} is damaged ({error})"
                continue
            for damaged_path, problem in problems.items():
                report(f"{problem}; it is renamed, and the snapshot before it is used")
                target = damaged_path.with_suffix(".damaged")
                durable.remove(target)
                damaged_path.rename(target)
            return snapshot
        if problems:
            first_problem = next(iter(problems.values()))
            raise InputError(
                f"all {len(problems)} snapshots in {self.folder} are damaged: {first_problem}",
                "--fresh to move them aside and train from step 0",
            )
        return None

    def paths(self) -> list[Path]:
        """Return the complete snapshots, oldest first."""
        return list_snapshots(self.folder)

    def _write_files(
        self,
        folder_context: AbstractContextManager[Path],
        copies: JsonObject,
        entries: JsonObject,
        num_parts: int,
    ) -> None:
        with folder_context as path:
            parts = collect_parts(path, num_parts, self._parts_abandoned)
            write_snapshot_files(path, copies, entries, parts)

    def _delete_old(self) -> None:
        """Delete old snapshots, now that a newer one is complete on disk."""
        paths = self.paths()
        scores: dict[Path, float] = {}
        for path in paths:
            score = _read_score(path)
            if score is not None:
                scores[path] = score
        best = None
        if scores:  # the newest one of those with the best score
            best = max(scores, key=lambda path: (scores[path], path))
        for path in paths[: -self.max_newest]:
            if path != best:
                # Renamed first, since a snapshot that is half deleted must not look complete.
                unfinished = path.with_suffix(durable.UNFINISHED_SUFFIX)
                path.rename(unfinished)
                durable.remove(unfinished)


@contextmanager
def _leave_at_exit(stack: ExitStack, path: Path) -> Iterator[Path]:
    """Yield a folder that `stack` has entered, and leave it at the end of the block."""
    with stack:
        yield path


@dataclass(frozen=True)
class _ManifestScore:
    """The entry of a snapshot's manifest by which the best one is chosen."""

    score: float


def _read_score(path: Path) -> float | None:
    """Return a snapshot's score, or None if it has none.

    NaN counts as none, since max() could take it for the best.
    """
    try:
        text = typed_file.read_file(path / MANIFEST_FILE)
        return typed_file.parse_json(text, _ManifestScore).score
    except (OSError, ValueError):
        return None
