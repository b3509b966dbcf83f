"""A probe's event is a dataclass, and a line of its recording."""

from __future__ import annotations

import pytest

from stepladder.tools.probe.events import ProbeEvent


class Tasted(ProbeEvent, kind="test of events"):
    dish: str
    seconds: float = 1.5


def test_an_event_is_what_its_line_says() -> None:
    event = Tasted(dish="söup \udcff", seconds=2.0)
    line = event.to_line()
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    assert ProbeEvent.from_line(line) == event
    older = b'{"k": "test of events", "dish": "soup", "of a newer version": 1}'
    assert ProbeEvent.from_line(older) == Tasted(dish="soup")


@pytest.mark.parametrize(
    "line", [b'{"k": "test of ev', b"[]", b'{"k": "nothing"}', b'{"k": "test of events"}']
)
def test_what_is_no_event_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError):
        ProbeEvent.from_line(line)


def test_two_kinds_have_two_names() -> None:
    with pytest.raises(ValueError, match="two kinds"):
        type("Again", (ProbeEvent,), {}, kind="test of events")
