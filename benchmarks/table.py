"""python benchmarks/table.py [--write]

Every figure that has a bar, in one table: made of the reports under benchmarks/results/, and kept in
benchmarks/README.md. In a report, a line `- PASS: WHAT: FOUND (bar: BAR)` or `- FAIL: ...` is a bar; a list's line
without either is about the bar above it, and says what the limit is.
"""

import argparse
import re
from pathlib import Path
from typing import NamedTuple

from report import RESULTS

README = Path(__file__).parent / "README.md"
BEGIN, END = "<!-- generated: python benchmarks/table.py --write -->\n", "<!-- end -->"
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


class Row(NamedTuple):
    """One bar. report: the file's name.  limit: what is said about it besides."""

    report: str
    found: str
    bar: str
    met: bool
    limit: str


def rows_of(path: Path) -> list[Row]:
    """The bars of one report, in its order."""
    rows: list[Row] = []
    about = False  # whether the line above is a bar, or about one
    for line in path.read_text(encoding="utf-8").splitlines():
        if found := LINE.fullmatch(line):
            rows.append(Row(path.stem, found[2] + (found[4] or ""), found[3] or "", found[1] == "PASS", ""))
        elif about and line.startswith("- "):
            rows[-1] = rows[-1]._replace(limit="; ".join(filter(None, (rows[-1].limit, line[2:]))))
        about = bool(found) or (about and line.startswith("- "))
    return rows


def text() -> str:
    """The table, of all reports."""
    rows = [row for path in sorted(RESULTS.glob("*.md")) for row in rows_of(path)]
    lines = ["| report | beside | found | bar | met | limit |", "| --- | --- | --- | --- | --- | --- |"]
    for row in rows:
        name = f"[{row.report}](results/{row.report}.md)"
        cells = [name, PEERS.get(row.report, ""), row.found, row.bar, "yes" if row.met else "**no**", row.limit]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    met = sum(row.met for row in rows)
    return "\n".join([f"{met} of {len(rows)} bars are met.", "", *lines, ""])


def readme() -> str:
    """benchmarks/README.md with the table as the reports have it now."""
    before, _, rest = README.read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}\n{text()}\n{END}{rest.partition(END)[2]}"


def write() -> None:
    """Bring benchmarks/README.md up to date."""
    README.write_text(readme(), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true", help="put it into benchmarks/README.md")
    if parser.parse_args().write:
        write()
    else:
        print(text())


if __name__ == "__main__":
    main()
