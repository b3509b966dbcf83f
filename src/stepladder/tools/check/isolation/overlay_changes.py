"""The changes that a script has made outside of its copy: the files in the overlays' upper layers.

Runs in `python -I -S` within the namespace, where layers in memory can be read.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator


def main(text: str) -> None:
    """Print the changes in all overlays as JSON.

    Args:
        text: The upper layer of each folder, as JSON.
    """
    upper_layers: dict[str, str] = json.loads(text)
    changes: list[tuple[str, list[str], list[str]]] = []
    for folder, upper in upper_layers.items():
        changes += walk(folder, upper)
    print(json.dumps(changes))


def walk(folder: str, upper: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield each folder with changes, the names that were written, and those that were removed."""
    for path, folders, files in os.walk(upper):
        written = []
        removed = []
        for name in files:
            if is_whiteout(os.path.join(path, name)):
                removed.append(name)
            else:
                written.append(name)
        for name in folders:
            content = os.listdir(os.path.join(path, name))
            if not content:
                written.append(name)
        if written or removed:
            changed_folder = folder + path.removeprefix(upper)
            written.sort()
            removed.sort()
            yield os.path.normpath(changed_folder), written, removed


def is_whiteout(path: str) -> bool:
    """Return whether a file marks a removed file of the lower layer."""
    status = os.lstat(path)
    is_device = stat.S_ISCHR(status.st_mode)
    return is_device and status.st_rdev == 0
