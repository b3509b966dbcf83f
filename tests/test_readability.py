"""Limits of what makes code hard to read, measured by readability.py over the whole source."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

import stepladder
from readability import Gauges, measure

SOURCE = Path(stepladder.__file__).parent
REPOSITORY = Path(__file__).parents[1]
PACKAGES = sorted(path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists())

TOKENS_A_LINE = 8.8  # click has 6.6, pytest 6.4, mypy 6.8
TOKENS_A_LINE_OF_A_PACKAGE = 11.1
TOKENS_A_LINE_OF_A_FILE = 17.0
PERCENT_OF_DIALECT = {"src": 7.7, "lessons": 3.2, "benchmarks": 7.2, "tests": 6.7}
TUPLE_ASSIGNMENTS = 13  # in a thousand lines
CONDITIONAL_EXPRESSIONS = 22  # in a thousand lines
PERCENT_OF_FRAGMENTS = 22.0
LATE_ATTRIBUTES = 195
ATTRIBUTES_OF_OTHERS = 200

# Files that are tables of data: a row is a line, however many tokens it has.
TABLES: dict[str, str] = {}
# Written as strangers write: the input of tests, not code of this project.
STRANGERS = ("tests/check_corpus/", "tests/tools/check/scripts/")


@cache
def gauges_of(folder: str) -> dict[str, Gauges]:
    """Return the gauges of each Python file below a folder of the repository, by its path."""
    paths = sorted((REPOSITORY / folder).rglob("*.py"))
    names = {path: path.relative_to(REPOSITORY).as_posix() for path in paths}
    return {name: measure(path) for path, name in names.items() if not name.startswith(STRANGERS)}


@cache
def total(folder: str) -> Gauges:
    return sum(gauges_of(folder).values(), Gauges())


def source() -> Gauges:
    return total("src/stepladder")


def in_a_thousand_lines(count: int, gauges: Gauges) -> float:
    return 1000 * count / gauges.lines


def test_a_line_of_code_has_few_tokens() -> None:
    assert source().tokens_per_code_line() <= TOKENS_A_LINE


@pytest.mark.parametrize("package", PACKAGES)
def test_a_line_of_a_package_has_few_tokens(package: str) -> None:
    assert total(f"src/stepladder/{package}").tokens_per_code_line() <= TOKENS_A_LINE_OF_A_PACKAGE


def test_a_line_of_a_file_has_few_tokens() -> None:
    dense = {
        name: gauges.tokens_per_code_line()
        for name, gauges in gauges_of("src/stepladder").items()
        if gauges.tokens_per_code_line() > TOKENS_A_LINE_OF_A_FILE
    }
    assert dense.keys() == TABLES.keys()


@pytest.mark.parametrize("folder", PERCENT_OF_DIALECT)
def test_names_say_what_a_thing_is(folder: str) -> None:
    gauges = total(folder)
    assert gauges.percent_of_names("dialect") <= PERCENT_OF_DIALECT[folder], gauges.places[
        "dialect"
    ]


def test_a_statement_has_one_idea() -> None:
    gauges = source()
    tuples = gauges.places["tuple assignment"]
    assert in_a_thousand_lines(len(tuples), gauges) <= TUPLE_ASSIGNMENTS, tuples
    assert in_a_thousand_lines(gauges.conditional_expressions, gauges) <= CONDITIONAL_EXPRESSIONS


def test_docstrings_are_sentences() -> None:
    gauges = source()
    fragments = gauges.places["fragment"]
    assert 100 * len(fragments) / gauges.docstrings <= PERCENT_OF_FRAGMENTS, fragments


def test_a_constant_has_one_value() -> None:
    several = {name: values for name, values in source().constants.items() if len(values) > 1}
    assert len(several) <= 73


def test_attributes_are_born_in_the_constructor() -> None:
    late = source().places["late attribute"]
    assert len(late) <= LATE_ATTRIBUTES, late


def test_attributes_are_set_by_their_own_object() -> None:
    set_from_outside = source().places["attribute of another object"]
    assert len(set_from_outside) <= ATTRIBUTES_OF_OTHERS, set_from_outside


HARD_TO_READ = '''
LIMIT = 1
LIMIT = 2

class Judge:
    """Where it stands."""

    def look(self, one):
        """Looks.

        one: the first.  other: the next.
        """
        found, self.seen = one, (1 if one else 2 if self.place else 3)
        one.state = found
'''


def test_the_gauges_see_what_they_count() -> None:
    """So that the tests above cannot pass because nothing is counted."""
    gauges = measure(Path("hard.py"), HARD_TO_READ)
    counts = {kind: len(places) for kind, places in gauges.places.items()}
    assert counts == {
        "dialect": 4,
        "fragment": 1,
        "home-made parameter list": 1,
        "tuple assignment": 1,
        "tuple assignment to attributes": 1,
        "late attribute": 1,
        "conditional expression in another": 1,
        "attribute of another object": 1,
    }
    assert gauges.constants["LIMIT"] == {"1", "2"}
    assert gauges.conditional_expressions == 2
    assert gauges.code_lines == 6
