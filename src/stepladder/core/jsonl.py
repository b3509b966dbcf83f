"""Files of JSON lines that grow: one way to append, one way to read.

A kill or a full disk leaves half a last line. A writer therefore begins a line of its own. A reader
leaves out lines that are not what a writer would have written, and can tell which lines those were.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from stepladder.core.errors import InputError, get_reason
from stepladder.core.numbers import MAX_INTEGER
from stepladder.core.safe_open import open_without_links
from stepladder.core.typed_file import convert, open_to_read

Line = dict[str, Any]
MAX_NUMBER = 1e300  # sums of such numbers stay finite
MAX_TIME = 1e11  # seconds since 1970; later times have no date
BLOCK_BYTES = 1 << 20  # read at a time; no writer makes a longer line


def is_count(value: Any) -> bool:
    """Tell whether a value is a whole number, from 0 to what a double holds exactly."""
    return type(value) is int and 0 <= value <= MAX_INTEGER


def is_finite_number(value: Any) -> bool:
    """Tell whether a value is a number whose sums stay finite."""
    return type(value) in (int, float) and -MAX_NUMBER < value < MAX_NUMBER


def is_unix_time(value: Any) -> bool:
    """Tell whether a value is a Unix time that has a date."""
    return is_finite_number(value) and 0 <= value < MAX_TIME


def open_for_append(path: Path) -> int:
    """Return a file descriptor that writes to the end of a file, after a line end.

    Raises:
        OSError: The file cannot be opened, or is a link.
    """
    file = open_without_links(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
    size = os.fstat(file).st_size
    if size and os.pread(file, 1, size - 1) != b"\n":
        os.write(file, b"\n")
    return file


def format_line(line: Line) -> str:
    """Return the text of a line, with its end.

    A number of torch or NumPy becomes a plain number. NaN and the infinities, which JSON does not
    have, become null.

    Args:
        line: The values, by name.

    Raises:
        TypeError: A value is none that JSON has.
        ValueError: A NaN or an infinity is in a list or an object within the line.
    """
    values = {name: _to_json_value(value) for name, value in line.items()}
    return json.dumps(values, allow_nan=False) + "\n"


def _to_json_value(value: Any) -> Any:
    """Return a plain number for a number of torch or NumPy; None for NaN and the infinities."""
    plain = value.item() if hasattr(value, "item") else value
    return None if isinstance(plain, float) and not math.isfinite(plain) else plain


def append_record(path: Path, line: Line) -> None:
    """Append a line in one write.

    Raises:
        OSError: The file cannot be written.
    """
    file = open_for_append(path)
    try:
        os.write(file, format_line(line).encode())
    finally:
        os.close(file)


class JsonlReader:
    """Reads the lines of a file that may not exist yet, and may grow.

    Args:
        path: The file.
        is_valid: Tells whether an object is as a writer would have written it.
        is_strict: Whether a damaged line is an error, instead of being left out. Half a last line
            is none.
    """

    def __init__(
        self, path: Path, is_valid: Callable[[Line], bool] = lambda _: True, is_strict: bool = False
    ) -> None:
        self.path = path
        self.is_valid = is_valid
        self.is_strict = is_strict
        # How many lines were left out.
        self.damaged_lines = 0
        # The number of the first of them, from 1; 0 if there is none.
        self.first_damaged = 0
        # Whether the last line has no end.
        self.is_torn = False
        self._file_id: tuple[int, int] | None = None  # device and inode
        self._offset = 0  # bytes read
        self._line_number = 0

    def restart_if_replaced(self) -> bool:
        """Start at the first line again if the file was replaced or cut; tell whether it was."""
        try:
            status = self.path.stat()
        except OSError:
            return False
        is_same_file = self._file_id == (status.st_dev, status.st_ino)
        if self._file_id is None or (is_same_file and status.st_size >= self._offset):
            return False
        self.damaged_lines = 0
        self.first_damaged = 0
        self.is_torn = False
        self._file_id = None
        self._offset = 0
        self._line_number = 0
        return True

    def read_joined(self, key: str) -> dict[Any, Line]:
        """Return the new lines by the value that each has for a key; those of one value as one."""
        joined: dict[Any, Line] = {}
        for line in self.read_new():
            joined.setdefault(line.pop(key), {}).update(line)
        return joined

    def read_new(self) -> Iterator[Line]:
        """Yield the valid lines that were added since the last call; none without the file.

        Raises:
            InputError: What has the file's name cannot be read, or has a damaged line and the
                reader is strict.
        """
        try:
            with open_to_read(self.path) as file:
                status = os.fstat(file.fileno())
                self._file_id = (status.st_dev, status.st_ino)
                for block in self._read_blocks(file):
                    yield from self._parse_block(block)
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            raise InputError(
                f"{self.path} cannot be read: {get_reason(error)}",
                f"mv {self.path} {self.path}.damaged",
            ) from error

    def describe_damage(self, is_growing: bool = False) -> Iterator[str]:
        """Yield a sentence about lines that were left out.

        Args:
            is_growing: A writer may be busy, so that half a last line is no damage.
        """
        if self.damaged_lines:
            more = f" and {self.damaged_lines - 1} more" if self.damaged_lines > 1 else ""
            yield f"line {self.first_damaged}{more} of {self.path} is damaged, and left out"
        if self.is_torn and not is_growing:
            yield f"the last line of {self.path} is half a line, and left out"

    def _read_blocks(self, file: BinaryIO) -> Iterator[bytes]:
        """Yield many complete lines at a time."""
        file.seek(self._offset)
        while data := file.read(BLOCK_BYTES):
            lines, line_end, remainder = data.rpartition(b"\n")
            self.is_torn = bool(remainder)
            if not line_end:
                if len(data) == BLOCK_BYTES:
                    raise ValueError(
                        f"line {self._line_number + 1} is longer than {BLOCK_BYTES >> 20} MiB"
                    )
                return
            self._offset += len(lines) + 1
            file.seek(self._offset)
            yield lines

    def _parse_block(self, block: bytes) -> Iterator[Line]:
        texts = block.decode(errors="replace").split("\n")
        for value in parse_lines(texts):
            self._line_number += 1
            if type(value) is dict and self.is_valid(value):
                yield value
            elif self.is_strict:
                raise make_damage_error(self.path, self._line_number)
            else:
                self.damaged_lines += 1
                self.first_damaged = self.first_damaged or self._line_number


def make_damage_error(path: Path, line_number: int) -> InputError:
    """Return the error for a damaged line that has valid lines after it."""
    return InputError(
        f"line {line_number} of {path} is damaged, and not the end of the file",
        f"sed -n {line_number}p {path} shows it: repair the line, or mv {path} {path}.damaged to go"
        " on without the lines",
    )


def read_last_lines(path: Path, max_bytes: int = BLOCK_BYTES) -> list[Line]:
    """Return the complete objects among the last bytes of a file; none if it cannot be read."""
    try:
        with open_to_read(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - max_bytes))
            texts = file.read(max_bytes).decode(errors="replace").split("\n")[:-1]
    except (OSError, ValueError):
        return []
    return [value for value in parse_lines(texts) if isinstance(value, dict)]


def fits_dataclass(line: Line, kind: type) -> bool:
    """Tell whether a line has the fields of a dataclass, see core/typed_file.py."""
    try:
        convert(line, kind)
    except ValueError:
        return False
    return True


def parse_lines(texts: list[str]) -> list[Any]:
    """Return the value of each text, None for one that is no JSON.

    If all are valid, they are parsed as one array, in half the time.
    """
    try:
        values: list[Any] = json.loads(f"[{','.join(texts)}]")
        if len(values) == len(texts):
            return values
    except (ValueError, RecursionError):
        pass
    return [parse_line(text) for text in texts]


def parse_line(text: str) -> Any:
    """Return the value of a text, or None if it is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
