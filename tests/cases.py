"""Run a few cases of each slow test that has many: `pytest -m slow --cases 2`.

A plugin of conftest.py. The cases of one test share its mechanism: those that are spread evenly
over them find what breaks it. All of them run by hand.
"""

from __future__ import annotations

from collections import defaultdict

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cases",
        type=int,
        default=0,
        metavar="N",
        help="of each slow test with more than N cases, run N that are spread over them; 0: all",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    max_cases = config.getoption("--cases")
    if not max_cases:
        return
    cases_of_test = defaultdict(list)
    for item in items:
        is_one_of_many = item.get_closest_marker("slow") and not item.get_closest_marker("corpus")
        if is_one_of_many and not item.get_closest_marker("every_case"):
            cases_of_test[item.nodeid.partition("[")[0]].append(item)
    left_out = {
        id(case)
        for cases in cases_of_test.values()
        for index, case in enumerate(cases)
        if index not in spread(max_cases, len(cases))
    }
    config.hook.pytest_deselected(items=[item for item in items if id(item) in left_out])
    items[:] = [item for item in items if id(item) not in left_out]


def spread(count: int, length: int) -> set[int]:
    """Return so many indices of a list of a length, the first and the last among them."""
    if length <= count:
        return set(range(length))
    return {index * (length - 1) // max(count - 1, 1) for index in range(count)}
