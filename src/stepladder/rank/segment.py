"""Memory that the ranks of one machine share: made by their launcher before they start, mapped by
each of them.

It has no name that others could open, and goes with the last process that has it.
"""

from __future__ import annotations

import mmap
import os
import platform
import sys
from contextlib import suppress

from stepladder.rank.open_file import OpenFile

MOST_PLACES = 8  # each rank reads what all bring: with more of them a ring moves less
WORDS_PER_PLACE = 64  # of 8 bytes: no two ranks write to one line of a cache
HALF_BYTES = 1 << 19  # of a place's two halves, which are used in turn
ROOM_BYTES = 1 << 34  # of a place, for vectors that stay; memory is taken by what is written
ROOM = 8 * WORDS_PER_PLACE + 2 * HALF_BYTES  # where in a place it begins
PLACE_BYTES = ROOM + ROOM_BYTES


def can_share(places: int) -> bool:
    """Whether so many ranks of one machine share memory.

    On processors other than x86-64 a number may be seen before the data that it announces.
    """
    return sys.platform == "linux" and platform.machine() == "x86_64" and 1 < places <= MOST_PLACES


def new_segment(places: int) -> OpenFile | None:
    """Make a file as large as `places` ranks need; only what is written to takes memory.

    None where ranks had better go another way, or this machine has no such memory.
    """
    if not can_share(places):
        return None
    with suppress(OSError):
        segment = OpenFile(os.memfd_create("stepladder"))
        try:
            os.ftruncate(segment.number, places * PLACE_BYTES)
        except OSError:  # a limit for files, which counts what is not written too
            segment.close()
            return None
        return segment
    return None


_mapped: list[mmap.mmap] = []  # this rank's, if a launcher of ours has made one


def map_segment(segment: OpenFile | None) -> None:
    """Called in a rank, with what its launcher gave it."""
    _mapped.clear()
    if segment is not None:
        with suppress(OSError):  # a sandbox, which has no pidfd
            os.close(os.pidfd_open(os.getpid()))
            _mapped.append(mmap.mmap(segment.number, 0))
        segment.close()


def mapped() -> mmap.mmap | None:
    """This rank's, where a launcher of ours has made one."""
    return _mapped[0] if _mapped else None
