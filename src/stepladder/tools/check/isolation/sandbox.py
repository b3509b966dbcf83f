"""Where the ranks of a checked script run: no file outside the copy changes, by one of three
mechanisms.

A mount namespace is tried first, then Landlock; what is left are the audit events of Python.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from stepladder.core.errors import InputError
from stepladder.tools.check.copying import copy_folder, is_left_out, walk
from stepladder.tools.check.isolation import kernel
from stepladder.tools.check.isolation.enter import Entry
from stepladder.tools.check.isolation.folders import (
    Machine,
    choose_folders,
    is_below,
    likely_paths,
    paths_in_files,
)
from stepladder.tools.check.isolation.namespace import NamespacePlan

FORCED = "STEPLADDER_CHECK_ISOLATION"  # one of MECHANISMS, for tests
MECHANISMS = ("namespace", "landlock", "audit")
OVERLAID = "-overlaid"  # ends the name of a start that is repeated with more overlays
BUILD_TIMEOUT_S = 20.0  # a file server that does not answer can hold it up
PACKAGE_ROOT = str(Path(__file__).parents[4])
LONGEST_TEMPORARY = 107 - len(
    "/pymp-12345678/listener-12345678"
)  # a Unix socket's path has at most 107 bytes


@dataclass(frozen=True)
class Written:
    """What a script wrote and removed in one folder outside of its copy, in an overlay that is
    thrown away.
    """

    folder: str
    written: tuple[str, ...]
    removed: tuple[str, ...]


@dataclass(frozen=True)
class Protected:
    """What is protected, and what is not.

    Attributes:
        scratch: The folder of this check.
        copy: The copy in which the script runs.
        original: The folder that it is a copy of.
        args: The arguments of the script, which may name folders.
        writes: Folders that may be written for real.
        also: Further paths outside that the script writes.
    """

    scratch: Path
    copy: Path
    original: Path
    args: tuple[str, ...] = ()
    writes: tuple[Path, ...] = ()
    also: tuple[str, ...] = ()


class Sandbox:
    """Where the ranks of one start of the script run: in a fresh copy, kept from all other files.

    Attributes:
        protected: What is protected, and the copy.
        mechanism: One of MECHANISMS.
        descriptors: Of the namespaces, which processes enter by them.
        upper_layers: Of each folder that has an overlay, where what is written there lies.
        earlier: What was written in a sandbox that this one took the place of, and that counts.
    """

    def __init__(self, protected: Protected) -> None:
        """Copy the working folder, and take the strongest mechanism that this kernel allows."""
        self.protected = protected
        self.mechanism = ""
        self.descriptors: tuple[int, ...] = ()
        self.upper_layers: dict[str, str] = {}
        self.earlier: list[Written] = []
        self.open()

    def open(self) -> None:
        protected = self.protected
        copy_folder(protected.original, protected.copy, protected.writes)
        forced = os.environ.get(FORCED, "")
        namespace = open_namespace(protected) if forced in ("", "namespace") else None
        if namespace is not None:
            self.mechanism = "namespace"
            self.descriptors, self.upper_layers = namespace
            return
        if forced == "namespace":
            raise InputError(
                f"{FORCED}=namespace: this kernel allows no mount namespace", f"unset {FORCED}"
            )
        link_writes(protected)
        has_landlock = forced in ("", "landlock") and kernel.landlock_abi() > 0
        self.mechanism = "landlock" if has_landlock else "audit"

    def move_to(self, copy: Path, also: Iterable[str] = (), keeps_written: bool = False) -> None:
        """Begin again in a fresh copy, with nothing of what was written outside.

        Args:
            copy: Where the new copy shall lie.
            also: Further paths outside that the script writes.
            keeps_written: Whether the report shall name what was written so far.
        """
        self.earlier += self.read_written() if keeps_written else []
        self.close()
        self.protected = replace(self.protected, copy=copy, also=(*self.protected.also, *also))
        self.open()

    def can_cover(self, paths: Iterable[str]) -> bool:
        """Return whether overlays can be laid over folders of these paths that have none."""
        if self.mechanism != "namespace":
            return False
        machine = Machine(os.geteuid(), tuple(kernel.read_mounts()))
        return any(folder not in self.upper_layers for folder in choose_folders(paths, machine))

    @property
    def writable(self) -> tuple[str, ...]:
        """The folders that the ranks may write for real."""
        real = (self.protected.scratch, *self.protected.writes)
        return tuple(str(folder.resolve()) for folder in real)

    def command(self, command: Sequence[str], folder: Path | None = None) -> list[str]:
        """Return the command that runs the given one within the sandbox, in the folder (the copy)."""
        entry = Entry(
            self.mechanism, list(command), str(folder or self.protected.copy), os.getpid()
        )
        entry.descriptors = list(self.descriptors)
        entry.writable = list(self.writable)
        return program("enter", entry.as_text())

    def variables(self) -> dict[str, str]:
        """Return what the ranks' environment needs: a temporary folder that they can write."""
        temporary = os.path.realpath(tempfile.gettempdir())
        if any(is_below(temporary, [folder]) for folder in (*self.upper_layers, *self.writable)):
            return {}
        own = self.protected.scratch / "tmp"
        if len(os.fsencode(own)) > LONGEST_TEMPORARY:
            return {}
        own.mkdir(exist_ok=True)
        caches = {
            "TRITON_CACHE_DIR": "triton",
            "NUMBA_CACHE_DIR": "numba",
            "MPLCONFIGDIR": "matplotlib",
        }
        unset = {
            name: str(own / folder) for name, folder in caches.items() if name not in os.environ
        }
        return {"TMPDIR": str(own), **unset}

    def read_written(self) -> list[Written]:
        """Return what was written outside so far; nothing where there are no overlays."""
        if not self.upper_layers:
            return []
        command = self.command(program("written", json.dumps(self.upper_layers)), Path("/"))
        listed = subprocess.run(
            command, pass_fds=self.descriptors, capture_output=True, check=False
        )
        if listed.returncode != 0:
            return []
        return [
            Written(folder, tuple(new), tuple(gone))
            for folder, new, gone in json.loads(listed.stdout)
        ]

    def close(self) -> None:
        """Let the namespace go, with its overlays."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = ()
        self.upper_layers = {}


def program(module: str, text: str) -> list[str]:
    """Return a command that runs a module of this folder in a bare interpreter."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); import importlib; importlib.import_module(sys.argv[2])"
    name = f"stepladder.tools.check.isolation.{module}"
    return [
        sys.executable,
        "-I",
        "-S",
        "-B",
        "-c",
        f"{code}.main(sys.argv[3])",
        PACKAGE_ROOT,
        name,
        text,
    ]


