"""How a run's processes come about: what is set for them before torch is loaded."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stepladder.core.settings import Settings
from stepladder.launcher.entry import SPINS, Launch, start


@pytest.mark.parametrize(
    "given, spins",
    [({}, SPINS), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
    ids=["nothing", "a count", "a policy"],
)
def test_threads_wait_briefly_unless_told_otherwise(
    given: dict[str, str], spins: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # so that what the start sets is undone, too
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    seen: list[str | None] = []
    assert start(lambda _: seen.append(os.environ.get("GOMP_SPINCOUNT")) or 0, Settings(tmp_path), Launch()) == 0
    assert seen == [spins]
