"""What a script has written outside of its copy: the content of the overlays' upper layers.

Runs in `python -I -S` within the namespace, where layers that lie in memory can be seen.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator


def main(text: str) -> None:
    upper_layers: dict[str, str] = json.loads(text)
    print(
        json.dumps(
            [entry for folder, upper in upper_layers.items() for entry in changes(folder, upper)]
        )
    )


def changes(folder: str, upper: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield each folder with changes, the names of what was written, and the names of what was
    removed.
    """
    for place, folders, files in os.walk(upper):
        written: list[str] = []
        removed: list[str] = []
        for name in files:
            about = os.lstat(os.path.join(place, name))
            is_whiteout = stat.S_ISCHR(about.st_mode) and about.st_rdev == 0
            (removed if is_whiteout else written).append(name)
        written += [name for name in folders if not os.listdir(os.path.join(place, name))]
        if written or removed:
            yield (
                os.path.normpath(folder + place.removeprefix(upper)),
                sorted(written),
                sorted(removed),
            )
