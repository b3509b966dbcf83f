"""The pages of a learner and of a class, in a browser."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from browsers import check_readable, check_tables_fit, needs_browser
from stepladder.tools.learn.class_report import (
    ItemResult,
    LearnerResults,
    render_class_page,
    render_learner_page,
)

TEXT = "claim holds: 89.44% of 360 test images, each counted once by one of 4 ranks on 2 nodes"
ITEMS = tuple(
    ItemResult(f"{number}", "collective-on-one-rank", passed, TEXT)
    for number, passed in enumerate([True, False, None])
)
RESULTS = LearnerResults("student", "2026-01-01 12:00 UTC", ITEMS, "login1.cluster.example.edu")


@pytest.mark.slow
@needs_browser
def test_the_pages_of_a_class_are_readable_in_a_browser(tmp_path: Path) -> None:
    learner = tmp_path / "learner.html"
    learner.write_text(render_learner_page(RESULTS))
    check_readable(learner, tmp_path)
    check_tables_fit(learner, tmp_path)
    pages = {
        Path("/shared/class/first-of-that-name.html"): RESULTS,
        Path("/shared/class/second-of-that-name.html"): RESULTS,
        Path("third.html"): replace(RESULTS, host="pc2"),
        Path("fourth.html"): replace(RESULTS, learner="ada", num_unchecked=3),
    }
    (tmp_path / "class.html").write_text(render_class_page(pages))
    check_readable(tmp_path / "class.html", tmp_path)
    check_tables_fit(tmp_path / "class.html", tmp_path)


@pytest.mark.parametrize(
    ("num_unchecked", "sentence", "next_label"),
    [
        (0, "All have passed everything.", ">-<"),
        (54, "Some pages are unfinished.", ">not checked<"),
    ],
)
def test_a_page_that_was_stopped_has_not_passed_everything(
    num_unchecked: int, sentence: str, next_label: str
) -> None:
    results = replace(RESULTS, items=ITEMS[:1], num_unchecked=num_unchecked)
    page = render_class_page({Path("a.html"): results})
    assert sentence in page
    assert next_label in page
