"""python benchmarks/table.py [--write]

The figures that are worth comparing, and every figure that has a bar, in two tables: made of the
reports under benchmarks/results/, and kept in benchmarks/README.md. The sentences with figures in
the project's README are made of the same reports.

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
    "ddp_exchange": "the same script on gloo",
    "diff": "none measured; TTrace is near",
    "doctor": "none measured; NVRx's and DLRover's node checks are near",
    "exact_overhead": "`--sync ddp`",
    "exchange": "bare DDP, and all-reduce, on gloo",
    "formats": "the loader of each format: formats.md",
    "growth": "a loop by hand, DDP; torch.save, DCP's asynchronous save",
    "goodput": "torchrun, torchft",
    "gpt_time_to_188": "a well-known small recipe",
    "launch_time": "torchrun",
    "loader": "torchdata's StatefulDataLoader",
    "mnist_time_to_99": "the PyTorch example",
    "movielens_quality": "published figures",
    "movielens_speed": "a plain loop over a DataLoader",
    "shard_memory": "ZeroRedundancyOptimizer",
    "shards": "h5py, mosaicml-streaming, webdataset",
    "step_overhead": "Accelerate, Fabric, Lightning",
}


# Sentences of the project's README and rows of the first table: {report: pattern} is what the
# pattern's group matches there, {range: figure} the lowest and highest of its rows in repeats.md,
# [report] a link to a report.
SENTENCES = (
    "After `kill -9` of a [rank](docs/glossary.md#rank), two others take their next step after a"
    " median of {range: kill} s; torchrun, which restarts all ranks, needs {range: restart} s.",
    "{chaos: with the weights of the unbroken run: (.*)} runs that were killed at random moments"
    " ended with the weights of the unbroken run, to the bit.",
    "A step of `--sync exact` takes {range: exact} times as long as a step of `--sync ddp` with the"
    " same microbatches.",
    "A range is the lowest and the highest of several measurements; the"
    " [tables](benchmarks/README.md#figures) have the workloads, other tools and higher costs.",
)
FIGURES = (
    "from `kill -9` of a [rank](../docs/glossary.md#rank) to the next step, median | **{range: kill} s**;"
    " {repeats: kill, busy: .* ([0-9.]+) [|]} s beside ten other programs a core |"
    " torchrun, restarting: {range: restart} s | MLP, 3 processes, 12 to 36 kills each |"
    " [chaos_in_place], [launch_time], [repeats]",
    "runs killed at random moments that end with the weights of the unbroken run, to the bit |"
    " **{chaos: with the weights of the unbroken run: (.*)}** | | MLP; 26 kills of a rank, 12 inside of a snapshot,"
    " 12 double | [chaos]",
    "share of the time that goes into steps that count, with a kill every 5 s |"
    " **{goodput: continue [|] (.*?) [|]}** | torchft: {goodput: torchft [|] (.*?) [|]}; torchrun:"
    " {goodput: torchrun [|] (.*?) [|]} | MLP 64-1024-1, 3 processes, mean of three turns | [goodput]",
    "step time of DDP on gloo, relative to `--sync ddp` | **{range: exchange}x** | DDP on gloo |"
    " MLP 20-64-1, batch of 128, 2 processes of one machine | [exchange], [repeats]",
    "step time of `--sync exact`, relative to `--sync ddp` |"
    " **{range: exact}x** with the same microbatches; {range: exact, classic}x with one pass a process,"
    " {range: exact, small}x for a small net | `--sync ddp` | two convolutional nets for MNIST, microbatches of 16,"
    " 2 processes | [exact_overhead], [repeats]",
)
HEAD = "| what | Stepladder | beside it | workload | tables |\n| --- | --- | --- | --- | --- |"


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
    """Return what benchmarks/README.md has of the reports: both tables."""
    return f"{figures()}\n## All bars\n\nWhat stands under *limit* is the report's own reason why not more can be had, or what else was\nmeasured.\n\n{bars()}"


def bars() -> str:
    """Return the table of all bars, of all reports."""
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


def read_range(figure: str) -> str:
    """Return the lowest and highest of a figure's rows in repeats.md, as `2.4 to 5.3`."""
    rows = (RESULTS / "repeats.md").read_text(encoding="utf-8").splitlines()
    ratios = [line.split("|")[-2].strip() for line in rows if line.startswith(f"| {figure}:")]
    assert len(ratios) > 1, f"repeats.md has no two rows of {figure}"
    return f"{min(ratios, key=float)} to {max(ratios, key=float)}"


def read_figure(match: re.Match[str]) -> str:
    """Return the figure that a template names in braces."""
    if match[1] == "range":
        return read_range(match[2])
    report = (RESULTS / f"{match[1]}.md").read_text(encoding="utf-8")
    figure = re.search(match[2], report)
    assert figure is not None, f"{match[1]}.md has no {match[2]}"
    return figure[1].strip()


def fill(template: str) -> str:
    """Return a sentence or a row with the figures of the reports."""
    return re.sub(r"\{(\w+): (.*?)\}", read_figure, template)


def figures() -> str:
    """Return the table of the figures that are worth comparing."""
    rows = [re.sub(r"\[(\w+)\](?!\()", r"[\1](results/\1.md)", fill(row)) for row in FIGURES]
    return "\n".join([HEAD, *(f"| {row} |" for row in rows), ""])


def sentences() -> str:
    """Return the sentences of the project's README."""
    return " ".join(map(fill, SENTENCES)) + "\n"


def page(path: Path, made: str) -> str:
    """The page with what is made of the reports as they are now."""
    before, _, after = path.read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}\n{made}\n{END}{after.partition(END)[2]}"


def write() -> None:
    """Bring both pages up to date."""
    README.write_text(page(README, text()), encoding="utf-8")
    FRONT.write_text(page(FRONT, sentences()), encoding="utf-8")


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
