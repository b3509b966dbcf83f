"""Values that one rank sends to the others, as bytes that can be read without running code."""

from __future__ import annotations

import json
from typing import Any

from stepladder.storage.snapshot import Snapshot

# Keys that mark values which JSON cannot represent.
BYTES_KEY = "\0bytes"
SNAPSHOT_KEY = "\0snapshot"


def serialize(value: Any) -> bytes:
    """Return a line of JSON, followed by the byte strings whose lengths the JSON tells.

    Raises:
        TypeError: The value is of a type that cannot be sent.
    """
    byte_strings: list[bytes] = []

    def convert(special: Any) -> Any:
        if isinstance(special, bytes):
            byte_strings.append(special)
            return {BYTES_KEY: len(special)}
        if isinstance(special, Snapshot):
            fields = [special.name, special.manifest, special.files, str(special.folder)]
            return {SNAPSHOT_KEY: fields}
        raise TypeError(
            f"{type(special).__name__} is neither what JSON has nor bytes: it cannot be sent to"
            " other ranks"
        )

    return b"".join([json.dumps(value, default=convert).encode(), b"\n", *byte_strings])


def deserialize(data: bytes) -> Any:
    """Return the value that `serialize` was given, with lists in place of tuples."""
    line, _, payload = data.partition(b"\n")
    offset = 0

    def convert(mapping: dict[str, Any]) -> Any:
        nonlocal offset
        if BYTES_KEY in mapping:
            begin = offset
            offset += mapping[BYTES_KEY]
            return payload[begin:offset]
        if SNAPSHOT_KEY in mapping:
            return Snapshot(*mapping[SNAPSHOT_KEY])
        return mapping

    return json.loads(line, object_hook=convert)
