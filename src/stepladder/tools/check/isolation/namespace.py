"""The mount namespace of the ranks: everything is read-only, except for what a plan names.

Runs in `python -I -S`, in a process of its own that ends when the namespace is made. The launcher
keeps the namespace by its descriptors, and all ranks enter the same one: two overlays may not share
an upper layer.
"""

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


@dataclass(frozen=True)
class NamespacePlan:
    """The plan of a namespace.

    Args:
        scratch: The folder of this check, which stays writable.
        layers: A folder in it, for the upper layers of overlays.
        copy: The copy of the working folder.
        original: The working folder; the copy is mounted at its path.
        overlays: The folders on which overlays are mounted, parents first.
        excluded: Folders of the original that the copy lacks, such as a virtual environment.
            They are mounted in it.
        writable_folders: Folders that may be written for real.
        by_remount: See `kernel.set_readonly_everywhere`.
    """

    scratch: str
    layers: str
    copy: str
    original: str
    overlays: list[str] = field(default_factory=list)
    excluded: list[str] = field(default_factory=list)
    writable_folders: list[str] = field(default_factory=list)
    by_remount: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def main(descriptor: str) -> None:
    """Make a namespace by the plan on standard input, and send it over a socket.

    Args:
        descriptor: The descriptor of the socket. It gets the upper layers, and the descriptors of
            the namespaces; or the error.
    """
    channel = socket.socket(fileno=int(descriptor))
    try:
        plan = NamespacePlan(**json.load(sys.stdin))
        has_user_namespace = enter_new_namespaces()
        upper_layers = NamespaceBuilder(plan, has_user_namespace).build()
    except OSError as error:
        channel.sendall(json.dumps({"error": str(error)}).encode())
        return
    namespaces = [os.open("/proc/self/ns/mnt", os.O_RDONLY)]
    if has_user_namespace:
        namespaces.append(os.open("/proc/self/ns/user", os.O_RDONLY))
    socket.send_fds(channel, [json.dumps({"upper_layers": upper_layers}).encode()], namespaces)


def enter_new_namespaces() -> bool:
    """Return whether a user namespace was necessary, as it is for all users but root."""
    uid = os.geteuid()
    gid = os.getegid()
    if uid == 0:
        with suppress(OSError):  # root of a container may not
            kernel.unshare(kernel.CLONE_NEWNS)
            kernel.make_private()
            return False
    kernel.unshare(kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS)
    kernel.map_own_user(uid, gid)
    kernel.make_private()
    return True


