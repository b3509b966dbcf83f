"""A copy of the user's working folder, in which the script may write anything."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from stepladder.core.errors import InputError, as_input_error
from stepladder.core.scratch import get_scratch_folder

NOT_COPIED = {
    ".git",
    ".hg",
    ".venv",
    "venv",
    "node_modules",
    "__pycache__",
    ".mypy_cache",
    ".ruff_cache",
    ".pytest_cache",
}
VENV_MARKER = "pyvenv.cfg"
MAX_COPIED_FILES = 20_000
MAX_COPIED_BYTES = 4 << 30


def copy_folder(source: Path, target: Path, writable_folders: Sequence[Path] = ()) -> None:
    """Copy a working folder. Links to folders stay links, because data may be there.

    Args:
        source: The working folder.
        target: The path of the copy.
        writable_folders: Folders that the script may write for real. They are empty in the copy.

    Raises:
        InputError: The folder is too large, or cannot be read.
    """
    with as_input_error(f"{source} cannot be copied", "cd to the script's own folder"):
        validate_size(source, writable_folders)
        for folder, links, files in walk(source, writable_folders):
            folder_copy = target / folder.relative_to(source)
            folder_copy.mkdir(parents=True, exist_ok=True)
            for link in links:
                (folder_copy / link.name).symlink_to(link.resolve())
            for file in files:  # a link to a file becomes a file
                shutil.copy2(file, folder_copy / file.name)


def validate_size(source: Path, writable_folders: Sequence[Path]) -> None:
    """Raise InputError where a folder is too large to be copied."""
    count = 0
    size = 0
    for _, _, files in walk(source, writable_folders):
        count += len(files)
        size += sum(file.stat().st_size for file in files)
        if count > MAX_COPIED_FILES or size > MAX_COPIED_BYTES:
            raise InputError(
                f"{source} is too large to be copied: {count} files or more, {size >> 20} MiB",
                "cd to a folder that holds the script and little else, with links to folders of "
                "data",
            )


def is_excluded(folder: Path) -> bool:
    """Return whether a folder is not copied; a virtual environment may have any name."""
    return folder.name in NOT_COPIED or (folder / VENV_MARKER).is_file()


def walk(
    source: Path, writable_folders: Sequence[Path] = ()
) -> Iterator[tuple[Path, list[Path], list[Path]]]:
    """Yield each folder, its links to folders, and its files.

    Sockets, pipes and broken links are left out.
    """
    check_scratch = get_scratch_folder()  # the temporary directory may be below the working folder
    for name, folder_names, file_names in os.walk(source):
        folder = Path(name)
        if folder in writable_folders and folder != source:
            folder_names.clear()
            file_names.clear()
        children = [folder / child for child in folder_names]
        children = [c for c in children if not is_excluded(c) and c != check_scratch]
        folder_names[:] = [child.name for child in children]  # os.walk goes into these
        links = [child for child in children if child.is_symlink()]  # but not into links
        paths = [folder / file_name for file_name in file_names]
        yield folder, links, [path for path in paths if path.is_file()]