def open_namespace(protected: Protected) -> tuple[tuple[int, ...], dict[str, str]] | None:
    """Return the descriptors of a mount namespace and its upper layers; nothing where the kernel
    allows none.
    """
    here, there = socket.socketpair()
    with here, there:
        here.settimeout(BUILD_TIMEOUT_S)
        builder = subprocess.Popen(
            program("namespace", str(there.fileno())),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[there.fileno()],
        )
        there.close()
        try:
            builder.communicate(plan_of(protected).as_text().encode(), BUILD_TIMEOUT_S)
            message, descriptors, _, _ = socket.recv_fds(here, 1 << 20, 2)
        except (OSError, subprocess.TimeoutExpired):
            return None
        finally:
            builder.kill()
            builder.wait()
    answer = json.loads(message or b"{}")
    if not descriptors:
        return None
    make_removable(protected.scratch)
    return tuple(descriptors), answer["upper_layers"]


def plan_of(protected: Protected) -> NamespacePlan:
    mounts = tuple(kernel.read_mounts())
    machine = Machine(os.geteuid(), mounts)
    links = []
    files = []
    for _, links_here, files_here in walk(protected.original):
        links += [str(link.resolve()) for link in links_here]
        files += files_here
    paths = [
        *protected.also,
        *links,
        *paths_in_files(files),
        *likely_paths(protected.original, protected.args, mounts),
    ]
    layers = Path(tempfile.mkdtemp(prefix="layers-", dir=protected.scratch))
    plan = NamespacePlan(
        str(protected.scratch), str(layers), str(protected.copy), str(protected.original)
    )
    return replace(
        plan,
        overlays=choose_folders(paths, machine),
        kept=list(kept_folders(protected.original)),
        writes=[str(folder.resolve()) for folder in protected.writes],
    )


def link_writes(protected: Protected) -> None:
    """Let the copy lead to the folders in it that are written for real."""
    for folder in protected.writes:
        if folder.is_relative_to(protected.original) and folder != protected.original:
            in_copy = protected.copy / folder.relative_to(protected.original)
            if in_copy.is_dir():  # and not one within another that is written
                in_copy.rmdir()
                in_copy.symlink_to(folder)


def kept_folders(original: Path) -> Iterable[str]:
    """Yield what the copy lacks: the interpreter may lie in a virtual environment there."""
    for folder in sorted(original.iterdir()):
        if folder.is_dir() and is_left_out(folder) and folder.name != "__pycache__":
            yield str(folder)


def make_removable(scratch: Path) -> None:
    """Let the folders in which overlays work be removed: Linux makes them with mode 0."""
    for work in (layer / "work" for layer in scratch.glob("layers-*/*/work")):
        with suppress(OSError):
            work.chmod(0o700)
