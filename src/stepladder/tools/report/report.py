"""`stepladder report`: write one page about a run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from stepladder.core.console import print_message
from stepladder.core.masking import mask, mask_command
from stepladder.core.numbers import format_count
from stepladder.core.output_file import validate_writable, write_output
from stepladder.storage.audit import Audit, audit
from stepladder.storage.start_records import StartRecord
from stepladder.tools.pages.figures import Figure, draw_heat_map, draw_spans
from stepladder.tools.pages.line_chart import ChartEvent, Points, draw_lines, find_x_range
from stepladder.tools.pages.page import GENERATOR, render_page
from stepladder.tools.report.launches import LaunchRecord
from stepladder.tools.report.record import RunRecord, RunStart, read_run
from stepladder.tools.report.script_record import ScriptRecord, is_script_run, read_script_run
from stepladder.tools.report.series import RankTimes, compute_busy_time

SHOWN_HASH_DIGITS = 12
TRAINING_LOSS = "training loss"
EPOCH_LOSS = "train_loss"  # the mean over an epoch of what the curve shows


def write_report(run_dir: Path, output: Path) -> None:
    """Write the page. Raises InputError if there is no run, or the page cannot be written."""
    validate_writable(output, "-o", GENERATOR)
    if is_script_run(run_dir):
        script_record = read_script_run(run_dir)
        _print_warnings(script_record.warnings)
        page = _make_script_page(run_dir, script_record)
    else:
        record = read_run(run_dir)
        _print_warnings(record.warnings)
        page = _make_run_page(record, audit(run_dir))
    write_output(output, page, "-o")


def _print_warnings(warnings: list[str]) -> None:
    for warning in warnings:
        print_message(warning)


# -- the page of a job -----------------------------------------------------------------------------


def _make_run_page(record: RunRecord, audited: Audit) -> str:
    samples_per_s = [
        (step, steps_per_s * record.plan.global_batch)
        for step, steps_per_s in record.times.speeds.points
    ]
    starts = []
    for start in record.starts:
        processes = format_count(start.world_size, "process")
        text = f"{processes}, steps {start.first}-{start.last}"
        starts.append((f"start {start.attempt}", start.first, start.last, text))
    events = _list_events(record, audited)
    metrics = record.metrics
    curves = [metrics.losses, metrics.rates, *metrics.evaluations.values()]
    x_range = find_x_range([samples_per_s, *(curve.points for curve in curves)])
    faulty_epochs = [epoch for epoch in audited.epochs if epoch.lost or epoch.repeated]
    return render_page(
        "run.html",
        title=f"{record.name} in {record.run_dir}",
        outcome=_describe_outcome(record, audited),
        audited=audited,
        summary=list(_summarize_run(record)),
        curves=list(_draw_curves(record, events, x_range)),
        events=events,
        throughput=draw_lines(
            "throughput",
            {"samples": samples_per_s},
            "step",
            "samples per second",
            events=events,
            x_range=x_range,
        ),
        ranks=compare_ranks(record.times),
        starts=starts and draw_spans("starts", starts, "step"),
        ledger=_describe_ledger(audited),
        faulty_epochs=[
            [epoch.epoch + 1, epoch.lost, epoch.repeated, epoch.never_seen]
            for epoch in faulty_epochs
        ],
        environment=mask(record.config.environment),
        settings=mask(_describe_settings(record)),
    )


def _describe_settings(record: RunRecord) -> dict[str, Any]:
    """Return the settings of a run, with the microbatch that it has without the flag."""
    settings = dict(record.config.definition)
    if settings.get("microbatch") is None:
        settings["microbatch"] = "one pass per process"
        if settings.get("sync") == "exact":
            settings["microbatch"] = record.plan.microbatch
    return settings


def _describe_outcome(record: RunRecord, audited: Audit) -> str:
    state = "finished" if record.result else "not finished"
    changes = ""
    if audited.changes:
        changes = f", {format_count(audited.changes, 'change')} of processes"
    samples = f"samples lost {audited.lost}, repeated {audited.repeated}"
    return f"{state}: {record.progress}, {_describe_starts(record)}{changes}; {samples}"


def _describe_starts(record: RunRecord | ScriptRecord) -> str:
    """Return the number of starts, and of processes in each, such as "2 starts on 4, then 3"."""
    starts = format_count(len(record.starts), "start")
    if not record.starts:
        return starts
    noun = "process" if record.starts[-1].world_size == 1 else "processes"
    return f"{starts} on {describe_sizes(record)} {noun}"


def describe_sizes(record: RunRecord | ScriptRecord) -> str:
    """Return the numbers of processes in the order of the starts, such as "4, then 3"."""
    sizes = groupby(str(start.world_size) for start in record.starts)
    return ", then ".join(size for size, _ in sizes)


def _describe_ledger(audited: Audit) -> str:
    counts = (
        f"{format_count(audited.attempts, 'attempt')},"
        f" {format_count(audited.superseded, 'step')} rolled back and done again"
    )
    if audited.ok:
        return f"Every sample of each step was trained exactly once ({counts})."
    return f"Samples lost: {audited.lost}, repeated: {audited.repeated} ({counts})."


def _summarize_run(record: RunRecord) -> Iterator[tuple[str, str]]:
    """Yield the names and values of what a reader asks first."""
    result = record.result
    if result and result.best:
        best = result.best
        yield f"best {best.metric}", f"{best.value:.6g}, after step {best.step}"
    for name, value in record.metrics.last_evaluation.items():
        yield f"last {name}", f"{value:.6g}"
    if result:
        yield "weights_sha256", result.weights_sha256[:SHOWN_HASH_DIGITS]
    records = [value for _, value in sorted(record.start_records.items())]
    if records:
        first, last = records[0], records[-1]
        end = last.ended or record.last_write
        yield "begun", format_time(first.begun)
        yield "duration", format_duration(max(0.0, end - first.begun))
        yield "host", ", ".join(dict.fromkeys(value.host for value in records))
        yield "command", first.command
        if last.command != first.command:
            yield "last command", last.command
    commit = record.config.environment.get("git_commit")
    yield "git commit", str(commit or "none: the run began outside of a repository")


def format_time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def format_duration(seconds: float) -> str:
    """Return a time in the two largest units, such as "2 h 5 min"."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, remaining_s = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {remaining_s} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def _list_events(record: RunRecord, audited: Audit) -> list[ChartEvent]:
    """Return the starts after the first one, and the changes of processes within starts."""
    events = []
    previous: RunStart | None = None
    for start in record.starts:
        if previous:
            ended = describe_end(previous, start, record.start_records)
            processes = format_count(start.world_size, "process")
            text = f"{ended}; start {start.attempt} continues after step {start.first}, {processes}"
            events.append(ChartEvent(start.first, f"start {start.attempt}", text))
        previous = start
    for change in audited.history:
        label = f"{len(change.lost)} lost" if change.lost else f"{len(change.joined)} joined"
        events.append(ChartEvent(change.step, label, change.sentence))
    return events


