"""The summary of files outside the copy: their protection, changes in overlays, refusals."""

from __future__ import annotations

import errno
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from stepladder.tools.check.events import Refusal
from stepladder.tools.check.failure import NotChecked
from stepladder.tools.check.isolation.sandbox import OVERLAID_SUFFIX, FolderChanges, Sandbox
from stepladder.tools.check.recording import read_events
from stepladder.tools.probe.events import ProbeEvent

MECHANISM_TEXTS = {
    "namespace": "a read-only mount namespace protects them",
    "landlock": "Landlock protects them, but not from chmod, chown and utime by other programs",
    "audit": (
        "the kernel does not protect them (--unsafe); calls of Python that would change them are "
        "refused, but not those of other programs and of libraries in C"
    ),
}
# A text of the errors in guard.py.
REFUSAL_TEXT = "stepladder check changes nothing there"
# What Python and torch keep in TMPDIR themselves, under names that are new in each run.
OWN_TEMPORARY = re.compile(r"^(?:torchinductor_|pymp-|listener-|pytorch-errorfile-|torch_|tmp)")
READ_ONLY_TEXT = os.strerror(errno.EROFS)  # of a program in C
MAX_FOLDERS_SHOWN = 8
MAX_NAMES_SHOWN = 4


@dataclass(frozen=True)
class Isolation:
    """What protected the files of this run, and what the script tried outside of its copy.

    Args:
        mechanism: One of sandbox.MECHANISMS.
        written: The changes in overlays.
        refused: The paths whose change was refused.
    """

    mechanism: str
    written: tuple[FolderChanges, ...]
    refused: tuple[str, ...]

    def lines(self) -> list[str]:
        """Return a line for the mechanism, and lines for what the script tried to change."""
        lines = [f"files outside the copy: {MECHANISM_TEXTS[self.mechanism]}"]
        lines += [describe_changes(changes) for changes in self.written[:MAX_FOLDERS_SHOWN]]
        if len(self.written) > MAX_FOLDERS_SHOWN:
            lines.append(f"  and in {len(self.written) - MAX_FOLDERS_SHOWN} folders more")
        for path in self.refused[:MAX_FOLDERS_SHOWN]:
            folder = Path(path).parent
            lines.append(f"  refused: {path}  HINT: stepladder check --writes {folder} ...")
        return lines

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def describe_changes(changes: FolderChanges) -> str:
    texts = []
    if changes.written:
        texts.append(f"written {shorten_names(changes.written)}")
    if changes.removed:
        texts.append(f"removed {shorten_names(changes.removed)}")
    return f"  in {changes.folder}, for the script only: {'; '.join(texts)}"


def shorten_names(names: Sequence[str]) -> str:
    text = ", ".join(names[:MAX_NAMES_SHOWN])
    if len(names) > MAX_NAMES_SHOWN:
        text += f" and {len(names) - MAX_NAMES_SHOWN} more"
    return text


def summarize(sandbox: Sandbox) -> Isolation:
    """Return the summary of a run, while its sandbox is open."""
    refused: set[str] = set()
    for event in events_of_last_starts(sandbox.folders.scratch / "recordings"):
        if isinstance(event, Refusal):
            refused.add(event.path)
    changes = merge_changes([*sandbox.earlier_changes, *sandbox.read_changes()])
    without_own = map(drop_own_temporary, changes)
    return Isolation(
        sandbox.mechanism,
        tuple(change for change in without_own if change.written or change.removed),
        tuple(sorted(refused)),
    )


def drop_own_temporary(changes: FolderChanges) -> FolderChanges:
    """Return changes without what Python and torch keep in the temporary folder themselves."""
    folder = Path(changes.folder)
    temporary = Path(tempfile.gettempdir())
    if folder != temporary and not OWN_TEMPORARY.match(folder.name):
        return changes
    if not folder.is_relative_to(temporary):
        return changes
    written = tuple(name for name in changes.written if not OWN_TEMPORARY.match(name))
    return replace(changes, written=written)


def merge_changes(all_changes: Sequence[FolderChanges]) -> list[FolderChanges]:
    """Return changes with one entry for each folder, sorted."""
    merged: dict[str, FolderChanges] = {}
    for changes in all_changes:
        known = merged.get(changes.folder, FolderChanges(changes.folder, (), ()))
        written = sorted({*known.written, *changes.written})
        removed = sorted({*known.removed, *changes.removed})
        merged[changes.folder] = FolderChanges(changes.folder, tuple(written), tuple(removed))
    return [merged[folder] for folder in sorted(merged)]


def events_of_last_starts(recordings: Path) -> Iterator[ProbeEvent]:
    """Yield the events of all starts, except for those that were repeated with more overlays."""
    for folder in recordings.iterdir():
        if not folder.with_name(f"{folder.name}{OVERLAID_SUFFIX}").exists():
            for path in folder.glob("*.jsonl"):
                yield from read_events(path)


def blame_refusal(reason: NotChecked | None) -> NotChecked | None:
    """Return the reason, with the check at fault if the script failed because of a refusal."""
    if reason is None or reason.cause != "script":
        return reason
    if not any(text in reason.output for text in (READ_ONLY_TEXT, REFUSAL_TEXT)):
        return reason
    line = "the script failed, as above, where a change outside the copy was refused"
    return replace(reason, cause="check", line=line)
