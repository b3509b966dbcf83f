"""The choice of folders that get an overlay, so that a script can write there without effect."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from stepladder.tools.check.isolation.kernel import Mount

# Folders of the system on which no overlay is mounted: services have sockets there, which cannot be
# reached through an overlay. SYSTEM_FOLDERS may have overlays on folders in them; SYSTEM_TREES not.
SYSTEM_FOLDERS = {"/", "/home", "/opt", "/var", "/var/lib", "/var/log", "/var/spool"}
SYSTEM_TREES = ("/boot", "/dev", "/etc", "/proc", "/run", "/sys", "/usr")
TEXT_SUFFIXES = {
    ".py",
    ".yaml",
    ".yml",
    ".json",
    ".toml",
    ".ini",
    ".cfg",
    ".conf",
    ".sh",
    ".txt",
    ".env",
}
# Their folders hold programs and libraries, which a script does not write.
PROGRAM_PATH_VARIABLES = {"PATH", "MANPATH", "LD_LIBRARY_PATH"}
# Files that are searched for paths: at most so many bytes each, and all together.
MAX_BYTES_PER_TEXT = 1 << 20
MAX_BYTES_OF_TEXTS = 16 << 20
MAX_PATHS = 2000
MAX_OVERLAYS = 200
ABSOLUTE_PATH = re.compile(r"""(?<![\w./~$}])~?/[^\s'"`,;:|<>()\[\]{}*?$]+""")


@dataclass(frozen=True)
class OverlayRules:
    """Decides on which folders this user may mount overlays.

    Args:
        uid: The user; 0 may use the folders of all users.
        mounts: The mounted file systems.
    """

    uid: int
    mounts: tuple[Mount, ...] = field(default=())

    def owns(self, folder: str) -> bool:
        try:
            return self.uid in (0, os.stat(folder).st_uid)
        except OSError:
            return False

    def has_mounts_below(self, folder: str) -> bool:
        return any(mount.path.startswith(folder.rstrip("/") + "/") for mount in self.mounts)

    def is_mount(self, folder: str) -> bool:
        return any(mount.path == folder for mount in self.mounts)

    def is_eligible(self, folder: str) -> bool:
        """Return whether an overlay may be mounted on the folder, as far as this is known before.

        Linux refuses it on virtual file systems, such as autofs; then the folder is read-only.
        """
        if folder in SYSTEM_FOLDERS or is_below(folder, SYSTEM_TREES):
            return False
        return self.uid == 0 or not self.has_mounts_below(folder)

    def is_usable(self, folder: str) -> bool:
        return self.owns(folder) and self.is_eligible(folder)


def is_below(path: str, folders: Iterable[str]) -> bool:
    """Return whether a path is one of these folders, or in one of them."""
    return any(path == folder or path.startswith(folder.rstrip("/") + "/") for folder in folders)


def choose_folders(paths: Iterable[str], rules: OverlayRules) -> list[str]:
    """Return the folders that need an overlay so that these paths can be written, parents first."""
    chosen: set[str] = set()
    for path in paths:
        folder = find_existing_folder(path)
        if folder is not None:
            chosen |= set(find_overlay_folders(folder, rules))
    needed = [folder for folder in sorted(chosen) if not is_covered(folder, chosen, rules)]
    return needed[:MAX_OVERLAYS]


def find_existing_folder(path: str) -> str | None:
    """Return the real folder that contains a path, or the nearest one above it that exists."""
    try:
        real = os.path.realpath(path)
        while not os.path.isdir(real):
            real = os.path.dirname(real)
    except (OSError, ValueError):
        return None
    return real


def find_overlay_folders(folder: str, rules: OverlayRules) -> Iterator[str]:
    """Yield the folders on which overlays make everything in this folder writable.

    It is the highest folder above which belongs to the user, so that few overlays cover all paths.
    A folder that has mounts below it may not have an overlay; then its subfolders are yielded.
    """
    if not os.access(folder, os.W_OK):
        return
    if not rules.is_eligible(folder):
        is_of_system = folder in SYSTEM_FOLDERS or is_below(folder, SYSTEM_TREES)
        if rules.has_mounts_below(folder) and not is_of_system:
            yield from (child for child in list_subfolders(folder) if rules.is_usable(child))
        return
    while rules.owns(folder) and not rules.is_mount(folder):
        parent = os.path.dirname(folder)
        if not rules.is_usable(parent):
            break
        folder = parent
    yield folder


def list_subfolders(folder: str) -> list[str]:
    """Return the subfolders of a folder, without links."""
    try:
        with os.scandir(folder) as entries:
            return [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def is_covered(folder: str, chosen: set[str], rules: OverlayRules) -> bool:
    """Return whether an overlay on a higher folder makes this folder writable too.

    It does not if a folder between the two belongs to another user, which an overlay cannot copy
    up, or if another file system is mounted there.
    """
    while rules.owns(folder) and not rules.is_mount(folder):
        folder = os.path.dirname(folder)
        if folder in chosen:
            return True
    return False


def guess_written_paths(
    folder: Path, args: Iterable[str], mounts: Iterable[Mount]
) -> Iterator[str]:
    """Yield paths outside of the folder that the script may write.

    They are temporary folders, mounted file systems, folders in which many machines keep data, and
    the paths in the arguments and in the environment.
    """

    yield str(folder.parent)
    yield os.path.expanduser("~")
    yield tempfile.gettempdir()
    yield from ("/tmp", "/var/tmp")
    yield from (mount.path for mount in mounts if not is_below(mount.path, SYSTEM_TREES))
    for top in ("/", "/home", "/opt"):
        yield from list_subfolders(top)
    for arg in args:
        yield from find_paths(arg)
    for name, value in os.environ.items():
        if name not in PROGRAM_PATH_VARIABLES:
            yield from (part for part in value.split(os.pathsep) if part.startswith("/"))


def find_paths(text: str) -> Iterator[str]:
    """Yield the absolute paths that a text names; `~/` is the home folder."""
    for match in ABSOLUTE_PATH.finditer(text):
        yield os.path.expanduser(match[0])


def find_paths_in_files(files: Iterable[Path]) -> Iterator[str]:
    """Yield the absolute paths that the sources and settings among these files name, each once."""
    paths: dict[str, None] = {}
    budget = MAX_BYTES_OF_TEXTS
    for file in files:
        try:
            size = file.stat().st_size
            if file.suffix in TEXT_SUFFIXES and size <= min(budget, MAX_BYTES_PER_TEXT):
                budget -= size
                paths |= dict.fromkeys(
                    find_paths(file.read_text(encoding="utf-8", errors="replace"))
                )
        except OSError:
            continue
    yield from islice(paths, MAX_PATHS)
