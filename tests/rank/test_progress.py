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
    WORDS,
    Progress,
    RankFiles,
    Standing,
    clear_words,
    read_progress,
)

NUMBERS = 4, 5


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Progress]:
    """Make those of two ranks of a second node."""
    words, sites = tmp_path / "words", tmp_path / "sites"
    words.write_bytes(bytes(8 * WORDS * 2))
    sites.touch()
    made = []
    for slot, rank in enumerate(NUMBERS):
        files = RankFiles(rank, slot, str(words), str(sites), str(tmp_path / "stacks"))
        monkeypatch.setenv(PROGRESS, files.variable[PROGRESS])
        made.append(Progress())
    return made


def collective(progress: Progress, size: int) -> None:
    """As a method of Comm: `reach` looks at its caller's caller."""
    progress.reach("all_reduce", size)


def read(ranks: list[Progress], numbers: tuple[int, ...] = NUMBERS) -> list[Standing]:
    assert ranks[0].files is not None
    return read_progress(Path(ranks[0].files.words), Path(ranks[0].files.sites), numbers)


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


def test_another_rank_in_a_lost_one_s_place_begins_with_words_of_zero(
    ranks: list[Progress],
) -> None:
    assert ranks[0].files is not None
    call(ranks[0], 1)
    clear_words(Path(ranks[0].files.words), 0)
    assert read(ranks, (6, 5)) == [Standing(), Standing()]


def test_half_a_line_of_a_killed_rank_hides_no_other_one(ranks: list[Progress]) -> None:
    assert ranks[1].files is not None
    with Path(ranks[1].files.sites).open("a") as sites:
        sites.write('[4, "half')
    call(ranks[1], 3)
    site, size = read(ranks)[1].collective(1) or (None, 0)
    assert (size, str(site)[:6]) == (3, "call()")


def test_without_a_launcher_the_words_are_nobodys(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gone = RankFiles(0, 0, *[str(tmp_path / "gone")] * 3).variable[PROGRESS]
    for value in ("", "{}", gone):
        monkeypatch.setenv(PROGRESS, value)
        progress = Progress()
        progress.words[STEP] = 3
        collective(progress, 1)
        assert progress.files is None and not list(tmp_path.iterdir())
