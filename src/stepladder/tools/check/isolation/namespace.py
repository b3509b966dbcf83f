"""Make the mount namespace of the ranks: everything read-only, but for what a plan names.

Runs in `python -I -S`, in a process of its own that ends when the namespace is made. The launcher
holds the namespace by its descriptors, and all ranks enter the same one: two overlays may not share
an upper layer."""

from __future__ import annotations

import json
import os
import socket
import stat
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass, field

from stepladder.tools.check.isolation import kernel

SHARED_MEMORY = "/dev/shm"


@dataclass
class NamespacePlan:
    """What the namespace holds.

    Attributes:
        scratch: The folder of this check, which stays writable.
        layers: A folder in it, for the upper layers of overlays.
        overlays: Folders to lay overlays over, parents first.
        copy: The copy of the working folder.
        original: The working folder, at whose path the copy is shown.
        kept: Folders of the original that the copy lacks, and that are shown in it: a virtual
        environment.
        writes: Folders that may be written for real.
        by_remount: See `kernel.set_readonly_everywhere`."""

    scratch: str
    layers: str
    copy: str
    original: str
    overlays: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    writes: list[str] = field(default_factory=list)
    by_remount: bool = False

    def as_text(self) -> str:
        return json.dumps(asdict(self))


def main(descriptor: str) -> None:
    """Make a namespace by the plan on standard input, and answer on the socket of this descriptor."""
    channel = socket.socket(fileno=int(descriptor))
    try:
        plan = NamespacePlan(**json.load(sys.stdin))
        has_users = enter_new_namespaces()
        upper_layers = Builder(plan, has_users).build()
    except OSError as error:
        channel.sendall(json.dumps({"error": str(error)}).encode())
        return
    files = [os.open("/proc/self/ns/mnt", os.O_RDONLY)]
    files += [os.open("/proc/self/ns/user", os.O_RDONLY)] if has_users else []
    socket.send_fds(channel, [json.dumps({"upper_layers": upper_layers}).encode()], files)


def enter_new_namespaces() -> bool:
    """Return whether a user namespace was necessary, as it is for all but root."""
    uid, gid = os.geteuid(), os.getegid()
    if uid == 0:
        with suppress(OSError):  # root of a container may not
            kernel.unshare(kernel.CLONE_NEWNS)
            kernel.make_private()
            return False
    kernel.unshare(kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS)
    kernel.map_own_user(uid, gid)
    kernel.make_private()
    return True


