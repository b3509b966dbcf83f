"""Files of JSON lines that grow: one way to append, one way to read.

A kill or a full disk leaves half a last line. Who appends begins a line of its own; who reads
leaves out what is not an object as it was written, and can say which lines those were."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from stepladder.core.errors import InputError, one_line
from stepladder.core.numbers import MOST
from stepladder.core.own_file import open_own
from stepladder.core.stored import fit, opened

Line = dict[str, Any]
LARGEST = 1e300  # of a number: sums of such ones stay finite
BLOCK = 1 << 20  # bytes that are read at a time; a longer line is none of ours


def is_whole(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MOST


def is_number(value: Any) -> bool:
    """Finite, and no more than a double can take."""
    return type(value) in (int, float) and -LARGEST < value < LARGEST


def is_time(value: Any) -> bool:
    """Whether it is a Unix time that has a date."""
    return is_number(value) and 0 <= value < 1e11


def open_to_append(path: Path) -> int:
    """A file descriptor whose writes go to the end, behind a line's end. Raises OSError, also for a
    link.
    """
    file = open_own(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
    if (size := os.fstat(file).st_size) and os.pread(file, 1, size - 1) != b"\n":
        os.write(file, b"\n")
    return file


def append(path: Path, line: Line) -> None:
    """One line more, in one piece. Raises OSError."""
    file = open_to_append(path)
    try:
        os.write(file, f"{json.dumps(line)}\n".encode())
    finally:
        os.close(file)


class Lines:
    """The lines of a file, which may come about and grow: `new` gives those since it was last
    asked.

    sound: whether an object is as it was written. damaged: how many lines were left out, and the
    first one's number.  torn: whether the last one has no end."""

    def __init__(self, path: Path, sound: Callable[[Line], bool] = lambda _: True) -> None:
        self.path, self.sound = path, sound
        self._begin(None)

    def _begin(self, file: tuple[int, int] | None) -> None:
        self.file, self.offset, self.number = file, 0, 0
        self.damaged, self.first, self.torn = 0, 0, False

    def was_replaced(self) -> bool:
        """Whether there is another file now, or a shorter one: then `new` begins at its first line."""
        try:
            about = self.path.stat()
        except OSError:
            return False
        if self.file is None or (
            self.file == (about.st_dev, about.st_ino) and about.st_size >= self.offset
        ):
            return False
        self._begin(None)
        return True

    def new(self) -> Iterator[Line]:
        """Raises InputError where what has the file's name cannot be read."""
        try:
            with opened(self.path) as file:
                about = os.fstat(file.fileno())
                self.file = about.st_dev, about.st_ino
                for block in self._blocks(file):
                    yield from self._objects(block)
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise InputError(
                f"{self.path} cannot be read: {one_line(str(reason))}",
                f"mv {self.path} {self.path}.damaged",
            ) from error

    def _blocks(self, file: BinaryIO) -> Iterator[bytes]:
        """Whole lines, many at a time."""
        file.seek(self.offset)
        while data := file.read(BLOCK):
            whole, end, rest = data.rpartition(b"\n")
            self.torn = bool(rest)
            if not end:
                if len(data) == BLOCK:
                    raise ValueError(f"line {self.number + 1} is longer than {BLOCK >> 20} MiB")
                return
            self.offset += len(whole) + 1
            file.seek(self.offset)
            yield whole

    def _objects(self, block: bytes) -> Iterator[Line]:
        texts = block.decode(errors="replace").split("\n")
        for value in parsed(texts):
            self.number += 1
            if type(value) is dict and self.sound(value):
                yield value
            else:
                self.damaged += 1
                self.first = self.first or self.number

    def told(self, is_growing: bool = False) -> Iterator[str]:
        """What is to be said of lines that were left out. is_growing: the last one may be half
        written.
        """
        if self.damaged:
            more = f" and {self.damaged - 1} more" if self.damaged > 1 else ""
            yield f"line {self.first}{more} of {self.path} is damaged, and left out"
        if self.torn and not is_growing:
            yield f"the last line of {self.path} is half a line, and left out"


def last_lines(path: Path, most: int = BLOCK) -> list[Line]:
    """The whole objects among the last `most` bytes; nothing where no file can be read."""
    try:
        with opened(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - most))
            texts = file.read(most).decode(errors="replace").split("\n")[:-1]
    except (OSError, ValueError):
        return []
    return [value for value in parsed(texts) if isinstance(value, dict)]


def fits(line: Line, kind: type) -> bool:
    """Whether a line is one of the dataclass `kind`, see core/stored.py."""
    try:
        fit(line, kind)
    except ValueError:
        return False
    return True


def parsed(texts: list[str]) -> list[Any]:
    """Each text's value, None for one that is no JSON. All at once where all are well: in half the
    time.
    """
    try:
        values: list[Any] = json.loads(f"[{','.join(texts)}]")
        if len(values) == len(texts):
            return values
    except (ValueError, RecursionError):
        pass
    return [value_of(text) for text in texts]


def value_of(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
