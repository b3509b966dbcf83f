"""Errors of a file system, planted in this process: what is done with files of one name fails for a
while.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from pathlib import Path

EVENTS = {"open", "os.rename", "os.mkdir", "os.truncate", "os.listdir", "os.scandir"}


class Fault:
    """An error for files whose path holds a text. count: so often; None: for ever.  first: uses
    that go well.
    """

    def __init__(self) -> None:
        self.text = ""
        self.number = 0
        self.left: int | None = 0
        self.well = 0

    def plant(self, text: str, number: int, count: int | None = None, first: int = 0) -> None:
        self.text, self.number, self.left, self.well = text, number, count, first

    def end(self) -> None:
        self.left = 0

    def fail_if_matching(self, path: object, names_it: bool = True) -> None:
        """Fail as the kernel would. names_it: as of what is opened; a write's error names no file."""
        if self.left == 0 or not isinstance(path, str | bytes | os.PathLike):
            return
        place = os.fsdecode(path)
        if self.text in place and not place.startswith("/proc/"):
            if self.well > 0:
                self.well -= 1
                return
            if self.left is not None:
                self.left -= 1
            raise OSError(self.number, os.strerror(self.number), *([place] if names_it else []))


FAULT = Fault()
is_hooked: list[bool] = []  # no hook is ever removed


def hook(event: str, args: tuple[object, ...]) -> None:
    if FAULT.left != 0 and event in EVENTS:
        for path in args[:2]:
            FAULT.fail_if_matching(path)


def meet_open(number: int) -> None:
    """Fail at an open file, whose errors name none."""
    if FAULT.left != 0:
        link = Path(f"/proc/self/fd/{number}")
        FAULT.fail_if_matching(link.readlink() if link.is_symlink() else None, names_it=False)


def by_number(function):
    """A function of os that is called with a file's number first."""

    def call(number, *args):
        meet_open(number)
        return function(number, *args)

    return call


class FaultyFile(io.FileIO):
    """What Python's own files write to."""

    def write(self, data):
        meet_open(self.fileno())
        return super().write(data)


def faulty(open_plainly):
    """`open` or `os.fdopen`, whose files fail."""

    def call(
        file, mode="r", buffering=-1, encoding=None, errors=None, newline=None, *more, **options
    ):
        if set(mode).isdisjoint("wax") or more or options:
            return open_plainly(file, mode, buffering, encoding, errors, newline, *more, **options)
        raw = FaultyFile(file, mode.replace("b", "").replace("t", ""))
        if buffering == 0:
            return raw
        buffered = io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding, errors, newline)

    return call


def install(replace=setattr) -> None:
    """Before a file is opened that is to fail. replace: as setattr, or what is undone later."""
    if not is_hooked:
        sys.addaudithook(hook)
        is_hooked.append(True)
    for name in ("write", "pwrite", "fsync", "ftruncate", "pread"):
        replace(os, name, by_number(getattr(os, name)))
    replace(os, "fdopen", faulty(os.fdopen))
    replace(io, "open", faulty(io.open))


def from_text(text: str) -> tuple[str, int]:
    """`metrics.jsonl ESTALE`."""
    place, name = text.split()
    return place, getattr(errno, name)
