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

# Folders of the system. No overlay is mounted on one of them: services have sockets there, which
# cannot be reached through an overlay.
SYSTEM_FOLDERS = {"/", "/home", "/opt", "/var", "/var/lib", "/var/log", "/var/spool"}
NEVER_BELOW = ("/boot", "/dev", "/etc", "/proc", "/run", "/sys", "/usr")
VIRTUAL_FILE_SYSTEMS = {
    "autofs",
    "proc",
    "sysfs",
    "devpts",
    "cgroup",
    "cgroup2",
    "mqueue",
    "securityfs",
    "debugfs",
}
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
VARIABLES_OF_PROGRAMS = {"PATH", "MANPATH", "LD_LIBRARY_PATH"}
MOST_BYTES_PER_TEXT = 1 << 20
MOST_BYTES_OF_TEXTS = 16 << 20
MOST_PATHS = 2000
MOST_OVERLAYS = 200
ABSOLUTE_PATH = re.compile(r"""(?<![\w./~$}])~?/[^\s'"`,;:|<>()\[\]{}*?$]+""")


@dataclass(frozen=True)
class Machine:
    """The folders on which this user may mount overlays.

    Attributes:
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
        """Return whether an overlay may be mounted on the folder."""
        if folder in SYSTEM_FOLDERS or is_below(folder, NEVER_BELOW):
            return False
        if self.file_system_of(folder) in VIRTUAL_FILE_SYSTEMS:
            return False
        return self.uid == 0 or not self.has_mounts_below(folder)

    def file_system_of(self, folder: str) -> str:
        """Return the kind of file system that a folder is on; empty where it is not known."""
        around = [mount for mount in self.mounts if is_below(folder, [mount.path])]
        if around:
            return max(around, key=lambda mount: len(mount.path)).kind
        return ""

    def is_usable(self, folder: str) -> bool:
        return self.owns(folder) and self.is_eligible(folder)


def is_below(path: str, folders: Iterable[str]) -> bool:
    """Return whether a path is one of these folders, or in one of them."""
    return any(path == folder or path.startswith(folder.rstrip("/") + "/") for folder in folders)


def choose_folders(paths: Iterable[str], machine: Machine) -> list[str]:
    """Return the folders that need an overlay so that these paths can be written, parents first."""
    chosen: set[str] = set()
    for path in paths:
        folder = existing_folder(path)
        if folder is not None:
            chosen |= set(overlay_candidates(folder, machine))
    needed = [folder for folder in sorted(chosen) if not is_covered(folder, chosen, machine)]
    return needed[:MOST_OVERLAYS]


def existing_folder(path: str) -> str | None:
    """Return the real folder that contains a path, or the nearest one above it that exists."""
    try:
        real = os.path.realpath(path)
        while not os.path.isdir(real):
            real = os.path.dirname(real)
    except (OSError, ValueError):
        return None
    return real


def overlay_candidates(folder: str, machine: Machine) -> Iterator[str]:
    """Yield the highest folder above that belongs to the user.

    If the folder itself cannot have an overlay because of mounts below it, its children are
    yielded.
    """
    if not os.access(folder, os.W_OK):
        return
    if not machine.is_eligible(folder):
        is_of_system = folder in SYSTEM_FOLDERS or is_below(folder, NEVER_BELOW)
        if machine.has_mounts_below(folder) and not is_of_system:
            yield from (child for child in children(folder) if machine.is_usable(child))
        return
    while machine.owns(folder) and not machine.is_mount(folder):
        parent = os.path.dirname(folder)
        if not machine.is_usable(parent):
            break
        folder = parent
    yield folder


def children(folder: str) -> list[str]:
    """Return the folders in a folder, without links."""
    try:
        with os.scandir(folder) as entries:
            return [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def is_covered(
    folder: str,
    chosen: set[str],
    machine: Machine,
) -> bool:
    """Return whether an overlay on a folder above is enough.

    It is not if a folder between them belongs to another user: an overlay cannot copy that one up.
    Nor does it cover a file system that is mounted below.
    """
    while machine.owns(folder) and not machine.is_mount(folder):
        folder = os.path.dirname(folder)
        if folder in chosen:
            return True
    return False


def likely_paths(
    folder: Path,
    args: Iterable[str],
    mounts: Iterable[Mount],
) -> Iterator[str]:
    """Yield paths outside the folder that the script may write.

    They are temporary folders, mounted file systems, folders that hold data on many machines, and
    what the arguments and the environment name.
    """
    yield str(folder.parent)
    yield os.path.expanduser("~")
    yield tempfile.gettempdir()
    yield from ("/tmp", "/var/tmp")
    yield from (mount.path for mount in mounts if not is_below(mount.path, NEVER_BELOW))
    for top in ("/", "/home", "/opt"):
        yield from children(top)
    for arg in args:
        yield from paths_in(arg)
    for name, value in os.environ.items():
        if name not in VARIABLES_OF_PROGRAMS:
            yield from (part for part in value.split(os.pathsep) if part.startswith("/"))


def paths_in(text: str) -> Iterator[str]:
    """Yield the absolute paths that a text names; `~/` is the home folder."""
    for match in ABSOLUTE_PATH.finditer(text):
        yield os.path.expanduser(match[0])


def paths_in_files(files: Iterable[Path]) -> Iterator[str]:
    """Yield the absolute paths that the sources and settings among these files name, each once."""
    paths: dict[str, None] = {}
    budget = MOST_BYTES_OF_TEXTS
    for file in files:
        try:
            size = file.stat().st_size
            if file.suffix in TEXT_SUFFIXES and size <= min(budget, MOST_BYTES_PER_TEXT):
                budget -= size
                paths |= dict.fromkeys(paths_in(file.read_text(encoding="utf-8", errors="replace")))
        except OSError:
            continue
    yield from islice(paths, MOST_PATHS)
