"""python benchmarks/table.py [--write]

Every figure that has a bar, in one table: made of the reports under benchmarks/results/, and kept
in benchmarks/README.md. The figures of the project's README are taken from the same reports.

In a report, a line `- PASS: WHAT: FOUND (bar: BAR)` or `- FAIL: ...` is a bar; a list's line
without either is about the bar above it, and says what the limit is."""

import argparse
import re
from pathlib import Path
from typing import NamedTuple

from report import RESULTS

README = Path(__file__).parent / "README.md"
FRONT = Path(__file__).parent.parent / "README.md"
BEGIN = "<!-- generated: python benchmarks/table.py --write -->\n"
END = "<!-- end -->"
LINE = re.compile(r"- (PASS|FAIL): (.*?)(?: \((?:of a )?bar: (.*?)\))?(;.*)?")
PEERS = {  # whom a report's figures are beside, where their names do not say it
    "check_corpus": "other tools: check_peers.md",
    "diff": "none known",
    "doctor": "none known",
    "exact_overhead": "`--sync ddp`",
    "exchange": "bare DDP, and all-reduce, on gloo",
    "growth": "a loop by hand, DDP; torch.save, DCP's asynchronous save",
    "goodput": "torchrun, torchft",
    "gpt_time_to_188": "a well-known small recipe",
    "launch_time": "torchrun",
    "mnist_time_to_99": "the PyTorch example",
    "movielens_quality": "published figures",
    "movielens_speed": "a plain loop over a DataLoader",
    "shard_memory": "ZeroRedundancyOptimizer",
    "shards": "h5py, mosaicml-streaming, webdataset",
    "step_overhead": "Accelerate, Fabric, Lightning",
}


# Sentences of the front page: {report: pattern} is what the pattern's group finds there, [report] a
# link to it.
FIGURES = (
    "**{chaos_in_place: (0[.]..).* s to the next step} s** from `kill -9` of a [rank](docs/glossary.md#rank) to"
    " the next step [chaos_in_place]; torchrun takes {launch_time: to next step [|] ([0-9.]+)} s [launch_time].",
    "**{chaos: with the weights of the unbroken run: (.*)}** runs that were killed at random moments ended with"
    " the bits of the unbroken run, and no sample was lost or repeated [chaos].",
    "**{goodput: continue [|] (.*?) [|]}** of the time goes into steps that count, with a kill every five seconds;"
    " torchft {goodput: torchft [|] (.*?) [|]}, torchrun {goodput: torchrun [|] (.*?) [|]} [goodput].",
    "**{step_overhead: the hand-written loop: (.*?) }** the time of a hand-written loop per step, on one process"
    " [step_overhead]; on two, bare DDP takes {exchange: sync ddp: times faster than bare DDP: (.*?) } our time"
    " for a step of a small model [exchange]. All on two CPU cores.",
)


class Row(NamedTuple):
    """One bar. report: the file's name.  limit: what is said about it besides."""

    report: str
    measured: str
    bar: str
    is_met: bool
    limit: str


def rows_of(path: Path) -> list[Row]:
    """The bars of one report, in its order."""
    rows: list[Row] = []
    after_bar = False  # whether the line above is a bar, or about one
    for line in path.read_text(encoding="utf-8").splitlines():
        if match := LINE.fullmatch(line):
            rows.append(
                Row(path.stem, match[2] + (match[4] or ""), match[3] or "", match[1] == "PASS", "")
            )
        elif after_bar and line.startswith("- "):
            rows[-1] = rows[-1]._replace(limit="; ".join(filter(None, (rows[-1].limit, line[2:]))))
        after_bar = bool(match) or (after_bar and line.startswith("- "))
    return rows


def text() -> str:
    """The table, of all reports."""
    rows = [row for path in sorted(RESULTS.glob("*.md")) for row in rows_of(path)]
    lines = [
        "| report | beside | found | bar | met | limit |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        name = f"[{row.report}](results/{row.report}.md)"
        cells = [
            name,
            PEERS.get(row.report, ""),
            row.measured,
            row.bar,
            "yes" if row.is_met else "**no**",
            row.limit,
        ]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    num_met = sum(row.is_met for row in rows)
    return "\n".join([f"{num_met} of {len(rows)} bars are met.", "", *lines, ""])


def figures() -> str:
    """The front page's list, with the figures of the reports."""

    def read_figure(match: re.Match[str]) -> str:
        report = (RESULTS / f"{match[1]}.md").read_text(encoding="utf-8")
        figure = re.search(match[2], report)
        assert figure is not None, f"{match[1]}.md has no {match[2]}"
        return figure[1]

    lines = [re.sub(r"\{(\w+): (.*?)\}", read_figure, sentence) for sentence in FIGURES]
    linked = [
        re.sub(r" \[(\w+)\](?!\()", r" ([table](benchmarks/results/\1.md))", line) for line in lines
    ]
    return "\n".join(f"- {line}" for line in linked)


def page(path: Path, made: str) -> str:
    """The page with what is made of the reports as they are now."""
    before, _, after = path.read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}\n{made}\n{END}{after.partition(END)[2]}"


def write() -> None:
    """Bring both pages up to date."""
    README.write_text(page(README, text()), encoding="utf-8")
    FRONT.write_text(page(FRONT, figures() + "\n"), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--write",
        action="store_true",
        help="put it into benchmarks/README.md, and the figures into README.md",
    )
    if parser.parse_args().write:
        write()
    else:
        print(text())


if __name__ == "__main__":
    main()
