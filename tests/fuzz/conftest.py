"""Cases are shared out: each kind gets its part of the minutes. The table at the end says what was
tried.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from fuzzing import MINUTES, SEED, Fuzz, open_sandbox


@pytest.fixture
def fuzz(request: pytest.FixtureRequest) -> Iterator[Fuzz]:
    here = [item for item in request.session.items if Path(__file__).parent in item.path.parents]
    workers = min(len(here), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
    with open_sandbox() as sandbox:
        one = Fuzz(sandbox, MINUTES * 60 * workers / len(here))
        yield one
        request.node.user_properties.append(("fuzz", dict(one.tried)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    stats = [one for kind in terminalreporter.stats.values() for one in kind]
    reports = [one for one in stats if getattr(one, "when", "") == "teardown"]
    tried = [
        (one.nodeid, dict(one.user_properties)["fuzz"]) for one in reports if one.user_properties
    ]
    if MINUTES and tried:
        terminalreporter.section(f"cases of seed {SEED}")
        for name, counts in sorted(tried):
            ends = ", ".join(f"{end} {count}" for end, count in sorted(counts.items()))
            terminalreporter.line(
                f"{name.rpartition('::')[2]}: {sum(counts.values())} cases; {ends}"
            )
