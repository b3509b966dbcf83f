"""The table of all bars in benchmarks/README.md is that of the reports."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

REPORT = """# A question

- Date: 2026-11-21
- Machine: AMD EPYC

| way | us |
| --- | ---: |
| ours | 1 |

- PASS: one process: 1.01x (bar: <= 1.10x)
- FAIL: two processes | faster: 1.42x (bar: >= 2.00x)
- the limit is 1.5x: arithmetic
- on two cores
- PASS: killed: 50 of 50

- no bar
"""


@pytest.fixture
def table() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
        import table

        yield table


def test_it_is_up_to_date(table: ModuleType) -> None:
    pages = {table.README: table.text(), table.FRONT: table.sentences()}
    for path, made in pages.items():
        assert path.read_text() == table.page(path, made), "python benchmarks/table.py --write"


def test_the_first_table_has_the_figures_of_the_reports(table: ModuleType) -> None:
    made = table.figures()
    reports = Path(table.RESULTS)
    killed = "- PASS: killed, with the weights of the unbroken run: 50 of 50"
    assert killed in (reports / "chaos.md").read_text() and "| **50 of 50** |" in made
    assert "{" not in made + table.sentences()
    linked = set(re.findall(r"\(results/(\w+\.md)\)", made))
    assert len(linked) == 7 and all((reports / name).is_file() for name in linked)


def test_a_ratio_that_was_measured_several_times_is_a_range(table: ModuleType) -> None:
    rows = (Path(table.RESULTS) / "repeats.md").read_text().splitlines()
    ratios = [float(row.split("|")[-2]) for row in rows if row.startswith("| exchange: ")]
    assert f"**{min(ratios)} to {max(ratios)}x**" in table.figures() and len(ratios) > 2


def test_the_front_page_has_no_figure_that_the_table_has_not(table: ModuleType) -> None:
    figures = re.findall(r"\d[\d.]* (?:to|of) [\d.]+\d", table.sentences())
    assert len(figures) == 4
    assert not [figure for figure in figures if figure not in table.figures()]
    compared = re.findall(r"[\d.]+ (?:times|x) ", table.FRONT.read_text())
    assert len(compared) == 1, "each comparison is made of the reports"


def test_no_share_is_above_all(table: ModuleType) -> None:
    shares = re.findall(r"([\d.]+) %", table.figures() + table.FRONT.read_text())
    assert shares and max(map(float, shares)) <= 100


def test_a_report_s_bars_are_found_with_their_limits(table: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "steps.md").write_text(REPORT)
    assert table.rows_of(tmp_path / "steps.md") == [
        ("steps", "one process: 1.01x", "<= 1.10x", True, ""),
        (
            "steps",
            "two processes | faster: 1.42x",
            ">= 2.00x",
            False,
            "the limit is 1.5x: arithmetic; on two cores",
        ),
        ("steps", "killed: 50 of 50", "", True, ""),
    ]


def test_it_is_written_beside_the_other_text(
    table: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "steps.md").write_text(REPORT)
    page = tmp_path / "page"
    page.write_text(f"# Before\n\n{table.BEGIN}old\n{table.END}\n\n## After\n")
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    monkeypatch.setattr(table, "README", page)
    front = tmp_path / "front"
    front.write_text(f"{table.BEGIN}old\n{table.END}")
    monkeypatch.setattr(table, "FRONT", front)
    monkeypatch.setattr(table, "FIGURES", ("one | **{steps: process: (.*)x [(]}x** | [steps]",))
    monkeypatch.setattr(table, "SENTENCES", ("One takes {steps: process: (.*)x [(]} times.",))
    table.write()
    assert "\nOne takes 1.01 times.\n" in front.read_text()
    found = page.read_text()
    assert "| one | **1.01x** | [steps](results/steps.md) |" in found
    assert (
        found.startswith("# Before\n")
        and found.endswith(f"{table.END}\n\n## After\n")
        and "old" not in found
    )
    assert (
        "2 of 3 bars are met." in found
        and "two processes \\| faster: 1.42x | >= 2.00x | **no** |" in found
    )
