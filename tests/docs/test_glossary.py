"""A word of the glossary is linked where a page first uses it: those words that have an anchor
there.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pages import REPOSITORY

DOCS = REPOSITORY / "docs"
ANCHOR = re.compile(r'<a id="([\w-]+)"></a>')
IDS = ANCHOR.findall((DOCS / "glossary.md").read_text(encoding="utf-8"))
PAGES = [
    REPOSITORY / "README.md",
    *(
        page
        for page in sorted(DOCS.glob("*.md"))
        if page.stem not in ("glossary", "lineage", "log", "log-archive")
    ),
]
# Blocks and what is indented, headings, tables, comments, `code`, links: all that is no running
# text.
NO_TEXT = re.compile(
    r"^```.*?^```|^ {4,}.*?$|^#.*?$|^\|.*?$|<!--.*?-->|`[^`\n]+`|!?\[[^\]]*\]\([^)]*\)",
    re.MULTILINE | re.DOTALL,
)


def make_anchor_pattern(name: str) -> re.Pattern[str]:
    """An anchor's word as it stands in a text: with a space or a hyphen, in the plural too."""
    return re.compile(rf"(?<![\w-]){name.replace('-', '[- ]')}s?(?![\w-])", re.IGNORECASE)


def first_use(text: str, name: str) -> int | None:
    """Where the running text first has this word without a link."""
    plain = NO_TEXT.sub(lambda found: re.sub(r"\S", " ", found.group()), text)
    found = make_anchor_pattern(name).search(plain)
    return found.start() if found else None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_first_use_of_a_word_is_linked(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for name in IDS:
        use = first_use(text, name)
        link = text.find(f"glossary.md#{name})")
        assert use is None or -1 < link < use, (
            f"{page.name}: link the first `{name}` to glossary.md#{name}"
        )


def test_links_to_the_glossary_have_an_anchor_there() -> None:
    linked = {
        name
        for page in PAGES
        for name in re.findall(r"glossary\.md#([\w-]+)", page.read_text(encoding="utf-8"))
    }
    assert linked <= set(IDS)
