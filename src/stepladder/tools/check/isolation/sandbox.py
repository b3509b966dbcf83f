"""The sandbox in which the ranks of a checked script run: no file outside the copy changes.

A mount namespace is tried first, then Landlock. Where a kernel has neither, a script runs only with
`--unsafe`: audit events of Python then refuse what Python itself would change.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from stepladder.core.errors import InputError
from stepladder.tools.check.copying import copy_folder, is_excluded, walk
from stepladder.tools.check.isolation import kernel
from stepladder.tools.check.isolation.enter import Entry
from stepladder.tools.check.isolation.namespace import NamespacePlan
from stepladder.tools.check.isolation.overlay_folders import (
    OverlayRules,
    choose_folders,
    find_paths_in_files,
    guess_written_paths,
    is_below,
)

MECHANISM_VARIABLE = "STEPLADDER_CHECK_ISOLATION"  # one of MECHANISMS, for tests
MECHANISMS = ("namespace", "landlock", "audit")
OVERLAID_SUFFIX = "-overlaid"  # of the name of a start that is repeated with more overlays
NAMESPACE_TIMEOUT_S = 60.0  # a busy machine or a slow file server can delay it
MAX_NAMESPACE_MESSAGE_BYTES = 1 << 20
PACKAGE_ROOT = str(Path(__file__).parents[4])
RUN_MODULE = (
    "import sys; sys.path.insert(0, sys.argv[1]); import importlib; "
    "importlib.import_module(sys.argv[2]).main(sys.argv[3])"
)
# The path of a Unix socket has at most 107 bytes.
MAX_TEMPORARY_FOLDER_BYTES = 107 - len("/pymp-12345678/listener-12345678")
CACHE_FOLDERS = {
    "TRITON_CACHE_DIR": "triton",
    "NUMBA_CACHE_DIR": "numba",
    "MPLCONFIGDIR": "matplotlib",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
}


@dataclass(frozen=True)
class FolderChanges:
    """The names that a script wrote and removed in a folder outside of its copy.

    They are in an overlay that is deleted.
    """

    folder: str
    written: tuple[str, ...]
    removed: tuple[str, ...]


@dataclass(frozen=True)
class SandboxFolders:
    """The folders that a sandbox protects, and those in which the script may write.

    Args:
        scratch: The folder of this check.
        copy: The copy in which the script runs.
        original: The working folder, which is copied.
        args: The arguments of the script, which may name folders.
        writable_folders: Folders that may be written for real.
        written_paths: Paths outside of the copy that an earlier start wrote. They need overlays.
        is_unsafe: Whether the script may run where no kernel protects the files.
        texts: The new texts of files, by their paths in the copy.
    """

    scratch: Path
    copy: Path
    original: Path
    args: tuple[str, ...] = ()
    writable_folders: tuple[Path, ...] = ()
    written_paths: tuple[str, ...] = ()
    is_unsafe: bool = False
    texts: Mapping[str, str] = field(default_factory=dict)


class Sandbox:
    """A new copy of the working folder for the ranks of one start, with no access to others."""

    def __init__(self, folders: SandboxFolders) -> None:
        """Copy the working folder, and use the strongest mechanism of this kernel."""
        # The folders that are protected, and the copy.
        self.folders = folders
        # One of MECHANISMS.
        self.mechanism = ""
        # The namespaces that processes enter.
        self.descriptors: tuple[int, ...] = ()
        # The upper layer of each folder that has an overlay.
        self.upper_layers: dict[str, str] = {}
        # Changes in an earlier sandbox that are reported as well.
        self.earlier_changes: list[FolderChanges] = []
        self.open()

    def open(self) -> None:
        folders = self.folders
        copy_folder(folders.original, folders.copy, folders.writable_folders)
        for name, text in folders.texts.items():
            (folders.copy / name).parent.mkdir(parents=True, exist_ok=True)
            (folders.copy / name).write_text(text, encoding="utf-8")
        forced = os.environ.get(MECHANISM_VARIABLE, "")
        namespace = open_namespace(folders) if forced in ("", "namespace") else None
        if namespace is not None:
            self.mechanism = "namespace"
            self.descriptors, self.upper_layers = namespace
            return
        if forced == "namespace":
            raise InputError(
                f"{MECHANISM_VARIABLE}=namespace: this kernel allows no mount namespace",
                f"unset {MECHANISM_VARIABLE}",
            )
        link_writable_folders(folders)
        has_landlock = forced in ("", "landlock") and kernel.landlock_abi() > 0
        if not has_landlock and not forced and not folders.is_unsafe:
            raise InputError(
                "this kernel has neither user namespaces nor Landlock, so nothing would keep the "
                "files outside the copy as they are",
                "stepladder check --unsafe SCRIPT  # for a script that you trust",
            )
        self.mechanism = "landlock" if has_landlock else "audit"

    def move_to(
        self, copy: Path, written_paths: Iterable[str] = (), keep_changes: bool = False
    ) -> None:
        """Start again in a fresh copy, without anything that was written outside.

        Args:
            copy: The path of the new copy.
            written_paths: Further paths outside of the copy that the script writes.
            keep_changes: Whether the changes made so far are reported as well.
        """
        if keep_changes:
            self.earlier_changes += self.read_changes()
        self.close()
        self.folders = replace(
            self.folders, copy=copy, written_paths=(*self.folders.written_paths, *written_paths)
        )
        self.open()

    def can_cover(self, paths: Iterable[str]) -> bool:
        """Return whether overlays can be mounted on folders of these paths that have none."""
        if self.mechanism != "namespace":
            return False
        rules = OverlayRules(os.geteuid(), tuple(kernel.read_mounts()))
        return any(folder not in self.upper_layers for folder in choose_folders(paths, rules))

    @property
    def writable(self) -> tuple[str, ...]:
        """The folders that the ranks may write for real."""
        real = (self.folders.scratch, *self.folders.writable_folders)
        return tuple(str(folder.resolve()) for folder in real)

    def command(self, command: Sequence[str], folder: Path | None = None) -> list[str]:
        """Return the command that runs another command in the sandbox.

        Args:
            command: The command to run.
            folder: Its working folder; the copy by default.
        """
        return make_module_command("enter", self.entry(command, folder).to_json())

    def entry(self, command: Sequence[str], folder: Path | None = None) -> Entry:
        """Return how a child of this process enters the sandbox."""
        return Entry(
            self.mechanism,
            list(command),
            str(folder or self.folders.copy),
            os.getpid(),
            list(self.descriptors),
            list(self.writable),
        )

    def variables(self) -> dict[str, str]:
        """Return the variables by which the ranks have folders that they may write.

        All starts of a check share the caches, so that a script is compiled once.
        """
        caches = self.folders.scratch / "caches"
        variables = {
            name: str(caches / folder)
            for name, folder in CACHE_FOLDERS.items()
            if name not in os.environ
        }
        temporary = os.path.realpath(tempfile.gettempdir())
        new_temporary = self.folders.scratch / "tmp"
        is_writable = is_below(temporary, (*self.upper_layers, *self.writable))
        if not is_writable and len(os.fsencode(new_temporary)) <= MAX_TEMPORARY_FOLDER_BYTES:
            new_temporary.mkdir(exist_ok=True)
            variables["TMPDIR"] = str(new_temporary)
        return variables

    def read_changes(self) -> list[FolderChanges]:
        """Return the changes outside so far; none where there are no overlays."""
        if not self.upper_layers:
            return []
        command = make_module_command("overlay_changes", json.dumps(self.upper_layers))
        completed = subprocess.run(
            self.command(command, Path("/")),
            pass_fds=self.descriptors,
            capture_output=True,
            check=False,
        )
        if completed.returncode != 0:
            return []
        changes = []
        for folder, names, removed in json.loads(completed.stdout):
            # A folder that was there, in which files came and went, is no change.
            written = [name for name in names if not Path(folder, name).is_dir()]
            if written or removed:
                changes.append(FolderChanges(folder, tuple(written), tuple(removed)))
        return changes

    def close(self) -> None:
        """Release the namespaces, with their overlays."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = ()
        self.upper_layers = {}


