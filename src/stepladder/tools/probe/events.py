"""What a probe records: an event is a dataclass, and one line of JSON in its process's recording.

This runs in the observed process, which may lack every library but torch.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

KIND_KEY = "k"


@dataclass(frozen=True)
class ProbeEvent:
    """Something that a process did. Each subclass is one kind of event:

    class Forward(ProbeEvent, kind="forward"): ...
    """

    classes: ClassVar[dict[str, type[ProbeEvent]]] = {}
    kind: ClassVar[str]

    def __init_subclass__(cls, kind: str) -> None:
        if kind in ProbeEvent.classes:
            raise ValueError(f"two kinds of events are called {kind}")
        cls.kind = kind
        ProbeEvent.classes[kind] = cls

    def to_line(self) -> bytes:
        """Return the event as a line; what JSON does not know becomes text."""
        text = json.dumps({KIND_KEY: self.kind, **asdict(self)}, default=str)
        return f"{text}\n".encode(errors="backslashreplace")

    @staticmethod
    def from_line(line: bytes | str) -> ProbeEvent:
        """Return the event of a line; keys that are no field are left out.

        Raises ValueError if the line is half written, or has no known kind of event.
        """
        values = json.loads(line)
        if not isinstance(values, dict) or values.get(KIND_KEY) not in ProbeEvent.classes:
            raise ValueError(f"{line!r:.60} is no event")
        event_class = ProbeEvent.classes[values[KIND_KEY]]
        names = {field.name for field in fields(event_class)}
        arguments: dict[str, Any] = {name: values[name] for name in names & values.keys()}
        try:
            return event_class(**arguments)
        except TypeError as error:
            raise ValueError(f"{line!r:.60} lacks a field of {event_class.kind}") from error
