"""One file of JSON lines per process, written line by line, so that a rank that hangs has said
where.

Imports no torch: an interpreter that never needs it stays as fast as it was.
"""

from __future__ import annotations

import json
import os
import sys
from types import FrameType
from typing import Any

from stepladder.tools.check.settings import CHECK, RANK_TEXT, ProbeSettings

OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100,PTH120  # pathlib is slow to import


class ProbeLog:
    """This process's recording. rank and world: as far as it is known, from the environment or the
    group.
    """

    def __init__(self, settings: ProbeSettings) -> None:
        self.settings = settings
        self.roots = tuple(
            root + os.sep for root in settings.roots
        )  # else /me/train-data is below /me/train
        self.rank, self.world = (int(os.environ.get(name, -1)) for name in RANK_TEXT)
        self.worker = -1  # of a data loader
        self.parent = 0
        self.stopped = False
        self.open()

    def open(self) -> None:
        self.pid, self.count = os.getpid(), 0
        path = f"{self.settings.folder}/{self.pid}.jsonl"
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self.write(
            "start", rank=self.rank, world=self.world, parent=self.parent, worker=self.worker
        )

    def forked(self) -> None:
        self.parent = self.pid
        os.close(self.file)
        self.open()

    def write(self, kind: str, **fields: Any) -> None:
        self.count += 1
        line = json.dumps({"k": kind, "n": self.count, **fields}, default=str) + "\n"
        os.write(self.file, line.encode(errors="backslashreplace"))

    def at(self, kind: str, **fields: Any) -> None:
        """The same with the user's line that this comes from."""
        self.write(kind, at=self.where(), **fields)

    def where(self) -> list[Any] | None:
        """File, line and function of the innermost frame that is the user's own."""
        frame = self.frame()
        return [frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name] if frame else None

    def stack(self) -> str:
        """The user's lines that this comes from, from the outermost on: one text for each way to a
        place.
        """
        found: list[str] = []
        frame = self.frame()
        while frame is not None and len(found) < 12:
            if self.is_users(frame.f_code.co_filename):
                found.append(f"{frame.f_code.co_name}:{frame.f_lineno}")
            frame = frame.f_back
        return " < ".join(found)

    def frame(self) -> FrameType | None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and not self.is_users(frame.f_code.co_filename):
            frame = frame.f_back
        return frame

    def direct(self) -> bool:
        """Whether the user's own code called the function that calls this, and no library."""
        caller = sys._getframe(2)
        while caller.f_back is not None and caller.f_code.co_filename.startswith(OWN):
            caller = caller.f_back
        return self.is_users(caller.f_code.co_filename)

    def is_users(self, name: str) -> bool:
        if not name.startswith(self.roots):
            return False
        return "site-packages" not in name and not name.startswith(OWN)


recorder: ProbeLog | None = None


def begin() -> None:
    """At the interpreter's start, where the environment asks for it."""
    global recorder
    if recorder is None and CHECK in os.environ:
        recorder = ProbeLog(ProbeSettings.of_environment())
        os.register_at_fork(after_in_child=recorder.forked)


def here() -> ProbeLog:
    if recorder is None:
        begin()
    assert recorder is not None
    return recorder
