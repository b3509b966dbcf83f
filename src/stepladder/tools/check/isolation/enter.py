"""What each rank is before it is the script: it enters the sandbox, and executes the rank's command
in its place.

Runs in `python -I -S`. A function that runs between fork and exec in the launcher could do the
same, but not safely in a process with threads."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field

from stepladder.tools.check.isolation import kernel


@dataclass
class Entry:
    """How a process enters. parent: who starts it.  writable: the folders, for Landlock."""

    mechanism: str
    command: list[str]
    folder: str
    parent: int
    descriptors: list[int] = field(default_factory=list)
    writable: list[str] = field(default_factory=list)

    def as_text(self) -> str:
        return json.dumps(asdict(self))


def main(text: str) -> None:
    entry = Entry(**json.loads(text))
    if entry.mechanism == "namespace":
        enter_namespace(entry.descriptors)
    elif entry.mechanism == "landlock":
        kernel.restrict_writes(entry.writable)
    os.chdir(entry.folder)
    kernel.die_with_parent(entry.parent)
    os.execv(entry.command[0], entry.command)


def enter_namespace(descriptors: list[int]) -> None:
    """Enter the mount namespace of the first descriptor, after the user namespace of the second, if
    any.
    """
    mounts, *users = descriptors
    for descriptor in users:
        kernel.set_namespace(descriptor, kernel.CLONE_NEWUSER)
    kernel.set_namespace(mounts, kernel.CLONE_NEWNS)
    for descriptor in descriptors:
        os.close(descriptor)
    kernel.drop_capabilities()