class NamespaceBuilder:
    """Mounts what a plan names. Paths are opened before anything covers them."""

    def __init__(self, plan: NamespacePlan, has_user_namespace: bool) -> None:
        self.plan = plan
        self.has_user_namespace = has_user_namespace
        self.upper_layers: dict[str, str] = {}
        self.num_layers = 0
        self.covered_mounts = [
            mount.path
            for mount in kernel.read_mounts()
            if is_strictly_below(mount.path, plan.overlays)
        ]

    def build(self) -> dict[str, str]:
        """Mount everything, and return the upper layer of each folder that has an overlay."""
        plan = self.plan
        sources = [
            *plan.overlays,
            *plan.excluded,
            *plan.writable_folders,
            *self.covered_mounts,
            SHARED_MEMORY,
        ]
        opened = {path: open_path(path) for path in sources if os.path.exists(path)}
        kernel.set_readonly_everywhere(plan.by_remount)
        bind(open_path(plan.scratch), plan.scratch)
        kernel.set_writable(plan.scratch)
        scratch = open_path(plan.scratch)
        copy = open_path(plan.copy)
        if not self.has_user_namespace:
            hide_block_devices()
        has_overlays = self.can_mount_overlays()
        self.mount_shared_memory(opened[SHARED_MEMORY], has_overlays)
        for folder in plan.overlays if has_overlays else []:
            if folder not in opened:  # removed since the plan was made
                continue
            with suppress(OSError):
                self.mount_overlay(folder, opened[folder], self.next_layer())
                self.restore_mounts_below(folder, {**opened, plan.scratch: scratch})
        bind_in_place(copy, plan.original)
        for folder in plan.excluded:
            self.mount_excluded(folder, opened[folder], has_overlays)
        if is_strictly_below(plan.scratch, [plan.original]):
            bind_in_place(scratch, plan.scratch)
        for folder in plan.writable_folders:
            self.mount_writable(opened[folder], folder)
            if is_strictly_below(folder, [plan.original]):
                path_in_copy = plan.copy + folder.removeprefix(plan.original)
                self.mount_writable(opened[folder], path_in_copy)
        return self.upper_layers

    def next_layer(self) -> str:
        """Return a name that no overlay has had, not even one that could not be mounted."""
        self.num_layers += 1
        return f"{self.plan.layers}/{self.num_layers}"

    def mount_excluded(self, folder: str, lower: int, has_overlays: bool) -> None:
        """Mount a folder of the original that the copy lacks: with an overlay, or read-only."""
        os.makedirs(folder, exist_ok=True)
        if has_overlays:
            with suppress(OSError):
                self.mount_overlay(folder, lower, self.next_layer())
                return
        bind(lower, folder)

    def mount_writable(self, source: int, target: str) -> None:
        bind_in_place(source, target)
        kernel.set_writable(target, recursive=True)

    def can_mount_overlays(self) -> bool:
        """Try one overlay.

        If the file system of the scratch folder cannot have an upper layer, layers are in memory.
        """
        trial = tempfile.mkdtemp(prefix="trial-", dir=self.plan.scratch)
        for in_memory in (False, True):
            with suppress(OSError):
                if in_memory:
                    kernel.mount("tmpfs", self.plan.layers, "tmpfs", 0, "mode=0700")
                self.mount_overlay(trial, open_path(trial), f"{self.plan.layers}/trial")
                kernel.unmount(trial)
                del self.upper_layers[trial]
                return True
        return False

    def mount_overlay(self, folder: str, lower: int, layer: str) -> None:
        upper, work = make_layer(layer, lower)
        options = f"lowerdir={path_of(lower)},upperdir={path_of(upper)},workdir={path_of(work)}"
        if self.has_user_namespace:
            options += ",userxattr"
        kernel.mount("overlay", folder, "overlay", 0, options)
        self.upper_layers[folder] = f"{layer}/upper"

    def mount_shared_memory(self, lower: int, has_overlays: bool) -> None:
        """Give the ranks a writable /dev/shm, in which the machine's files can be read."""
        memory = tempfile.mkdtemp(prefix="memory-", dir=self.plan.scratch)
        kernel.mount("tmpfs", memory, "tmpfs", 0, "mode=0700")
        if has_overlays:
            self.mount_overlay(SHARED_MEMORY, lower, f"{memory}/layer")
        else:
            kernel.mount("tmpfs", SHARED_MEMORY, "tmpfs", 0, "mode=1777")

    def restore_mounts_below(self, folder: str, opened: dict[str, int]) -> None:
        """Mount again, read-only, what the overlay of a folder has covered."""
        for path in [*self.covered_mounts, self.plan.scratch]:
            if is_strictly_below(path, [folder]):
                with suppress(OSError):
                    bind(opened[path], path)


def hide_block_devices() -> None:
    """Cover the block devices: root can write to a disk although its file systems are read-only."""
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
    """Make the upper folder and the work folder of an overlay, and return their descriptors.

    The upper folder has the owner, the mode and the times of the lower one.
    """
    upper = f"{layer}/upper"
    work = f"{layer}/work"
    for folder in (layer, upper, work):
        os.mkdir(folder)
    status = os.stat(path_of(lower))
    with suppress(OSError):
        os.chown(upper, status.st_uid, status.st_gid)
    os.chmod(upper, stat.S_IMODE(status.st_mode))
    os.utime(upper, ns=(status.st_atime_ns, status.st_mtime_ns))
    return open_path(upper), open_path(work)


def open_path(path: str) -> int:
    return os.open(path, os.O_PATH)


def path_of(descriptor: int) -> str:
    """Return a path without colons and commas, which is valid even where something covers it."""
    return f"/proc/self/fd/{descriptor}"


def bind(source: int, target: str) -> None:
    kernel.mount(path_of(source), target, None, kernel.MS_BIND | kernel.MS_REC)


def bind_in_place(source: int, target: str) -> None:
    """Bind a folder to its own path, which the copy of a folder above may lack."""
    os.makedirs(target, exist_ok=True)
    bind(source, target)
