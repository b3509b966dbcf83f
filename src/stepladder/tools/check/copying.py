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
MOST_FILES, MOST_BYTES = 20_000, 4 << 30


def copy_folder(source: Path, target: Path) -> None:
    """Links to folders stay links, for data may lie there: the probe writes through none. Raises InputError."""
    files, size = 0, 0
    with naming(f"{source} cannot be copied", "cd to the script's own folder"):
        for folder, names, here in os.walk(source):
            place = target / Path(folder).relative_to(source)
            place.mkdir(parents=True, exist_ok=True)
            names[:] = [name for name in names if name not in LEFT_OUT]
            for name in names:
                if (path := Path(folder, name)).is_symlink():  # which os.walk does not follow
                    (place / name).symlink_to(path.resolve())
            for name in here:
                path = Path(folder, name)
                files += 1
                size += copy_file(path, place / name)
                if files > MOST_FILES or size > MOST_BYTES:
                    raise InputError(f"{source} is too large to be copied: more than {files - 1} files or "
                                     f"{size >> 20} MiB",
                                     "cd to a folder that holds the script and little else, and link to the"
                                     " folders of data")  # fmt: skip


def copy_file(path: Path, target: Path) -> int:
    """Its size, where bytes were copied. A file that is a link becomes one of its own."""
    if not path.is_file():  # a socket, a pipe, a link to nowhere
        return 0
    shutil.copy2(path, target)
    return path.stat().st_size
