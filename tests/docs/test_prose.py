"""The pages are plain English: no word of our own for a term that people search for, no riddle."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pages import REPOSITORY

DOCS = REPOSITORY / "docs"
# The log keeps the words of its time.
PAGES = [
    REPOSITORY / "README.md",
    REPOSITORY / "CONTRIBUTING.md",
    REPOSITORY / "CHANGELOG.md",
    *(page for page in sorted(DOCS.glob("*.md")) if page.stem not in ("log", "log-archive")),
    DOCS / "reference" / "python.md",
]
LESSONS = sorted((REPOSITORY / "lessons").rglob("*.md"))
NO_TEXT = re.compile(r"^```.*?^```|^ {4,}.*?$|<!--.*?-->|`[^`\n]+`", re.MULTILINE | re.DOTALL)
RULES = {
    "a `who` without a noun before it": r"(?:^|[.,;:(|] |\b(?:and|but|or|after|before|if|says|said|sees) )who (?:has|is|are|comes|knows|had)\b",
    "whoever": r"\bwhoever\b",
    "`as X has it`: say that X does it": r"\bas (?:[\w`'-]+ ){1,4}has it\b",
    "mend: fix": r"\bmend(?:s|ed|ing)?\b",
    "to part: to diverge": r"\b(?:runs|they|ranks) part\b",
    "what lasts, what passes: permanent, transient": r"\bwhat (?:lasts|passes)\b",
    "pretended: simulated": r"\bpretend(?:ed|s)?\b",
    "goes on: continues, resumes": r"\b(?:goes|go|went) on\b(?! (?:with|the|a|its))",
    "`for` in the place of because": r", for (?:it|they|there|he|she|only there|nobody|nothing|all|no)\b",
    "to bring, where a rank passes a value": r"\branks? (?:\d+ )?brings?\b",
    "to have to be said": r"\bhave to be said\b",
    "their doing": r"\b(?:our|their) doing\b",
    "all stand where": r"\bstand where\b",
    "where, in the place of if": r"(?:^|(?<!\d)[.:] )Where (?:the|a|an|it|they|all|no)\b",
    "let go of: free": r"\blets? go (?:of|after)\b",
}
MOST_THAT_OF = 2
MOST_WORDS = 35  # of a sentence
# A paragraph or an item of a list ends at an empty line, at the next item or at a heading.
PARAGRAPH = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )|^#.*$|^\|.*$", re.MULTILINE)
SENTENCE_END = re.compile(r"(?<=[.!?])[)*\"]*\s+")
NOT_FOR_USERS = ("CHANGELOG.md", "checked-scripts.md", "python.md")
# A list of changes, what is made from data, and what nobody reads to its end.
NO_NEXT = ("CHANGELOG.md", "checked-scripts.md", "lineage.md")


def name_page(page: Path) -> str:
    """Return the page's name, with its folder if all lessons have a page of that name."""
    return page.name if page in PAGES else str(page.parent.relative_to(REPOSITORY))


def prose(page: Path) -> str:
    """Return the page's text in one line a paragraph, without code."""
    text = NO_TEXT.sub(" ", page.read_text(encoding="utf-8"))
    return re.sub(r"(?<!\n)\n(?![\n|#-])", " ", text)


@pytest.mark.parametrize("page", [*PAGES, *LESSONS], ids=name_page)
def test_the_words_of_a_page_are_plain(page: Path) -> None:
    text = prose(page)
    matches = [
        f"{what}: ... {text[max(0, match.start() - 40) : match.end() + 30]} ...".replace("\n", " ")
        for what, pattern in RULES.items()
        for match in re.finditer(pattern, text, re.IGNORECASE | re.MULTILINE)
    ]
    assert not matches, "\n".join(matches)


@pytest.mark.parametrize(
    "page",
    # These are lists of hundreds of lines.
    [page for page in [*PAGES, *LESSONS] if page.name not in ("CHANGELOG.md", "python.md")],
    ids=name_page,
)
def test_a_page_repeats_the_noun(page: Path) -> None:
    found = re.findall(r"\b(?:that|those) of\b", prose(page), re.IGNORECASE)
    assert len(found) <= MOST_THAT_OF, f"`that of` or `those of` {len(found)} times"


@pytest.mark.parametrize(
    "page", [page for page in [*PAGES, *LESSONS] if page.name not in NOT_FOR_USERS], ids=name_page
)
def test_no_sentence_is_long(page: Path) -> None:
    """Code counts as a word, and a link as its text."""
    text = re.sub(r"^```.*?^```|^ {4,}.*?$|<!--.*?-->", "\n\n", page.read_text(), flags=re.M | re.S)
    text = re.sub(r"`[^`]+`", "code", re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text))
    sentences = [
        sentence
        for paragraph in PARAGRAPH.split(text)
        for sentence in SENTENCE_END.split(" ".join(paragraph.split()))
    ]
    assert not [sentence for sentence in sentences if len(sentence.split()) > MOST_WORDS]


@pytest.mark.parametrize("page", [*PAGES, *LESSONS], ids=name_page)
def test_a_page_begins_with_what_it_is_for(page: Path) -> None:
    """A title and then a sentence, before any code, table or further heading."""
    lines = [line for line in page.read_text().splitlines() if line and not line.startswith("<!--")]
    assert lines[0].startswith("# ") and re.match(r"[A-Z\[*`]|!\[", lines[1])


@pytest.mark.parametrize(
    "page", [page for page in [*PAGES, *LESSONS] if page.name not in NO_NEXT], ids=name_page
)
def test_a_page_ends_with_where_to_go(page: Path) -> None:
    last = page.read_text().rstrip().split("\n\n")[-1]
    assert re.search(r"\]\([\w./-]+\.md[)#]", last), f"it ends with: {last[:100]}"


def test_the_rules_find_what_they_are_for() -> None:
    """Each rule matches a sentence that was on a page."""
    sentences = (
        "After a loss, who has finished the step gives its gradient to the others",
        "Whoever has something else is wrong",
        "started again, as several machines has it",
        "All six are mended",
        "Where two runs part",
        "it finds what passes",
        "pretended GPUs",
        "the training goes on",
        "It takes exact, for only there a microbatch has the same bits",
        "rank 1 brings 7 numbers",
        "clipping at 1.0 have to be said in build",
        "What it has done until now was our doing",
        "All stand where those stand that are ahead",
        "It ends. Where the ranks differ, it stops",
        "gloo lets go of the copies",
    )
    for pattern, sentence in zip(RULES.values(), sentences, strict=True):
        assert re.search(pattern, sentence, re.IGNORECASE | re.MULTILINE), sentence
    assert not any(
        re.search(pattern, "A user who has no GPU goes on with the lessons.", re.IGNORECASE)
        for pattern in RULES.values()
    )
