"""`stepladder report RUN RUN ...`: write one page that compares runs with the first of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepladder.core.console import print_message
from stepladder.core.errors import InputError, to_one_line
from stepladder.core.masking import mask
from stepladder.core.output_file import validate_writable, write_output
from stepladder.tools.diff.record_comparison import RecordComparison
from stepladder.tools.diff.recorded_run import RecordedRun
from stepladder.tools.diff.verdict import (
    DiffVerdict,
    explain_by_records,
    explain_without_rerun,
    shorten,
)
from stepladder.tools.pages.figures import COLOURS, Figure
from stepladder.tools.pages.line_chart import Points, draw_lines, find_x_range
from stepladder.tools.pages.page import GENERATOR, render_page
from stepladder.tools.report.record import RunRecord, read_run
from stepladder.tools.report.report import EPOCH_LOSS, describe_sizes, format_time
from stepladder.tools.report.script_record import is_script_run

MAX_RUNS = len(COLOURS)


def write_comparison(run_dirs: Sequence[Path], output: Path) -> None:
    """Write the page. Raises InputError if one of the folders is no run of a job."""
    validate_writable(output, "-o", GENERATOR)
    if len(run_dirs) > MAX_RUNS:
        raise InputError(
            f"{len(run_dirs)} runs, but a page compares at most {MAX_RUNS}", "fewer run directories"
        )
    for run_dir in run_dirs:
        if is_script_run(run_dir):
            raise InputError(
                f"{run_dir} is the run of a script, which has no curves to compare",
                f"stepladder report {run_dir}",
            )
    records = [read_run(run_dir) for run_dir in run_dirs]
    first, *later_runs = [RecordedRun(run_dir) for run_dir in run_dirs]
    comparisons = [RecordComparison(first, run) for run in later_runs]
    for run in (first, *later_runs):
        for problem in run.problems[:1]:
            print_message(f"{run.run_dir}: {problem}")
    names = _name_runs(run_dirs)
    page = render_page(
        "comparison.html",
        title=f"{', '.join(names)} compared",
        verdicts=[
            _describe_verdict(names[0], name, comparison)
            for name, comparison in zip(names[1:], comparisons, strict=True)
        ],
        runs=_make_runs_table(names, records),
        differences=_make_differences_table(names, comparisons),
        curves=_draw_curves(names, records),
    )
    write_output(output, page, "-o")


def _name_runs(run_dirs: Sequence[Path]) -> list[str]:
    """Return the last parts of the paths, with a number where these are not all different."""
    names = [path.absolute().name for path in run_dirs]
    if len(set(names)) == len(names):
        return names
    return [f"{name} ({number})" for number, name in enumerate(names, start=1)]


def _describe_verdict(first: str, second: str, comparison: RecordComparison) -> tuple[str, bool]:
    """Return a sentence about two runs, and whether they are equal in all that both recorded."""
    verdict: DiffVerdict = explain_by_records(comparison)
    hint = ""
    if not verdict.is_explained:
        verdict = explain_without_rerun(comparison, verdict)
        hint = "; stepladder diff trains both again, and names the step and the cause"
    return f"{first} and {second}: {verdict.sentence}{hint}", verdict.step is None


def _make_runs_table(names: Sequence[str], records: Sequence[RunRecord]) -> dict[str, object]:
    metrics = dict.fromkeys(
        metric for record in records for metric in record.metrics.last_evaluation
    )
    bests = [record.result.best if record.result else None for record in records]
    has_best = any(bests)
    rows = []
    for name, record, best in zip(names, records, bests, strict=True):
        row = [name, record.progress, describe_sizes(record)]
        if has_best:
            row.append(f"{best.metric} {best.value:.6g}" if best else "-")
        for metric in metrics:
            last = record.metrics.last_evaluation.get(metric)
            row.append("-" if last is None else f"{last:.6g}")
        starts = record.start_records
        begun = format_time(starts[min(starts)].begun) if starts else "-"
        rows.append([*row, begun, str(record.run_dir)])
    head = ["run", "steps", "processes", *["best"] * has_best]
    head += [f"last {metric}" for metric in metrics]
    return {"head": [*head, "begun", "folder"], "rows": rows}


def _make_differences_table(
    names: Sequence[str], comparisons: Sequence[RecordComparison]
) -> dict[str, object]:
    """Return what differs between the first run and any other: a row per value, a column per run.

    A run in which the value is that of the first run has an equals sign.
    """
    first_values: dict[str, Any] = {}
    columns: list[dict[str, Any]] = []
    for comparison in comparisons:
        column = {}
        values = comparison.settings + comparison.environment + comparison.remaining
        for value in values:
            first_values.setdefault(value.name, value.first)
            column[value.name] = value.second
        columns.append(column)
    rows = [
        [name, _format_value(name, first)]
        + [_format_value(name, column[name]) if name in column else "=" for column in columns]
        for name, first in first_values.items()
    ]
    return {"head": ["", *names], "rows": rows}


def _format_value(name: str, value: Any) -> str:
    return "-" if value is None else shorten(to_one_line(str(mask(value, name))))


def _draw_curves(names: Sequence[str], records: Sequence[RunRecord]) -> list[Figure]:
    """Return a figure for the training loss and for each metric that two runs have."""
    losses: dict[str, Points] = {}
    rates: dict[str, Points] = {}
    evaluated: dict[str, dict[str, Points]] = defaultdict(dict)
    for name, record in zip(names, records, strict=True):
        metrics = record.metrics
        losses[name] = metrics.losses.points
        rates[name] = metrics.rates.points
        for metric, curve in metrics.evaluations.items():
            evaluated[metric][name] = curve.points
    evaluated.pop(EPOCH_LOSS, None)
    compared = {metric: curves for metric, curves in evaluated.items() if len(curves) > 1}
    x_range = find_x_range(
        points for curves in (losses, rates, *compared.values()) for points in curves.values()
    )
    figures = [draw_lines("training loss", losses, "step", "loss", x_range=x_range)]
    for metric, curves in compared.items():
        figures.append(draw_lines(metric, curves, "step", metric, list(curves), x_range=x_range))
    figures.append(draw_lines("learning rate", rates, "step", "learning rate", x_range=x_range))
    return figures
