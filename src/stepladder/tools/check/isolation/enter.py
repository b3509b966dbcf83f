"""Entering the sandbox: a process does this before it becomes a rank of the script.

`main` runs in `python -I -S`. A function that runs between fork and exec in the launcher could do
the same, but not safely in a process with threads.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass

from stepladder.tools.check.isolation import kernel


@dataclass(frozen=True)
class Entry:
    """How a process enters the sandbox.

    Args:
        mechanism: What protects the files outside.
        command: The command to execute in the sandbox.
        folder: The working folder of the command.
        parent: The process that starts it.
        descriptors: The namespaces to enter.
        writable: The folders that Landlock lets it write.
    """

    mechanism: str
    command: list[str]
    folder: str
    parent: int
    descriptors: list[int]
    writable: list[str]

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def main(text: str) -> None:
    entry = Entry(**json.loads(text))
    enter(entry)
    os.execv(entry.command[0], entry.command)


def enter(entry: Entry) -> None:
    """Enter the sandbox, in a process without threads."""
    if entry.mechanism == "namespace":
        enter_namespace(entry.descriptors)
    elif entry.mechanism == "landlock":
        kernel.restrict_writes(entry.writable)
    os.chdir(entry.folder)
    kernel.die_with_parent(entry.parent)


def enter_namespace(descriptors: list[int]) -> None:
    """Enter the mount namespace of the first descriptor.

    A second descriptor is of a user namespace, which has to be entered before.
    """
    mounts, *users = descriptors
    for descriptor in users:
        kernel.set_namespace(descriptor, kernel.CLONE_NEWUSER)
    kernel.set_namespace(mounts, kernel.CLONE_NEWNS)
    for descriptor in descriptors:
        os.close(descriptor)
    kernel.drop_capabilities()