def describe_end(
    start: RunStart, following: RunStart, start_records: Mapping[int, StartRecord]
) -> str:
    """Return how a start ended, as far as it is recorded."""
    known = start_records.get(start.attempt)
    how = "stopped"
    if known and known.ended is None:
        how = "was killed"
    elif (known and known.failed) or start.last > following.first:
        how = "was interrupted"
    return f"start {start.attempt} {how} after step {start.last}"


def _draw_curves(
    record: RunRecord, events: list[ChartEvent], x_range: tuple[float, float] | None
) -> Iterator[Figure]:
    """Yield the loss of training and evaluation in one figure, then every other curve."""
    metrics = record.metrics
    losses: dict[str, Points] = {TRAINING_LOSS: metrics.losses.points}
    others: dict[str, Points] = {}
    for name, curve in metrics.evaluations.items():
        if name != EPOCH_LOSS:
            (losses if _is_loss(name) else others)[name] = curve.points
    dots = [name for name in losses if name != TRAINING_LOSS]
    yield draw_lines("loss", losses, "step", "loss", dots, events, x_range)
    for name, points in others.items():
        yield draw_lines(name, {name: points}, "step", name, [name], events, x_range)
    rates = {"learning rate": metrics.rates.points}
    yield draw_lines("learning rate", rates, "step", "learning rate", (), events, x_range)


def _is_loss(metric: str) -> bool:
    """Return whether a metric can be drawn over the training loss."""
    return metric.endswith("loss")


# -- the page of a script --------------------------------------------------------------------------


def _make_script_page(run_dir: Path, record: ScriptRecord) -> str:
    """Return the page of a script, which has no curves, samples or snapshots."""
    origin = record.starts[0].begun if record.starts else 0.0
    starts = []
    for number, start in enumerate(record.starts, start=1):
        text = f"{format_count(start.world_size, 'process')}, {format_count(start.steps, 'step')}"
        starts.append((f"start {number}", start.begun - origin, start.ended - origin, text))
    return render_page(
        "script.html",
        title=f"{record.name} in {run_dir}",
        outcome=f"{record.state}: {record.progress}, {_describe_starts(record)}",
        record=record,
        throughput=draw_lines(
            "throughput", {"steps": record.times.speeds.points}, "step", "steps per second"
        ),
        ranks=compare_ranks(record.times),
        starts=starts and draw_spans("starts", starts, "second"),
        launches=[_make_launch_row(launch) for launch in record.launches],
    )


def _make_launch_row(launch: LaunchRecord) -> list[object]:
    return [
        time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(launch.begun)),
        launch.host,
        "-" if launch.code is None else launch.code,
        launch.python,
        mask_command(launch.command),
    ]


# -- both ------------------------------------------------------------------------------------------


def compare_ranks(times: RankTimes) -> dict[str, object] | None:
    """Return what `times.html` shows of the ranks; None if no time was recorded.

    The rows have milliseconds per step.
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
    heat_map = Figure("time per step and rank", note="one window, which the table shows")
    if len(times.last_steps) > 1:
        heat_map = draw_heat_map(heat_map.name, labels, times.last_steps, busy_ms, "ms")
    return {
        "stragglers": times.describe_stragglers(),
        "heat_map": heat_map,
        "head": ["ms per step", *times.keys],
        "rows": rows,
    }
