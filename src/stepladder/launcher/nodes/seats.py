"""How many agents a launch has room for: each has a seat to itself while it lives, also while it is
cut off.

A seat is a byte of rendezvous.seats, locked by its agent: the kernel frees it with the process. No
seat is given twice: where the others go on without a node they give its seat up, and whoever comes
instead gets another one. All of it is done by one agent at a time, who holds rendezvous.lock."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Collection
from pathlib import Path

from stepladder.storage.lock import open_lock_file

NONE = -1


class Seats:
    """As one agent sees them. most: so many agents have room, 0: any number.  number: of this one's
    seat.
    """

    most, number = 0, NONE

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: int | None = None

    def clear(self) -> None:
        """For a new launch: none is given yet."""
        if self.most:
            file = open_lock_file(self.path)
            os.ftruncate(file, 0)
            os.close(file)

    def take(self, given_up: Collection[int]) -> bool:
        """Whether this agent has a seat that is not given up, by now. Raises OSError."""
        if not self.most or (self.number != NONE and self.number not in given_up):
            return True
        if self.file is None:
            self.file = open_lock_file(self.path)
        given = os.fstat(self.file).st_size
        others = [number for number in range(given) if number not in given_up]
        if sum(is_locked(self.file, number) for number in others) >= self.most:
            return False
        os.ftruncate(self.file, given + 1)
        fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, given)
        self.number = given
        return True

    def leave(self) -> None:
        if self.file is not None:
            os.close(self.file)
        self.file, self.number = None, NONE


def is_locked(file: int, number: int) -> bool:
    """Whether another process has this byte of an open file."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
    except (BlockingIOError, PermissionError):
        return True
    fcntl.lockf(file, fcntl.LOCK_UN, 1, number)
    return False
