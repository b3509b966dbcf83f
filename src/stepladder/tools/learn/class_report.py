"""The page of one learner's results, and one page that merges the pages of a class.

A learner's page holds its results as JSON in an attribute, so the page itself is what is handed in.
"""

from __future__ import annotations

import getpass
import json
import os
import platform
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Literal

from stepladder.core import typed_file
from stepladder.core.errors import InputError, as_input_error
from stepladder.core.numbers import format_count
from stepladder.tools.learn.course import Exercise, Lesson
from stepladder.tools.pages.page import render_page

DATA_ATTRIBUTE = "data-results"
CLASS_PAGE = b"<title>The class"  # at the head of a page of several learners
MAX_REPORT_BYTES = 1 << 20


@dataclass(frozen=True)
class ItemResult:
    """The result of one lesson or exercise; `passed` is None where it could not run."""

    key: str
    label: str
    passed: bool | None
    text: str


@dataclass(frozen=True)
class LearnerResults:
    """The results of one learner, who is the name of an account."""

    learner: str
    checked: str  # date and time in UTC
    items: tuple[ItemResult, ...]
    host: str = ""
    num_unchecked: int = 0  # lessons and exercises that were not reached
    schema: Literal[1] = 1

    @property
    def num_passed(self) -> int:
        return sum(item.passed is True for item in self.items)

    @property
    def num_skipped(self) -> int:
        return sum(item.passed is None for item in self.items)

    @property
    def num_items(self) -> int:
        return len(self.items) + self.num_unchecked

    @property
    def state(self) -> str:
        """When it was checked, and that it is unfinished if it was stopped."""
        unfinished = f", unfinished: {self.num_unchecked} not checked"
        return self.checked + unfinished * (self.num_unchecked > 0)

    @property
    def next_label(self) -> str:
        """The first item that has not passed, as far as they were checked."""
        failed = (item.label for item in self.items if item.passed is False)
        return next(failed, "not checked" if self.num_unchecked else "-")


def make_item_result(item: Lesson | Exercise, passed: bool | None, text: str) -> ItemResult:
    label = item.name if isinstance(item, Exercise) else f"lesson {item.number}"
    return ItemResult(item.key, label, passed, text)


def make_learner_results(items: Sequence[ItemResult], num_unchecked: int = 0) -> LearnerResults:
    """Return the results of the user of this machine, with the time of now."""
    checked = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    try:
        learner = getpass.getuser()
    except (KeyError, OSError):  # a container may run as a user whom its system does not know
        learner = f"user {os.getuid()}"
    return LearnerResults(learner, checked, tuple(items), platform.node(), num_unchecked)


def render_learner_page(results: LearnerResults) -> str:
    marks = {True: "passed", False: "NOT YET", None: "skipped"}
    return render_page(
        "learner.html",
        title=f"The course: {results.learner}",
        outcome=f"{results.num_passed} of {results.num_items} passed,"
        f" {results.num_skipped} skipped, {results.state}",
        is_complete=results.num_passed == results.num_items,
        rows=[[item.label, marks[item.passed], item.text] for item in results.items],
        data=json.dumps(asdict(results)),
    )


def read_learner_page(path: Path) -> LearnerResults:
    """Return the results in a learner's page. Raises InputError if it is no such page."""
    hint = "the page of a stepladder learn check --all --report FILE"
    with as_input_error(f"{path} cannot be read", hint, (OSError, ValueError)):
        text = typed_file.read_file(path, MAX_REPORT_BYTES)
    reader = _ResultsReader()
    reader.feed(text.decode(errors="replace"))
    with as_input_error(f"{path} is no page of a learner", hint, (ValueError,)):
        results: LearnerResults = typed_file.convert(
            typed_file.parse_json(reader.data, dict), LearnerResults
        )
    return results


class _ResultsReader(HTMLParser):
    """Finds the results in a page."""

    def __init__(self) -> None:
        super().__init__()
        self.data = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.data = dict(attrs).get(DATA_ATTRIBUTE) or self.data


def name_learners(pages: Mapping[Path, LearnerResults]) -> dict[str, LearnerResults]:
    """Return results by learner; the host or the file tells two learners of one name apart."""
    by_name = Counter(results.learner for results in pages.values())
    by_host = Counter((results.learner, results.host) for results in pages.values())
    names = {}
    for path, results in pages.items():
        name = results.learner
        if by_host[results.learner, results.host] > 1:
            name += f" ({path})"
        elif by_name[results.learner] > 1:
            name += f" on {results.host}"
        names[name] = results
    return names


def render_class_page(pages: Mapping[Path, LearnerResults]) -> str:
    """Return the page of a class: how far each is, and which items most have not passed."""
    if not pages:
        raise InputError("no page of a learner", "stepladder learn class *.html")
    class_results = name_learners(pages)
    learners = [
        [
            name,
            f"{results.num_passed} of {results.num_items}",
            results.num_skipped,
            results.next_label,
            results.state,
        ]
        for name, results in sorted(class_results.items())
    ]
    labels = dict.fromkeys(
        item.label for results in class_results.values() for item in results.items
    )
    stuck: dict[str, list[str]] = {}
    for label in labels:
        stuck[label] = [
            name
            for name, results in class_results.items()
            if any(item.label == label and item.passed is False for item in results.items)
        ]
    by_count = sorted(stuck.items(), key=lambda item: -len(item[1]))
    stuck_rows = []
    for label, names in by_count:
        if names:
            stuck_rows.append([label, len(names), ", ".join(sorted(names))])
    return render_page(
        "class.html",
        title=f"The class: {format_count(len(learners), 'learner')}",
        learners=learners,
        items=stuck_rows,
        is_complete=not any(results.num_unchecked for results in pages.values()),
    )
