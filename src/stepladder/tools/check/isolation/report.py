"""What the check says of files outside the copy: which mechanism kept them, what was written, what
refused.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from stepladder.tools.check.failure import NotChecked
from stepladder.tools.check.isolation.sandbox import OVERLAID, Sandbox, Written
from stepladder.tools.check.recording import Event, lines_of

MECHANISM_TEXTS = {
    "namespace": "a read-only mount namespace keeps them as they are",
    "landlock": "Landlock keeps them as they are; it does not stop chmod, chown and utime by other programs",
    "audit": "audit events of Python keep them as they are; they do not see what a library in C writes",
}
REFUSALS = (
    "stepladder check changes nothing there",
    "no kernel keeps it from that here",
)  # as guard.py says it
READ_ONLY = os.strerror(errno.EROFS)  # as a program in C says it
MOST_FOLDERS, MOST_NAMES = 8, 4


@dataclass(frozen=True)
class Isolation:
    """The mechanism of this run, and what the script tried outside of its copy.

    Attributes:
        mechanism: One of sandbox.MECHANISMS.
        written: What landed in overlays.
        refused: Paths whose change was refused.
        refused_programs: Programs, and functions of C, that were not started.
    """

    mechanism: str
    written: tuple[Written, ...]
    refused: tuple[str, ...]
    refused_programs: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """Return a line for the mechanism, and one for each folder that the script tried to change."""
        found = [f"files outside the copy: {MECHANISM_TEXTS[self.mechanism]}"]
        found += [self.line_of(one) for one in self.written[:MOST_FOLDERS]]
        if len(self.written) > MOST_FOLDERS:
            found.append(f"  and in {len(self.written) - MOST_FOLDERS} folders more")
        for path in self.refused[:MOST_FOLDERS]:
            found.append(
                f"  refused: {path}  HINT: stepladder check --writes {Path(path).parent} ..."
            )
        if self.refused_programs:
            found.append(f"  refused to start: {names_of(self.refused_programs)}")
        return found

    def explains(self, output: str) -> bool:
        """Return whether a script that failed with this output may have done so because a change
        was refused.
        """
        return any(text in output for text in (READ_ONLY, *REFUSALS))

    def line_of(self, one: Written) -> str:
        parts = [("written", one.written), ("removed", one.removed)]
        texts = [f"{verb} {names_of(names)}" for verb, names in parts if names]
        return f"  in {one.folder}, for the script only: {'; '.join(texts)}"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def names_of(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" * (len(names) > MOST_NAMES)
    return ", ".join(names[:MOST_NAMES]) + more


def describe(sandbox: Sandbox) -> Isolation:
    """Return what is to be said of files outside, while the sandbox is open."""
    merged: dict[str, Written] = {}
    for one in (*sandbox.earlier, *sandbox.read_written()):
        before = merged.get(one.folder, Written(one.folder, (), ()))
        written = sorted({*before.written, *one.written})
        removed = sorted({*before.removed, *one.removed})
        merged[one.folder] = Written(one.folder, tuple(written), tuple(removed))
    refused = set()
    programs = set()
    for event in events_of_last_starts(sandbox.protected.scratch / "recordings"):
        if event["k"] == "refused":
            refused.add(event["path"])
        if event["k"] == "refused_program":
            programs.add(event["name"])
    changes = tuple(merged[name] for name in sorted(merged))
    return Isolation(sandbox.mechanism, changes, tuple(sorted(refused)), tuple(sorted(programs)))


def events_of_last_starts(recordings: Path) -> Iterator[Event]:
    """Yield the events of all starts, but for those that were repeated with more overlays."""
    for folder in recordings.iterdir():
        if not folder.with_name(f"{folder.name}{OVERLAID}").exists():
            for path in folder.glob("*.jsonl"):
                yield from lines_of(path)


def blame_refusal(why: NotChecked | None, isolation: Isolation) -> NotChecked | None:
    """Return why the script was not checked: where a change was refused, the script is not at
    fault.
    """
    if why is None or why.cause != "script" or not isolation.explains(why.output):
        return why
    return replace(
        why,
        cause="check",
        line="the script failed, as above, where a change outside the copy was refused",
    )
