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
    Progress,
    Standing,
    clear_progress,
    read_progress,
)


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Progress]:
    """Of two ranks."""
    file = tmp_path / "progress"
    clear_progress(file, 2)
    made = []
    for place in range(2):
        monkeypatch.setenv(PROGRESS, f"{file}:{place}")
        made.append(Progress())
    return made


def collective(progress: Progress, size: int) -> None:
    """As a method of Comm: `reach` looks at its caller's caller."""
    progress.reach("all_reduce", size)


def read(ranks: list[Progress]) -> list[Standing]:
    return read_progress(ranks[0].sites.with_name("progress"), 2)


def test_each_rank_has_words_of_its_own(ranks: list[Progress]) -> None:
    ranks[0].words[STEP] = 7
    ranks[1].words[STEP], ranks[1].words[PHASE], ranks[1].words[WAITS] = 8, SAVING, 3
    assert read(ranks) == [Standing(step=7), Standing(step=8, phase=SAVING, waits=3)]


def test_the_last_collectives_are_known_by_number_site_and_size(ranks: list[Progress]) -> None:
    for size in range(1, RING + 6):
        call(ranks[0], size)
    first, other = read(ranks)
    assert other.count == 0 and first.count == RING + 5
    assert first.collective(5) is None and first.collective(first.count + 1) is None
    for number in (6, first.count):
        site, size = first.collective(number) or (None, 0)
        assert size == number
        assert str(site) == f"call(), test_progress.py:{call.__code__.co_firstlineno + 1}"


def call(progress: Any, size: int) -> None:
    namespace["by_comm"](progress, size)


# A module of its own, as comm.py is one: calls inside it are not the site.
namespace: dict[str, Any] = {"__name__": "comm"}
exec(
    "def by_comm(own, size): collective(own, size)\ndef collective(own, size): own.reach('sum', size)",
    namespace,
)


def test_an_attempt_begins_with_words_of_zero(ranks: list[Progress]) -> None:
    call(ranks[0], 1)
    clear_progress(ranks[0].sites.with_name("progress"), 2)
    assert read(ranks) == [Standing(), Standing()]


def test_without_a_launcher_the_words_are_nobodys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for value in ("", f"{tmp_path / 'gone'}:0"):
        monkeypatch.setenv(PROGRESS, value)
        progress = Progress()
        progress.words[STEP] = 3
        collective(progress, 1)
        assert not progress.watched and not list(tmp_path.iterdir())
