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

from pages import PAGES, REPOSITORY, blocks

FOLDER = REPOSITORY / "docs" / "pictures"
PICTURES = sorted(FOLDER.glob("*.svg"))
FROM_RUNS = ("kill_and_resume", "overlap")
SHOWN = re.compile(r"!\[([^\]]*)\]\(([^)]+\.svg)\)")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A script of the folder by its name, as `python docs/pictures/NAME.py` finds the others."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return lambda name: runpy.run_path(str(FOLDER / f"{name}.py"))


def words(picture: Path) -> list[str]:
    return [unescape(one) for one in re.findall(r"<text[^>]*>([^<]*)</text>", picture.read_text())]


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.name)
def test_a_picture_is_small_still_text_and_shown_with_words(picture: Path) -> None:
    text = picture.read_text()
    assert ElementTree.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"
    assert len(text) < 60_000
    assert "prefers-color-scheme: dark" in text and "<title>" in text and words(picture)
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


def test_the_recording_is_of_the_readme_s_commands() -> None:
    first = next(block for block in blocks(REPOSITORY / "README.md") if block.mark == "run")
    shown = words(FOLDER / "recording.svg")
    assert [line[2:] for line in shown if line.startswith("$ ")] == first.text.splitlines()
    hashes = [line for line in shown if line.startswith(' "weights_sha256"')]
    assert len(hashes) == 2 and len(set(hashes)) == 1
    assert any(line.startswith("ok: lost 0, repeated 0") for line in shown)


@pytest.mark.ranks
@pytest.mark.slow
def test_the_recording_can_be_made_again(tmp_path: Path, script: Any) -> None:
    """The script draws nothing unless the hashes are equal, and nothing is lost or repeated."""
    script("kill_and_resume")["main"](tmp_path)
    for name in ("recording.svg", "kill_and_resume.svg"):
        assert ElementTree.parse(tmp_path / name)
    assert any(
        line.startswith("kill -9 after step") for line in words(tmp_path / "kill_and_resume.svg")
    )
