"""A copy of the user's working folder, in which the script may write what it wants."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from stepladder.core.errors import InputError, naming

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
LARGE, MOST_FILES, MOST_BYTES = 32 << 20, 20_000, 4 << 30


def copy_folder(source: Path, target: Path) -> None:
    """Files above 32 MiB are linked, and the probe refuses to write through a link. Raises InputError."""
    files, size = 0, 0
    with naming(f"{source} cannot be copied", "cd to the script's own folder"):
        for folder, names, here in os.walk(source):
            names[:] = [name for name in names if name not in LEFT_OUT and not Path(folder, name).is_symlink()]
            place = target / Path(folder).relative_to(source)
            place.mkdir(parents=True, exist_ok=True)
            for name in here:
                path = Path(folder, name)
                files += 1
                size += copy_file(path, place / name)
                if files > MOST_FILES or size > MOST_BYTES:
                    raise InputError(f"{source} is too large to be copied: more than {files - 1} files or "
                                     f"{size >> 20} MiB",
                                     "cd to a folder that holds the script and little else")  # fmt: skip


def copy_file(path: Path, target: Path) -> int:
    """Its size, where bytes were copied."""
    if not path.is_file():  # a socket, a pipe, a link to nowhere
        return 0
    size = path.stat().st_size
    if size > LARGE:
        target.symlink_to(path.resolve())
        return 0
    shutil.copy2(path, target)
    return size
