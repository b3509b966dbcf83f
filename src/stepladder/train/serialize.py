"""Values that one rank hands to the others, as bytes that can be read without running code."""

from __future__ import annotations

import json
from typing import Any

from stepladder.storage.snapshot import Snapshot

BYTES, SNAPSHOT = "\0bytes", "\0snapshot"  # keys that mark what JSON has no word for


def serialize(value: Any) -> bytes:
    """A line of JSON, which says how long each of the byte strings after it is. Raises TypeError."""
    blobs: list[bytes] = []

    def convert(special: Any) -> Any:
        if isinstance(special, bytes):
            blobs.append(special)
            return {BYTES: len(special)}
        if isinstance(special, Snapshot):
            return {SNAPSHOT: [special.name, special.manifest, special.files, str(special.folder)]}
        raise TypeError(
            f"{type(special).__name__} is neither what JSON has nor bytes: it cannot go to others"
        )

    return b"".join([json.dumps(value, default=convert).encode(), b"\n", *blobs])


def deserialize(data: bytes) -> Any:
    """What `to_bytes` was given; tuples are lists now."""
    line, _, rest = data.partition(b"\n")
    at = 0

    def convert(found: dict[str, Any]) -> Any:
        nonlocal at
        if BYTES in found:
            begin, at = at, at + found[BYTES]
            return rest[begin:at]
        return Snapshot(*found[SNAPSHOT]) if SNAPSHOT in found else found

    return json.loads(line, object_hook=convert)
