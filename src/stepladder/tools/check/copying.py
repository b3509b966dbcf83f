"""A copy of the user's working folder, in which the script may write what it wants."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from stepladder.core.errors import InputError, as_input_error
from stepladder.core.scratch import get_scratch_folder

LEFT_OUT = {
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
MOST_FILES, MOST_BYTES = 20_000, 4 << 30


def copy_folder(source: Path, target: Path, writes: Sequence[Path] = ()) -> None:
    """Copy a working folder. Links to folders stay links, for data may lie there.

    Args:
        source: The working folder.
        target: Where the copy shall lie.
        writes: Folders that the script may write for real. One in the working folder is left empty
        in the copy.

    Raises:
        InputError: It is too large, or cannot be read.
    """
    with as_input_error(f"{source} cannot be copied", "cd to the script's own folder"):
        refuse_large(source, writes)
        for folder, links, files in walk(source, writes):
            place = target / folder.relative_to(source)
            place.mkdir(parents=True, exist_ok=True)
            for link in links:
                (place / link.name).symlink_to(link.resolve())
            for file in files:  # one that is a link becomes a file of its own
                shutil.copy2(file, place / file.name)


def refuse_large(source: Path, writes: Sequence[Path]) -> None:
    """Before anything is copied."""
    count = size = 0
    for _, _, files in walk(source, writes):
        count += len(files)
        size += sum(file.stat().st_size for file in files)
        if count > MOST_FILES or size > MOST_BYTES:
            raise InputError(
                f"{source} is too large to be copied: {count} files or more, {size >> 20} MiB",
                "cd to a folder that holds the script and little else, with links to folders of data",
            )


def is_left_out(folder: Path) -> bool:
    """Return whether a folder holds nothing of the script's own; a virtual environment may have any
    name.
    """
    return folder.name in LEFT_OUT or (folder / VENV_MARKER).is_file()


def walk(
    source: Path, writes: Sequence[Path] = ()
) -> Iterator[tuple[Path, list[Path], list[Path]]]:
    """Yield each folder, its links to folders, and its files; no sockets, pipes or links to
    nowhere.
    """
    own = get_scratch_folder()  # the temporary directory may lie below
    for name, folders, files in os.walk(source):
        folder = Path(name)
        if folder in writes and folder != source:
            folders.clear()
            files.clear()
        folders[:] = [
            one for one in folders if not is_left_out(folder / one) and folder / one != own
        ]
        links = [
            folder / one for one in folders if (folder / one).is_symlink()
        ]  # os.walk does not follow them
        yield folder, links, [folder / one for one in files if (folder / one).is_file()]
