"""A rank's words: what it writes, and what its launcher reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stepladder.rank.progress import (
    PHASE,
    PROGRESS,
    RING,
    SAVING,
    STEP,
    WAITS,
    Slot,
    Standing,
    make_slots,
    read_slots,
)


@pytest.fixture
def slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Slot]:
    """Of two ranks."""
    file = tmp_path / "progress"
    make_slots(file, 2)
    made = []
    for place in range(2):
        monkeypatch.setenv(PROGRESS, f"{file}:{place}")
        made.append(Slot())
    return made


def collective(slot: Slot, size: int) -> None:
    """As a method of Comm: `reach` looks at its caller's caller."""
    slot.reach("all_reduce", size)


def read(slots: list[Slot]) -> list[Standing]:
    return read_slots(slots[0].sites.with_name("progress"), 2)


def test_each_rank_has_words_of_its_own(slots: list[Slot]) -> None:
    slots[0].words[STEP] = 7
    slots[1].words[STEP], slots[1].words[PHASE], slots[1].words[WAITS] = 8, SAVING, 3
    assert read(slots) == [Standing(step=7), Standing(step=8, phase=SAVING, waits=3)]


def test_the_last_collectives_are_known_by_number_site_and_size(slots: list[Slot]) -> None:
    for size in range(1, RING + 6):
        call(slots[0], size)
    first, other = read(slots)
    assert other.count == 0 and first.count == RING + 5
    assert first.collective(5) is None and first.collective(first.count + 1) is None
    for number in (6, first.count):
        site, size = first.collective(number) or (None, 0)
        assert size == number
        assert str(site) == f"call(), test_slot.py:{call.__code__.co_firstlineno + 1}"


def call(slot: Any, size: int) -> None:
    namespace["by_comm"](slot, size)


# A module of its own, as comm.py is one: calls inside it are not the site.
namespace: dict[str, Any] = {"__name__": "comm"}
exec(
    "def by_comm(slot, size): collective(slot, size)\ndef collective(slot, size): slot.reach('sum', size)",
    namespace,
)


def test_an_attempt_begins_with_empty_slots(slots: list[Slot]) -> None:
    call(slots[0], 1)
    make_slots(slots[0].sites.with_name("progress"), 2)
    assert read(slots) == [Standing(), Standing()]


def test_without_a_launcher_the_words_are_nobodys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for value in ("", f"{tmp_path / 'gone'}:0"):
        monkeypatch.setenv(PROGRESS, value)
        slot = Slot()
        slot.words[STEP] = 3
        collective(slot, 1)
        assert not slot.watched and not list(tmp_path.iterdir())
