"""Ranks that a tool starts: a signal ends the tool too, whatever its ranks were about to do."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from stepladder.tools import ranks


def test_a_signal_that_comes_as_the_ranks_end_by_themselves_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_local(group: Any, _ranks: int) -> int:
        group.stop_asked = signal.SIGTERM
        return 0

    class Group:
        stop_asked = 0

        def __init__(self, *_: object) -> None: ...

    monkeypatch.setattr(ranks, "LocalGroup", Group)
    monkeypatch.setattr(ranks, "run_local", run_local)
    with pytest.raises(KeyboardInterrupt):
        ranks.on_ranks(lambda: 0, 1, 1, Path("job.py"))
