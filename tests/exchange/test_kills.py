"""A rank is killed at a random moment: the others name it, and leave nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.ranks


@pytest.fixture
def exchange_kills() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
        import exchange_kills

        yield exchange_kills


@pytest.mark.parametrize(
    "kills", [3, pytest.param(50, marks=[pytest.mark.slow, pytest.mark.corpus])]
)
def test_the_others_name_a_killed_rank_and_leave_nothing(
    exchange_kills: ModuleType, kills: int
) -> None:
    found = exchange_kills.kill_often(kills, seed=0)
    assert [kill.faults for kill in found] == [[]] * kills
