"""Access to a run directory: checks before the start, and clear messages for later I/O errors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stepladder.core.errors import (
    DEVICE_ERRNOS,
    DISK_HINT,
    FULL_ERRNOS,
    TRANSIENT_ERRNOS,
    InputError,
    StorageFault,
)
from stepladder.core.folders import find_obstacle
from stepladder.core.safe_open import is_foreign_link
from stepladder.rank.error_record import record_step
from stepladder.storage.lock import LOCK_FILE
from stepladder.storage.run_files import FOLDERS_OF_FILES, RUN_FILES, RUN_FOLDERS

MAX_APPENDED_BYTES = 1 << 38  # size of a file; timing.jsonl grows by 0.1 GB a day
FREE_SPACE_HINT = "free space there, or choose another --run-dir; a snapshot that is there is kept"
OTHER_WRITER_HINT = (
    "ls -l, and who else writes there; the same command goes on from the last snapshot"
)


def validate_run_dir_writable(run_dir: Path) -> None:
    """Raise InputError if a file or folder that a run writes cannot be written.

    It may be of another kind (a folder that has a file's name), a link, too large or read-only.

    Raises:
        InputError: If the run directory itself cannot be written.
    """
    if above := find_obstacle(run_dir):
        raise InputError(
            f"run directory {run_dir} cannot be written:"
            f" {above} is not a folder that you can write to",
            "--run-dir DIR in a place you can write to",
        )
    for name in RUN_FILES:
        _validate_path_writable(run_dir / name, is_folder=False)
    for name in RUN_FOLDERS:
        _validate_path_writable(run_dir / name, is_folder=True)
    for name in FOLDERS_OF_FILES:
        folder = run_dir / name
        if folder.is_dir():
            for path in sorted(folder.iterdir()):
                _validate_path_writable(path, is_folder=False)


def _validate_path_writable(path: Path, is_folder: bool) -> None:
    """Raise InputError if the path exists and the run cannot use it as its file or folder."""
    if not os.path.lexists(path):
        return
    move_hint = f"mv {path} {path}.other, or another --run-dir"
    kind = "folder" if is_folder else "file"
    if not (path.is_dir() if is_folder else path.is_file()):
        raise InputError(f"{path} is not a {kind}, as the run needs it", move_hint)
    # A folder may be a link that this user has made, such as one to a larger disk. A link of
    # another user could make this run write into a file elsewhere.
    if is_foreign_link(path) or (path.is_symlink() and not is_folder):
        raise InputError(
            f"{path} is a link to {path.readlink()}, and a run writes into its own directory alone",
            move_hint,
        )
    is_appended_to = not is_folder and path.name != LOCK_FILE  # the lock file has a fixed length
    if is_appended_to and path.stat().st_size > MAX_APPENDED_BYTES:
        raise InputError(
            f"{path} has {path.stat().st_size} bytes, more than {MAX_APPENDED_BYTES}", move_hint
        )
    if not os.access(path, os.W_OK):
        raise InputError(f"{path} cannot be written", f"chmod u+w {path}, or another --run-dir")


@contextmanager
def translate_storage_errors(run_dir: Path) -> Iterator[None]:
    """Turn file system errors in the run directory into one line that names the file."""
    try:
        yield
    except OSError as error:
        translated = _translate(error, run_dir)
        if translated is None:
            raise
        if hasattr(error, "step"):
            record_step(translated, error.step)
        raise translated from error


def _translate(error: OSError, run_dir: Path) -> InputError | StorageFault | None:
    """Return the error to raise instead, None if this one is of a file of the job."""
    has_name = isinstance(error.filename, str | bytes)
    path = os.fsdecode(error.filename) if has_name else str(run_dir)
    if error.errno in FULL_ERRNOS:  # writes do not name the file, so it may be the run's
        return InputError(f"{path} cannot be written: {error.strerror}", FREE_SPACE_HINT)
    if error.filename is None or not _is_run_file(path, run_dir):
        return None
    message = f"{path} cannot be used: {error.strerror}"
    if error.errno in TRANSIENT_ERRNOS:
        return StorageFault(message)
    if error.errno in DEVICE_ERRNOS:
        return InputError(message, DISK_HINT)
    return InputError(message, OTHER_WRITER_HINT)  # a file that was removed or replaced


def _is_run_file(name: str, run_dir: Path) -> bool:
    """Return whether the run itself uses this path; a job may have files of its own there."""
    path = Path(os.path.realpath(name))
    folder = Path(os.path.realpath(run_dir))
    if not path.is_relative_to(folder):
        return False
    first = path.relative_to(folder).parts[:1]
    return not first or first[0] in RUN_FILES + RUN_FOLDERS
