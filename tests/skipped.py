"""Remember the tests that were skipped, and run only these: `pytest --skipped-before`.

A plugin of conftest.py. On a machine that has gained Slurm, sshd or chromium since, the other tests
need not run twice."""

from __future__ import annotations

import pytest

CACHE_KEY = "stepladder/skipped"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--skipped-before",
        action="store_true",
        help="Run only the tests that were skipped the last time.",
    )


class SkippedTests:
    """The tests that this run skipped, kept in pytest's cache for `--skipped-before`."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.skipped: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped:
            self.skipped.append(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        if getattr(self.config, "cache", None) is not None:  # absent with -p no:cacheprovider
            self.config.cache.set(CACHE_KEY, sorted(self.skipped))


def pytest_configure(config: pytest.Config) -> None:
    is_xdist_worker = hasattr(
        config, "workerinput"
    )  # the process that collects their reports writes the cache
    if not is_xdist_worker and not config.option.collectonly:
        config.pluginmanager.register(SkippedTests(config))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--skipped-before"):
        return
    assert config.cache is not None
    skipped_before = set(config.cache.get(CACHE_KEY, []))
    deselected = [item for item in items if item.nodeid not in skipped_before]
    items[:] = [item for item in items if item.nodeid in skipped_before]
    config.hook.pytest_deselected(items=deselected)
