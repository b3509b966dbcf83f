"""pytest's plugin: `@pytest.mark.ranks(2, 4)` runs a test on two processes, and then on four.

pytest loads this module in every suite, so it imports nothing of the package before a test needs
it: `tools/rank_tests` does the work.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from stepladder.tools.rank_tests.rank_server import RankServer  # noqa: F401 - of the key
    from stepladder.train.comm import Comm

CALL = "ranks(2, 4, timeout=60, exchange='memory' or 'gloo', group=True)"
SERVER = pytest.StashKey["RankServer"]()


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", f"{CALL}: run the test on 2 processes, and then on 4")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test of a marked one for each number of processes."""
    if mark := _find_mark(metafunc.definition):
        _validate(mark)
        metafunc.fixturenames.append("num_ranks")
        names = [f"{number}-ranks" for number in mark.args]
        metafunc.parametrize("num_ranks", mark.args, ids=names, indirect=True)


def _validate(mark: pytest.Mark) -> None:
    """Raise an error of the collection for a number or an option that the marker does not have."""
    numbers = [arg for arg in mark.args if type(arg) is not int or arg < 1]
    options = mark.kwargs.keys() - {"timeout", "exchange", "group"}
    if mark.kwargs.get("exchange", "memory") not in ("memory", "gloo"):
        options.add("exchange")
    if wrong := [*numbers, *options]:
        raise pytest.Collector.CollectError(f"@pytest.mark.ranks with {wrong[0]!r}. HINT: {CALL}")


@pytest.fixture
def num_ranks(request: pytest.FixtureRequest) -> int:
    """Return how many processes run this test."""
    number: int = request.param
    return number


@pytest.fixture
def comm(request: pytest.FixtureRequest) -> Iterator[Comm]:
    """Yield the collectives of the processes that run this test, as `stepladder.Comm`."""
    if not _find_mark(request.node):
        pytest.fail("the fixture comm needs @pytest.mark.ranks(2), or another number", False)
    from stepladder.tools.rank_tests.rank_test import open_comm

    with open_comm() as opened:
        yield opened


def _find_mark(item: pytest.Item) -> pytest.Mark | None:
    """Return the marker; None without a number, with which another suite may mark its tests."""
    mark = item.get_closest_marker("ranks")
    return mark if mark and mark.args else None


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Fork the process of which each rank is a fork, while no test has run in this one."""
    if session.config.option.collectonly or not any(map(_find_mark, session.items)):
        return
    from stepladder.tools.rank_tests.rank_server import RankServer

    session.config.stash[SERVER] = RankServer(session)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a marked test on its processes, and report once what they report."""
    if not _find_mark(item):
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in item.config.stash[SERVER].run(item):
        item.ihook.pytest_runtest_logreport(report=report)
    # Fixtures of the tests before, which pytest has kept for this one.
    item.session._setupstate.teardown_exact(nextitem)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the process that the ranks were forked from."""
    if SERVER in config.stash:
        config.stash[SERVER].close()
