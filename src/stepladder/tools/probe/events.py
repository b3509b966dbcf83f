"""What a probe records: an event is a dataclass, and one line of JSON in its process's recording.

This runs in the observed process, which may lack every library but torch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, dataclass_transform

KIND_KEY = "k"
LINE_FIELDS = {"at", "built", "sampler_built", "caller", "gathered"}


class CodeLine(NamedTuple):
    """A line of the user's code, and the function that it is in."""

    file: str
    line: int
    function: str = ""


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
@dataclass(frozen=True, kw_only=True, repr=False)
class ProbeEvent:
    """Something that a process did: each subclass is a frozen dataclass, and one kind of event.

    Args:
        n: Its number in the process.
        at: The line of the user's code that caused it.
    """

    classes: ClassVar[dict[str, type[ProbeEvent]]] = {}
    kind: ClassVar[str] = ""

    n: int = 0
    at: CodeLine | None = None

    def __init_subclass__(cls, kind: str) -> None:
        if kind in ProbeEvent.classes:
            raise ValueError(f"two kinds of events are called {kind}")
        cls.kind = kind
        ProbeEvent.classes[kind] = cls
        dataclass(frozen=True, kw_only=True, repr=False)(cls)

    @classmethod
    def marker(cls) -> bytes:
        """Return the bytes with which each line of this kind begins."""
        return json.dumps({KIND_KEY: cls.kind}).removesuffix("}").encode()

    def to_line(self, number: int = 0, at: CodeLine | None = None) -> bytes:
        """Return the event as a line of a recording; what JSON does not know becomes text."""
        values = {KIND_KEY: self.kind, **vars(self), "n": number, "at": at}
        return f"{json.dumps(values, default=str)}\n".encode(errors="backslashreplace")

    @staticmethod
    def from_values(values: dict[str, Any]) -> ProbeEvent:
        """Return the event of the values of a line; values that are no field are left out."""
        event_class = ProbeEvent.classes[values[KIND_KEY]]
        known = {name: values[name] for name in event_class.__dataclass_fields__ if name in values}
        for name in LINE_FIELDS & known.keys():
            if known[name]:
                known[name] = CodeLine(*known[name])
        return event_class(**known)

    @staticmethod
    def from_line(line: bytes | str) -> ProbeEvent:
        """Return the event of a line of a recording.

        Raises ValueError if the line is half written, or has no known kind of event.
        """
        try:
            return ProbeEvent.from_values(json.loads(line))
        except (TypeError, KeyError) as error:
            raise ValueError(f"{line!r:.60} is no event") from error
