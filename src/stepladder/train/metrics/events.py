"""Event files, as TensorBoard reads them: records of a length, a protocol buffer message and their checksums.

Written here, for TensorBoard's own writer takes 60 ms to import and has a thread, whose errors nobody can catch.
The messages: tensorboard/compat/proto/event.proto and summary.proto.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from ctypes import c_float
from functools import cache
from pathlib import Path

CASTAGNOLI = 0x82F63B78  # CRC-32C's polynomial, its bits reversed
DOUBLE, BYTES, FLOAT = 1, 2, 5  # how a field of a message is written; 0 is a whole number


@cache
def _table() -> list[int]:
    rows = range(256)
    for _ in range(8):
        rows = [row >> 1 ^ CASTAGNOLI * (row & 1) for row in rows]  # type: ignore[assignment]
    return list(rows)


def masked_crc(data: bytes) -> bytes:
    """CRC-32C of `data`, rotated and shifted, so that a checksum over checksums is none of itself; 4 bytes."""
    table, crc = _table(), 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ table[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def whole_number(value: int) -> bytes:
    """Seven bits to a byte, the lowest first; the eighth says that more come."""
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def of_bytes(number: int, value: bytes) -> bytes:
    """A field of text, or of another message."""
    return bytes([number << 3 | BYTES]) + whole_number(len(value)) + value


def scalars(step: int, values: dict[str, float]) -> bytes:
    """The fields of an event with a summary of them. What is too large for 32 bits is infinite."""
    summary = b"".join(
        of_bytes(1, of_bytes(1, name.encode()) + struct.pack("<Bf", 2 << 3 | FLOAT, c_float(float(value)).value))
        for name, value in values.items()
    )
    return bytes([2 << 3]) + whole_number(step) + of_bytes(5, summary)


class EventFile:
    """A new one in `folder`, whose records are on their way when `add` returns."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        self.file = (folder / name).open("xb", buffering=0)
        self.add(of_bytes(3, b"brain.Event:2"))

    def add(self, fields: bytes) -> None:
        """An event of this moment."""
        event = struct.pack("<Bd", 1 << 3 | DOUBLE, time.time()) + fields
        length = struct.pack("<Q", len(event))
        self.file.write(b"".join([length, masked_crc(length), event, masked_crc(event)]))

    def close(self) -> None:
        self.file.close()