class Builder:
    """Mounts what a plan names. Paths are opened before anything covers them."""

    def __init__(self, plan: NamespacePlan, has_users: bool) -> None:
        self.plan = plan
        self.has_users = has_users
        self.upper_layers: dict[str, str] = {}
        self.mounts = [
            mount.path
            for mount in kernel.read_mounts()
            if is_strictly_below(mount.path, plan.overlays)
        ]

    def build(self) -> dict[str, str]:
        """Return the upper layer of each folder over which an overlay could be laid."""
        plan = self.plan
        sources = [*plan.overlays, *plan.kept, *plan.writes, *self.mounts, SHARED_MEMORY]
        original = {path: open_path(path) for path in sources if os.path.exists(path)}
        kernel.set_readonly_everywhere(plan.by_remount)
        bind(open_path(plan.scratch), plan.scratch)
        kernel.set_writable(plan.scratch)
        scratch = open_path(plan.scratch)
        copy = open_path(plan.copy)
        if not self.has_users:
            hide_disks()
        has_overlays = self.can_lay_overlays()
        self.lay_shared_memory(original[SHARED_MEMORY], has_overlays)
        for folder in plan.overlays if has_overlays else []:
            with suppress(OSError):
                self.lay_overlay(
                    folder, original[folder], f"{plan.layers}/{len(self.upper_layers)}"
                )
                self.show_again(folder, {**original, plan.scratch: scratch})
        show(copy, plan.original)
        for folder in plan.kept:
            self.show_kept(folder, original[folder], has_overlays)
        if is_strictly_below(plan.scratch, [plan.original]):
            show(scratch, plan.scratch)
        for folder in plan.writes:
            self.show_writable(original[folder], folder)
            if is_strictly_below(folder, [plan.original]):
                self.show_writable(original[folder], plan.copy + folder.removeprefix(plan.original))
        return self.upper_layers

    def show_kept(self, folder: str, lower: int, has_overlays: bool) -> None:
        """Show a folder of the original that the copy lacks, below the copy: with an overlay, or
        read-only.
        """
        os.makedirs(folder, exist_ok=True)
        try:
            if has_overlays:
                self.lay_overlay(folder, lower, f"{self.plan.layers}/{len(self.upper_layers)}")
        except OSError:
            has_overlays = False
        if not has_overlays:
            bind(lower, folder)

    def show_writable(self, source: int, target: str) -> None:
        show(source, target)
        kernel.set_writable(target, recursive=True)

    def can_lay_overlays(self) -> bool:
        """Try one. Where the scratch folder's file system cannot hold an upper layer, layers lie in
        memory.
        """
        trial = tempfile.mkdtemp(prefix="trial-", dir=self.plan.scratch)
        for in_memory in (False, True):
            with suppress(OSError):
                if in_memory:
                    kernel.mount("tmpfs", self.plan.layers, "tmpfs", 0, "mode=0700")
                self.lay_overlay(trial, open_path(trial), f"{self.plan.layers}/trial")
                kernel.unmount(trial)
                return self.upper_layers.pop(trial) != ""
        return False

    def lay_overlay(self, folder: str, lower: int, layer: str) -> None:
        upper, work = make_layer(layer, lower)
        options = f"lowerdir={path_of(lower)},upperdir={path_of(upper)},workdir={path_of(work)}"
        kernel.mount("overlay", folder, "overlay", 0, options + ",userxattr" * self.has_users)
        self.upper_layers[folder] = f"{layer}/upper"

    def lay_shared_memory(self, lower: int, has_overlays: bool) -> None:
        """Give the ranks a /dev/shm that they can write; what lies in the machine's own can be
        read.
        """
        memory = tempfile.mkdtemp(prefix="memory-", dir=self.plan.scratch)
        kernel.mount("tmpfs", memory, "tmpfs", 0, "mode=0700")
        if has_overlays:
            self.lay_overlay(SHARED_MEMORY, lower, f"{memory}/layer")
        else:
            kernel.mount("tmpfs", SHARED_MEMORY, "tmpfs", 0, "mode=1777")

    def show_again(self, folder: str, original: dict[str, int]) -> None:
        """Mount again what lay below the folder, read-only as it is by now: the overlay has covered
        it.
        """
        for path in [*self.mounts, self.plan.scratch]:
            if is_strictly_below(path, [folder]):
                with suppress(OSError):
                    bind(original[path], path)


def hide_disks() -> None:
    """Cover the block devices: root can write to a disk though its file systems are read-only."""
    null = open_path("/dev/null")
    for folder, _, names in os.walk("/dev"):
        for name in names:
            path = os.path.join(folder, name)
            if stat.S_ISBLK(os.lstat(path).st_mode):
                bind(null, path)
    os.close(null)


def is_strictly_below(path: str, folders: list[str]) -> bool:
    return any(path.startswith(folder.rstrip("/") + "/") for folder in folders)


def make_layer(layer: str, lower: int) -> tuple[int, int]:
    """Make the folders of an overlay, whose root shows mode and times of the lower one."""
    for name in (layer, f"{layer}/upper", f"{layer}/work"):
        os.mkdir(name)
    about = os.stat(path_of(lower))
    with suppress(OSError):
        os.chown(f"{layer}/upper", about.st_uid, about.st_gid)
    os.chmod(f"{layer}/upper", about.st_mode & 0o7777)
    os.utime(f"{layer}/upper", ns=(about.st_atime_ns, about.st_mtime_ns))
    return open_path(f"{layer}/upper"), open_path(f"{layer}/work")


def open_path(path: str) -> int:
    return os.open(path, os.O_PATH)


def path_of(descriptor: int) -> str:
    """A name without colons and commas, which leads to the file even where something covers it."""
    return f"/proc/self/fd/{descriptor}"


def bind(source: int, target: str) -> None:
    kernel.mount(path_of(source), target, None, kernel.MS_BIND | kernel.MS_REC)


def show(source: int, target: str) -> None:
    """Bind a folder to its own path, which the copy of a folder above may lack."""
    os.makedirs(target, exist_ok=True)
    bind(source, target)
