"""A rank's words: what it writes, and what its launcher reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stepladder.rank.progress import (
    AWAITED,
    NUM_SLOTS,
    PHASE,
    PROGRESS_VARIABLE,
    RING_SIZE,
    SAVING,
    STEP,
    Progress,
    RankFiles,
    RankProgress,
    clear_slots,
    read_progress,
)

NUMBERS = 4, 5


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Progress]:
    """Make those of two ranks of a second node."""
    slots = tmp_path / "words"
    sites = tmp_path / "sites"
    slots.write_bytes(bytes(8 * NUM_SLOTS * 2))
    sites.touch()
    made = []
    for slot, rank in enumerate(NUMBERS):
        files = RankFiles(rank, slot, str(slots), str(sites), str(tmp_path / "stacks"))
        monkeypatch.setenv(PROGRESS_VARIABLE, files.variable[PROGRESS_VARIABLE])
        made.append(Progress())
    return made


def collective(progress: Progress, size: int) -> None:
    """As a method of Comm: `reach` looks at its caller's caller."""
    progress.record_collective("all_reduce", size)


def read(ranks: list[Progress], numbers: tuple[int, ...] = NUMBERS) -> list[RankProgress]:
    assert ranks[0].files is not None
    return read_progress(
        Path(ranks[0].files.progress_file), Path(ranks[0].files.sites_file), numbers
    )


def test_each_rank_has_words_of_its_own(ranks: list[Progress]) -> None:
    ranks[0].slots[STEP] = 7
    ranks[1].slots[STEP], ranks[1].slots[PHASE], ranks[1].slots[AWAITED] = 8, SAVING, 3
    assert read(ranks) == [RankProgress(step=7), RankProgress(step=8, phase=SAVING, awaited=3)]


def test_the_last_collectives_are_known_by_number_site_and_size(ranks: list[Progress]) -> None:
    for size in range(1, RING_SIZE + 6):
        call(ranks[0], size)
    first, second = read(ranks)
    assert second.num_collectives == 0 and first.num_collectives == RING_SIZE + 5
    assert (
        first.find_collective(5) is None
        and first.find_collective(first.num_collectives + 1) is None
    )
    for number in (6, first.num_collectives):
        site, size = first.find_collective(number) or (None, 0)
        assert size == number
        assert str(site) == f"call(), test_progress.py:{call.__code__.co_firstlineno + 1}"


def call(progress: Any, size: int) -> None:
    namespace["by_comm"](progress, size)


# A module of its own, as comm.py is one: calls inside it are not the site.
namespace: dict[str, Any] = {"__name__": "comm"}
exec(
    "def by_comm(progress, size): collective(progress, size)\n"
    "def collective(progress, size): progress.record_collective('sum', size)",
    namespace,
)


def test_another_rank_in_a_lost_one_s_place_begins_with_words_of_zero(
    ranks: list[Progress],
) -> None:
    assert ranks[0].files is not None
    call(ranks[0], 1)
    clear_slots(Path(ranks[0].files.progress_file), 0)
    assert read(ranks, (6, 5)) == [RankProgress(), RankProgress()]


def test_half_a_line_of_a_killed_rank_hides_no_other_one(ranks: list[Progress]) -> None:
    assert ranks[1].files is not None
    with Path(ranks[1].files.sites_file).open("a") as sites:
        sites.write('[4, "half')
    call(ranks[1], 3)
    site, size = read(ranks)[1].find_collective(1) or (None, 0)
    assert (size, str(site)[:6]) == (3, "call()")


def test_without_a_launcher_the_words_are_nobodys(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    missing = RankFiles(0, 0, *[str(tmp_path / "gone")] * 3).variable[PROGRESS_VARIABLE]
    for value in ("", "{}", missing):
        monkeypatch.setenv(PROGRESS_VARIABLE, value)
        progress = Progress()
        progress.slots[STEP] = 3
        collective(progress, 1)
        assert progress.files is None and not list(tmp_path.iterdir())
