"""Which folders get an overlay, so that a script can write there and nothing of the user's changes."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from stepladder.tools.check.isolation.kernel import Mount

# Folders of the system. No overlay is laid over one of them: services have sockets there, which
# nobody reaches through an overlay.
SYSTEM = {"/", "/home", "/opt", "/var", "/var/lib", "/var/log", "/var/spool"}
NEVER = ("/boot", "/dev", "/etc", "/proc", "/run", "/sys", "/usr")  # nor over one below these
NOT_ON_A_DISK = {
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
TEXT_FILES = {
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
OF_PROGRAMS = {"PATH", "MANPATH", "LD_LIBRARY_PATH"}
LARGEST_TEXT_BYTES, MOST_TEXT_BYTES, MOST_PATHS = 1 << 20, 16 << 20, 2000
ABSOLUTE_PATH = re.compile(r"""(?<![\w./~$}])~?/[^\s'"`,;:|<>()\[\]{}*?$]+""")
MOST_OVERLAYS = 200


@dataclass(frozen=True)
class Machine:
    """What this user may lay overlays over. uid: of the user, to whom all folders belong where it
    is 0.
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
        """Return whether an overlay may be laid over the folder."""
        if folder in SYSTEM or is_below(folder, NEVER):
            return False
        above = [mount for mount in self.mounts if is_below(folder, [mount.path])]
        if above and max(above, key=lambda mount: len(mount.path)).kind in NOT_ON_A_DISK:
            return False
        return self.uid == 0 or not self.has_mounts_below(folder)


def is_below(path: str, folders: Iterable[str]) -> bool:
    return any(path == folder or path.startswith(folder.rstrip("/") + "/") for folder in folders)


def choose_folders(paths: Iterable[str], machine: Machine) -> list[str]:
    """Return the folders to lay overlays over so that these paths can be written, parents first."""
    chosen: set[str] = set()
    for path in paths:
        folder = existing_folder(path)
        if folder is not None:
            chosen |= set(anchors(folder, machine))
    needed = [folder for folder in sorted(chosen) if not is_covered(folder, chosen, machine)]
    return needed[:MOST_OVERLAYS]


def existing_folder(path: str) -> str | None:
    """Return the real folder in which this path lies, or the nearest one above it that exists."""
    try:
        real = os.path.realpath(path)
        while not os.path.isdir(real):
            real = os.path.dirname(real)
    except (OSError, ValueError):
        return None
    return real


def anchors(folder: str, machine: Machine) -> Iterator[str]:
    """Yield the highest folder above that belongs to the user; of one that cannot be covered, its
    children.
    """
    if not os.access(folder, os.W_OK):
        return
    if not machine.is_eligible(folder):
        if (
            folder not in SYSTEM
            and machine.has_mounts_below(folder)
            and not is_below(folder, NEVER)
        ):
            yield from (
                child
                for child in children(folder)
                if machine.is_eligible(child) and machine.owns(child)
            )
        return
    parent = os.path.dirname(folder)
    while (
        machine.owns(folder)
        and machine.owns(parent)
        and machine.is_eligible(parent)
        and not machine.is_mount(folder)
    ):
        folder, parent = parent, os.path.dirname(parent)
    yield folder


def children(folder: str) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def is_covered(folder: str, chosen: set[str], machine: Machine) -> bool:
    """Return whether an overlay over a folder above is enough.

    It is not where a folder between them belongs to somebody else: an overlay cannot copy that one
    up. Nor does it cover a file system that is mounted below."""
    while machine.owns(folder) and not machine.is_mount(folder):
        folder = os.path.dirname(folder)
        if folder in chosen:
            return True
    return False


def likely_paths(folder: Path, args: Iterable[str], mounts: Iterable[Mount]) -> Iterator[str]:
    """Yield paths outside that the script may write: what its arguments and the variables name, and
    more.
    """
    yield from (
        str(folder.parent),
        os.path.expanduser("~"),
        tempfile.gettempdir(),
        "/tmp",
        "/var/tmp",
    )
    yield from (mount.path for mount in mounts if not is_below(mount.path, NEVER))
    yield from top_folders()
    for arg in args:
        yield from paths_in(arg)
    for name, value in os.environ.items():
        if name not in OF_PROGRAMS:
            yield from (part for part in value.split(os.pathsep) if part.startswith("/"))


def top_folders() -> Iterator[str]:
    """Yield the folders that hold data on many machines: those at the top, and those below /home
    and /opt.
    """
    for top in ("/", "/home", "/opt"):
        yield from children(top)


def paths_in(text: str) -> Iterator[str]:
    """Yield the absolute paths that a text names; `~/` is the home folder."""
    for match in ABSOLUTE_PATH.finditer(text):
        yield os.path.expanduser(match[0])


def paths_in_files(files: Iterable[Path]) -> Iterator[str]:
    """Yield the absolute paths that the sources and settings among these files name, each once."""
    known: dict[str, None] = {}
    budget = MOST_TEXT_BYTES
    for file in files:
        try:
            size = file.stat().st_size
            if file.suffix in TEXT_FILES and size <= min(budget, LARGEST_TEXT_BYTES):
                budget -= size
                known |= dict.fromkeys(paths_in(file.read_text(encoding="utf-8", errors="replace")))
        except OSError:
            continue
    yield from islice(known, MOST_PATHS)
