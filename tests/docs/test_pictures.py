"""The pictures are what their scripts draw today from what the package computes; pages show them
with words.
"""

from __future__ import annotations

import re
import runpy
import xml.etree.ElementTree as ElementTree
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from pages import PAGES, REPOSITORY

FOLDER = REPOSITORY / "docs" / "pictures"
PICTURES = sorted(FOLDER.glob("*.svg"))
FROM_RUNS = ("kill_and_resume", "overlap")
SHOWN = re.compile(r"!\[([^\]]*)\]\(([^)]+\.svg)\)")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A script of the folder by its name, as `python docs/pictures/NAME.py` finds the others."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return lambda name: runpy.run_path(str(FOLDER / f"{name}.py"))


def list_labels(picture: Path) -> list[str]:
    return [unescape(one) for one in re.findall(r"<text[^>]*>([^<]*)</text>", picture.read_text())]


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.name)
def test_a_picture_is_small_still_text_and_shown_with_words(picture: Path) -> None:
    text = picture.read_text()
    assert ElementTree.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"
    assert len(text) < 60_000
    assert "prefers-color-scheme: dark" in text and "<title>" in text and list_labels(picture)
    assert not re.search(r"<script|href|@import|url\(", text)
    shown = {
        (page.parent / target).resolve(): alt
        for page in PAGES
        for alt, target in SHOWN.findall(page.read_text())
    }
    assert len(shown.get(picture, "")) > 30, (
        "no page shows it with a sentence for those who cannot see it"
    )


@pytest.mark.parametrize(
    "name", [p.stem for p in FOLDER.glob("*.py") if p.stem not in ("drawing", *FROM_RUNS)]
)
def test_a_picture_is_what_its_script_draws(name: str, script: Any) -> None:
    """After a change: python docs/pictures/NAME.py"""
    assert script(name)["picture"]().svg() == (FOLDER / f"{name}.svg").read_text()


@pytest.mark.ranks
@pytest.mark.slow
def test_the_picture_of_the_kill_can_be_made_again(tmp_path: Path, script: Any) -> None:
    """The script draws nothing unless the hashes are equal."""
    script("kill_and_resume")["main"](tmp_path)
    labels = list_labels(tmp_path / "kill_and_resume.svg")
    assert any(label.startswith("kill -9 after step") for label in labels)
    hashes = [label for label in labels if re.fullmatch(r"[0-9a-f]{12}…", label)]
    assert len(hashes) == 2 and len(set(hashes)) == 1