def make_module_command(module: str, text: str) -> list[str]:
    """Return the command that calls `main(text)` of a module of this package, in a bare Python."""
    name = f"stepladder.tools.check.isolation.{module}"
    return [sys.executable, "-I", "-S", "-B", "-c", RUN_MODULE, PACKAGE_ROOT, name, text]


def open_namespace(folders: SandboxFolders) -> tuple[tuple[int, ...], dict[str, str]] | None:
    """Make a mount namespace.

    Returns:
        Its descriptors and its upper layers, or None where the kernel allows none.
    """
    receiver, sender = socket.socketpair()
    with receiver, sender:
        receiver.settimeout(NAMESPACE_TIMEOUT_S)
        builder = subprocess.Popen(
            make_module_command("namespace", str(sender.fileno())),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[sender.fileno()],
        )
        sender.close()
        try:
            plan = make_plan(folders).to_json().encode()
            builder.communicate(plan, NAMESPACE_TIMEOUT_S)
            message, descriptors, _, _ = socket.recv_fds(receiver, MAX_NAMESPACE_MESSAGE_BYTES, 2)
        except (OSError, subprocess.TimeoutExpired):
            return None
        finally:
            builder.kill()
            builder.wait()
    if not descriptors:
        return None
    make_removable(folders.scratch)
    return tuple(descriptors), json.loads(message)["upper_layers"]


def make_plan(folders: SandboxFolders) -> NamespacePlan:
    mounts = tuple(kernel.read_mounts())
    links: list[str] = []
    files: list[Path] = []
    for _, folder_links, folder_files in walk(folders.original):
        links += [str(link.resolve()) for link in folder_links]
        files += folder_files
    paths = [
        *folders.written_paths,
        *links,
        *find_paths_in_files(files),
        *guess_written_paths(folders.original, folders.args, mounts),
    ]
    return NamespacePlan(
        scratch=str(folders.scratch),
        layers=tempfile.mkdtemp(prefix="layers-", dir=folders.scratch),
        copy=str(folders.copy),
        original=str(folders.original),
        overlays=choose_folders(paths, OverlayRules(os.geteuid(), mounts)),
        excluded=list(excluded_folders(folders.original)),
        writable_folders=[str(folder.resolve()) for folder in folders.writable_folders],
    )


def link_writable_folders(folders: SandboxFolders) -> None:
    """Replace the folders of the copy that are written for real by links to them."""
    for folder in folders.writable_folders:
        if folder.is_relative_to(folders.original) and folder != folders.original:
            path_in_copy = folders.copy / folder.relative_to(folders.original)
            if path_in_copy.is_dir():  # not if it is inside another folder, which is now a link
                path_in_copy.rmdir()
                path_in_copy.symlink_to(folder)


def excluded_folders(original: Path) -> Iterable[str]:
    """Yield the folders that the copy lacks, such as the virtual environment of the interpreter."""

    for folder in sorted(original.iterdir()):
        if folder.is_dir() and is_excluded(folder) and folder.name != "__pycache__":
            yield str(folder)


def make_removable(scratch: Path) -> None:
    """Allow the work folders of overlays, which Linux makes with mode 0, to be removed."""
    for work in (layer / "work" for layer in scratch.glob("layers-*/*/work")):
        with suppress(OSError):
            work.chmod(0o700)
