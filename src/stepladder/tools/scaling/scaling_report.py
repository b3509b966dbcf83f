"""Report the results of `stepladder scale` as sentences, table, CSV, JSON and a page."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from stepladder.core.numbers import format_count
from stepladder.core.terminal import make_column_tables
from stepladder.tools.pages.figures import COLOURS, Figure, draw_bars, format_amount
from stepladder.tools.pages.line_chart import draw_lines
from stepladder.tools.pages.page import render_page
from stepladder.tools.scaling.efficiency import (
    MAX_PREDICTED_PROCESSES,
    STEP_PARTS,
    UNKNOWN_PART,
    SizeResult,
    estimate_useful_range,
    fit_results,
)

if TYPE_CHECKING:
    from rich.table import Table

# STEP_PARTS of a script, which is measured from outside.
SCRIPT_PARTS = {
    **STEP_PARTS,
    "data": ("waiting for a DataLoader", "more workers, or data in memory"),
    "communication": (
        "its thread sleeps: in an all-reduce, or for a disk",
        "fewer steps with larger batches",
    ),
    "replicated": ("the optimizer, which every process runs in full", "a larger batch"),
    UNKNOWN_PART: (
        "forward, backward and all-reduce of a GPU, which cannot be measured from outside",
        "stepladder profile",
    ),
}
MIN_REPORTED_SHARE = 0.02  # of a step's time
NO_SHARE = "0%"
MIN_SIZES_OF_LAW = 3  # two cannot tell a cost per process from one per pair
MAX_BUSY_SHARE = 0.1  # of a step's time without a free core, on a quiet machine
IDEAL_EFFICIENCY = 0.98  # at least: no lost time is reported
COLUMN_NAMES = ("processes", "ms per step", "range", "speed-up", "efficiency")
USEFUL_PART = "useful"
PART_COLOURS = dict(zip([*STEP_PARTS, UNKNOWN_PART], COLOURS, strict=True))
PART_COLOURS[USEFUL_PART] = "#b0b0b0"


@dataclass(frozen=True)
class Scaling:
    """The results of all sizes, the smallest first: it is the baseline.

    With `weak` the batch grows with the number of processes. The samples of a script are unknown.
    """

    job: str
    weak: bool
    sizes: list[SizeResult]
    is_script: bool = False

    @property
    def kind(self) -> str:
        if self.is_script and self.weak:
            return (
                "weak scaling: a script's batch per process stays as it is, so N processes do N"
                " times the work"
            )
        if self.is_script:
            return "strong scaling: the script shares out one batch, as --strong says"
        if self.weak:
            return "weak scaling: a fixed batch per process"
        return "strong scaling: a fixed global batch"

    @property
    def baseline(self) -> SizeResult:
        return self.sizes[0]

    @property
    def parts(self) -> dict[str, tuple[str, str]]:
        """The meaning of each part of a step, and what helps against its loss."""
        return SCRIPT_PARTS if self.is_script else STEP_PARTS

    def as_json(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "job": self.job,
            "outside": self.is_script,
            "weak": self.weak,
            "sizes": [self._size_as_json(size) for size in self.sizes],
            "fit": self._fit_as_json() if len(self.sizes) >= MIN_SIZES_OF_LAW else None,
        }

    def _fit_as_json(self) -> dict[str, Any]:
        law = fit_results(self.sizes)
        useful, low, high = estimate_useful_range(self.sizes)
        return {
            "contention": law.contention,
            "coherency": law.coherency,
            "useful_nproc": useful,
            "useful_range": [low, high],
        }

    def _size_as_json(self, size: SizeResult) -> dict[str, Any]:
        lost_seconds = size.lost_seconds(self.baseline)
        return {
            "nproc": size.nproc,
            "nodes": size.nodes,
            "seconds_per_step": size.seconds,
            "rounds": size.rounds,
            "samples_per_second": None if self.is_script else size.samples_per_second,
            "speedup": size.speedup(self.baseline),
            "efficiency": size.efficiency(self.baseline),
            "launch_seconds": size.launch,
            "lost": {name: None if math.isnan(s) else s for name, s in lost_seconds.items()},
        }

    def verdicts(self) -> list[str]:
        """Return a sentence per size, one on how many processes are useful, and warnings."""
        baseline = self.baseline
        sentences = [describe_size(size, baseline, self.parts) for size in self.sizes[1:]]
        if len(self.sizes) >= MIN_SIZES_OF_LAW:
            sentences.append(_describe_useful_range(self.sizes))
        busy_share = baseline.parts["cores"] / baseline.seconds
        if busy_share > MAX_BUSY_SHARE:
            sentences.append(
                f"This machine was busy: on {format_count(baseline.nproc, 'process')}, for"
                f" {busy_share:.0%} of a"
                " step's time no core was free. Other programs are part of these numbers; measure"
                " again when it is quiet."
            )
        if baseline.optimizers > 1:
            sentences.append(
                f"{baseline.optimizers} optimizers step in turn: a step here is one of theirs."
            )
        return sentences


def _describe_useful_range(sizes: list[SizeResult]) -> str:
    useful, low, high = estimate_useful_range(sizes)
    if useful == MAX_PREDICTED_PROCESSES:
        return (
            "No loss that grows with the number of processes was measured, so there is no"
            " prediction for more of them."
        )
    span = f", {low} to {high} as the rounds vary" if low < high else ""
    processes = format_count(useful, "process")
    return f"By the fitted law, efficiency falls below one half beyond {processes}{span}."


def describe_size(
    size: SizeResult, baseline: SizeResult, meanings: dict[str, tuple[str, str]] = STEP_PARTS
) -> str:
    """Return the speed-up, and the parts of a step that lost time, the largest first."""
    efficiency = size.efficiency(baseline)
    text = (
        f"{size.nproc} processes: {size.speedup(baseline):.2f} times as fast as {baseline.nproc},"
        f" efficiency {efficiency:.0%}."
    )
    shares = _sort_by_share(size.lost_shares(baseline))
    shares = {name: share for name, share in shares.items() if share > MIN_REPORTED_SHARE}
    if efficiency > IDEAL_EFFICIENCY or not shares:
        return text
    amounts = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    largest = next(iter(shares))
    meaning, remedy = meanings[largest]
    return (
        f"{text} Of each step's time, lost to: {amounts}. Most to {largest}: {meaning}."
        f" What helps: {remedy}."
    )


def _sort_by_share(shares: dict[str, float]) -> dict[str, float]:
    """Return the shares, the largest first."""
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def make_tables(scaling: Scaling, width: int) -> Iterator[Table]:
    """Return the tables for the terminal, with a column per size.

    The time that a part lost is in per cent of the step.
    """
    corner, *names = COLUMN_NAMES
    rows = [*names, *(f"lost to {part}" for part in STEP_PARTS), "launch s"]
    baseline = scaling.baseline
    columns = {}
    for size in scaling.sizes:
        shares = [""] * len(STEP_PARTS)
        if size is not baseline:
            lost_seconds = size.lost_seconds(baseline)
            shares = [_format_share(s / size.seconds) for s in lost_seconds.values()]
        heading, *cells = _make_row(size, baseline)
        columns[heading] = [*cells, *shares, f"{size.launch:.1f}"]
    filled = _find_filled(columns.values())
    rows = [rows[index] for index in filled]
    columns = {heading: [cells[index] for index in filled] for heading, cells in columns.items()}
    return make_column_tables(f"{scaling.job}, {scaling.kind}", corner, rows, columns, width)


def _find_filled(lines: Iterable[list[str]]) -> list[int]:
    """Return the places at which one of some lines of cells says something."""
    return [n for n, cells in enumerate(zip(*lines, strict=True)) if {*cells} - {"", NO_SHARE}]


def _format_share(share: float) -> str:
    if math.isnan(share):
        return "-"
    positive_zero = round(share, 2) + 0.0
    return f"{positive_zero:.0%}"


def _make_row(size: SizeResult, baseline: SizeResult) -> list[str]:
    """Return the cells of COLUMN_NAMES."""
    median, shortest, longest = (
        format_amount(1e3 * seconds)
        for seconds in (size.seconds, min(size.rounds), max(size.rounds))
    )
    return [
        _format_nproc(size),
        median,
        f"{shortest} to {longest}" if shortest != longest else "",
        f"{size.speedup(baseline):.2f}",
        f"{size.efficiency(baseline):.0%}",
    ]


def format_csv(scaling: Scaling) -> str:
    records = scaling.as_json()["sizes"]
    names = [name for name in records[0] if name not in ("lost", "rounds")]
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow([*names, *(f"lost_{part}" for part in STEP_PARTS)])
    for record in records:
        writer.writerow([*(record[name] for name in names), *record["lost"].values()])
    return stream.getvalue()


def render_scaling_page(scaling: Scaling) -> str:
    """Return a self-contained page that begins with the lost efficiency."""
    sizes = scaling.sizes
    *first_counts, last_count = (str(size.nproc) for size in sizes)
    counts = f"{', '.join(first_counts)} and {last_count}" if first_counts else last_count
    return render_page(
        "scaling.html",
        title=f"{scaling.job} on {counts} {'process' if counts == '1' else 'processes'}",
        scaling=scaling,
        lost=_make_loss_section(scaling) if len(sizes) > 1 else None,
        times=_make_times_section(scaling),
        speed_up=_draw_speedups(sizes),
        steps=draw_bars("a step's time by part", _make_step_bars(sizes), "ms", PART_COLOURS),
    )


def _make_loss_section(scaling: Scaling) -> dict[str, object]:
    """Return a figure with a bar of 100 per cent per size, and a table of the largest size."""
    baseline = scaling.baseline
    bars = {}
    for size in scaling.sizes[1:]:
        percents = {USEFUL_PART: round(100 * size.efficiency(baseline))}
        for name, share in size.lost_shares(baseline).items():
            percents[name] = max(0, round(100 * share))
        bars[_label_size(size)] = percents
    last = scaling.sizes[-1]
    rows = [
        [name, format_amount(1e3 * share * last.seconds), f"{share:.0%}"]
        for name, share in _sort_by_share(last.lost_shares(baseline)).items()
        if _format_share(share) != NO_SHARE
    ]
    return {
        "figure": draw_bars("where the efficiency went, by part", bars, "", PART_COLOURS),
        "nproc": last.nproc,
        "milliseconds": format_amount(1e3 * last.seconds),
        "rows": rows,
        "causes": [
            (name, f"{meaning}. What helps: {remedy}.")
            for name, (meaning, remedy) in ((name, scaling.parts[name]) for name, *_ in rows)
        ],
    }


def _make_times_section(scaling: Scaling) -> dict[str, object]:
    names = [*COLUMN_NAMES, "s to the first step"]
    rows = []
    for size in scaling.sizes:
        row = [*_make_row(size, scaling.baseline), f"{size.launch:.1f}"]
        if not scaling.is_script:
            row.insert(3, format_amount(size.samples_per_second))
        rows.append(row)
    if not scaling.is_script:
        names.insert(3, "samples per s")
    filled = _find_filled(rows)
    rows = [[row[index] for index in filled] for row in rows]
    return {"head": [names[index] for index in filled], "rows": rows}


def _draw_speedups(sizes: list[SizeResult]) -> Figure:
    baseline = sizes[0]
    min_nproc = baseline.nproc
    has_law = len(sizes) >= MIN_SIZES_OF_LAW
    max_nproc = sizes[-1].nproc * (1 + has_law)
    curves = {"ideal": [(float(n), n / min_nproc) for n in (min_nproc, max_nproc)]}
    if has_law:
        law = fit_results(sizes)
        start = law.speedup(min_nproc)
        fitted_counts = np.linspace(min_nproc, max_nproc, 60)
        curves["fitted law"] = [(float(n), law.speedup(n) / start) for n in fitted_counts]
    curves["measured"] = [(float(size.nproc), size.speedup(baseline)) for size in sizes]
    return draw_lines("speed-up", curves, "processes", "times as fast", dots=["measured"])


def _make_step_bars(sizes: list[SizeResult]) -> dict[str, dict[str, float]]:
    """Return the milliseconds of each part, by the label of a size."""
    bars = {}
    for size in sizes:
        parts = {
            name: 1e3 * max(0.0, seconds)
            for name, seconds in size.parts.items()
            if not math.isnan(seconds)
        }
        if len(parts) < len(STEP_PARTS):
            parts[UNKNOWN_PART] = 1e3 * size.seconds - sum(parts.values())
        bars[_label_size(size)] = parts
    return bars


def _label_size(size: SizeResult) -> str:
    if size.nodes > 1:
        return _format_nproc(size)
    return format_count(size.nproc, "process")


def _format_nproc(size: SizeResult) -> str:
    if size.nodes > 1:
        return f"{size.nproc} on {size.nodes} nodes"
    return str(size.nproc)
