"""`stepladder report`: write one page about a run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from stepladder.core.console import print_message
from stepladder.core.masking import mask, mask_command
from stepladder.core.output_file import validate_writable, write_output
from stepladder.storage.audit import Audit, audit
from stepladder.tools.pages.figures import Figure, draw_heat_map, draw_lines, draw_spans
from stepladder.tools.pages.page import render_page
from stepladder.tools.report.launches import LaunchRecord
from stepladder.tools.report.record import RunRecord, read_run
from stepladder.tools.report.script_record import ScriptRecord, is_script_run, read_script_run
from stepladder.tools.report.series import RankTimes, compute_busy_time


def write_report(run_dir: Path, output: Path) -> None:
    """Write the page. Raises InputError if there is no run, or the page cannot be written."""
    validate_writable(output, "-o")
    if is_script_run(run_dir):
        script_record = read_script_run(run_dir)
        print_warnings(script_record.warnings)
        page = make_script_page(run_dir, script_record)
    else:
        record = read_run(run_dir)
        print_warnings(record.warnings)
        page = make_run_page(record, audit(run_dir))
    write_output(output, page, "-o")


def print_warnings(warnings: list[str]) -> None:
    for warning in warnings:
        print_message(warning)


def make_run_page(record: RunRecord, audited: Audit) -> str:
    last_values = [(name, f"{value:.6g}") for name, value in record.metrics.last_evaluation.items()]
    if record.result:
        last_values.append(("weights_sha256", record.result.weights_sha256))
    samples_per_s = [
        (step, steps_per_s * record.plan.global_batch)
        for step, steps_per_s in record.times.speeds.points
    ]
    starts = []
    for start in record.starts:
        text = f"{start.world_size} process(es), steps {start.first}-{start.last}"
        starts.append((f"start {start.attempt}", start.first, start.last, text))
    return render_page(
        "run.html",
        title=f"{record.name} in {record.run_dir}",
        outcome=describe_outcome(record, audited),
        audited=audited,
        last_values=last_values,
        curves=list(draw_curves(record)),
        throughput=draw_lines(
            "throughput", {"samples": samples_per_s}, "step", "samples per second"
        ),
        ranks=compare_ranks(record.times),
        starts=starts and draw_spans("starts", starts, "step"),
        epochs=[
            [epoch.epoch + 1, epoch.lost, epoch.repeated, epoch.never_seen]
            for epoch in audited.epochs
        ],
        config=mask(asdict(record.config)),
    )


def describe_outcome(record: RunRecord, audited: Audit) -> str:
    state = "finished" if record.result else "not finished"
    starts = f"{len(record.starts)} start(s) on {format_world_sizes(record) or 0} process(es)"
    changes = ""
    if audited.changes:
        changes = f", {audited.changes} change(s) of processes"
    samples = f"samples lost {audited.lost}, repeated {audited.repeated}"
    return f"{state}: {record.progress}, {starts}{changes}; {samples}"


def make_script_page(run_dir: Path, record: ScriptRecord) -> str:
    """Return the page of a script, which has no curves, samples or snapshots."""
    origin = record.starts[0].begun if record.starts else 0.0
    starts = []
    for number, start in enumerate(record.starts, start=1):
        text = f"{start.world_size} process(es), {start.steps} steps"
        starts.append((f"start {number}", start.begun - origin, start.ended - origin, text))
    sizes = ""
    if starts:
        sizes = f" on {format_world_sizes(record)} process(es)"
    return render_page(
        "script.html",
        title=f"{record.name} in {run_dir}",
        outcome=f"{record.state}: {record.progress}, {len(starts)} start(s){sizes}",
        record=record,
        throughput=draw_lines(
            "throughput", {"steps": record.times.speeds.points}, "step", "steps per second"
        ),
        ranks=compare_ranks(record.times),
        starts=starts and draw_spans("starts", starts, "second"),
        launches=[make_launch_row(launch) for launch in record.launches],
    )


def make_launch_row(launch: LaunchRecord) -> list[object]:
    return [
        time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(launch.begun)),
        launch.host,
        "-" if launch.code is None else launch.code,
        launch.python,
        mask_command(launch.command),
    ]


def format_world_sizes(record: RunRecord | ScriptRecord) -> str:
    """Return the number of processes of each start, such as "4 > 3"."""
    return " > ".join(str(start.world_size) for start in record.starts)


def draw_curves(record: RunRecord) -> Iterator[Figure]:
    metrics = record.metrics
    yield draw_lines(
        "training loss",
        {"loss": metrics.losses.points},
        "step",
        "loss",
    )
    yield draw_lines(
        "learning rate",
        {"rate": metrics.rates.points},
        "step",
        "learning rate",
    )
    for name, curve in metrics.evaluations.items():
        yield draw_lines(
            name,
            {name: curve.points},
            "step",
            name,
            dots=[name],
        )


def compare_ranks(times: RankTimes) -> dict[str, object] | None:
    """Return what `times.html` shows of the ranks; None if no time was recorded.

    The rows have milliseconds per step. A straggler is (rank, times as long as the others).
    """
    if not times.last_steps:
        return None
    labels, cells = times.get_shown_rows()
    sums = cells.sum(1)
    milliseconds = 1e3 * sums[:, 1:] / sums[:, :1]
    rows = [
        [label, *(f"{phase:.3g}" for phase in phases)]
        for label, phases in zip(labels, milliseconds.tolist(), strict=True)
    ]
    busy_ms = 1e3 * compute_busy_time(cells)
    return {
        "stragglers": times.find_stragglers(),
        "heat_map": draw_heat_map(
            "time per step and rank", labels, times.last_steps, busy_ms, "ms"
        ),
        "head": ["ms per step", *times.keys],
        "rows": rows,
    }
