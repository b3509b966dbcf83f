"""`stepladder report`: one page that tells a run's story."""

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
from stepladder.tools.report.record import RunRecord
from stepladder.tools.report.script_record import ScriptRecord, is_script_run
from stepladder.tools.report.series import RankTimes, compute_busy_time


def write_report(run_dir: Path, output: Path) -> None:
    """Raises InputError where there is no run, or no place for the page."""
    validate_writable(output, "-o")
    record = ScriptRecord(run_dir) if is_script_run(run_dir) else RunRecord(run_dir)
    for warning in record.warnings():
        print_message(warning)
    if isinstance(record, ScriptRecord):
        write_output(output, report_of_script(record), "-o")
    else:
        write_output(output, report(record, audit(run_dir)), "-o")


def report(record: RunRecord, audited: Audit) -> str:
    values = record.last_evaluation
    hashed = {"weights_sha256": record.result.weights_sha256} if record.result else {}
    changes = f", {audited.changes} change(s) of processes" if audited.changes else ""
    samples = [
        (step, speed * record.plan.global_batch) for step, speed in record.times.speeds.points
    ]
    starts = [
        (
            f"start {s.attempt}",
            s.first,
            s.last,
            f"{s.world_size} process(es), steps {s.first}-{s.last}",
        )
        for s in record.starts
    ]
    return render_page(
        "run.html",
        title=f"{record.name} in {record.run_dir}",
        outcome=f"{'finished' if record.result else 'not finished'}: {record.progress},"
        f" {len(starts)} start(s) on {sizes_of(record) or 0} process(es){changes};"
        f" samples lost {audited.lost}, repeated {audited.repeated}",
        audited=audited,
        last_values=[*((name, f"{value:.6g}") for name, value in values.items()), *hashed.items()],
        curves=list(curves(record)),
        throughput=draw_lines("throughput", {"samples": samples}, "step", "samples per second"),
        ranks=compare_ranks(record.times),
        starts=starts and draw_spans("starts", starts, "step"),
        epochs=[[e.epoch + 1, e.lost, e.repeated, e.never_seen] for e in audited.epochs],
        config=mask(asdict(record.config)),
    )


def report_of_script(record: ScriptRecord) -> str:
    """Its curves, samples and snapshots are its own."""
    zero = record.starts[0].begun if record.starts else 0.0
    starts = [
        (
            f"start {number}",
            s.begun - zero,
            s.ended - zero,
            f"{s.world_size} process(es), {s.steps} steps",
        )
        for number, s in enumerate(record.starts, start=1)
    ]
    on = f" on {sizes_of(record)} process(es)" if starts else ""
    launches = [
        [
            time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(one.begun)),
            one.host,
            "-" if one.code is None else one.code,
            one.python,
            mask_command(one.command),
        ]
        for one in record.launches
    ]
    return render_page(
        "script.html",
        title=f"{record.name} in {record.run_dir}",
        outcome=f"{record.state}: {record.progress}, {len(starts)} start(s){on}",
        record=record,
        throughput=draw_lines(
            "throughput", {"steps": record.times.speeds.points}, "step", "steps per second"
        ),
        ranks=compare_ranks(record.times),
        starts=starts and draw_spans("starts", starts, "second"),
        launches=launches,
    )


def sizes_of(record: RunRecord | ScriptRecord) -> str:
    """Numbers of processes, one start after the other."""
    return " > ".join(str(start.world_size) for start in record.starts)


def curves(record: RunRecord) -> Iterator[Figure]:
    yield draw_lines("training loss", {"loss": record.losses.points}, "step", "loss")
    yield draw_lines("learning rate", {"rate": record.rates.points}, "step", "learning rate")
    for name, curve in record.evaluations.items():
        yield draw_lines(name, {name: curve.points}, "step", name, dots=[name])


def compare_ranks(times: RankTimes) -> dict[str, object] | None:
    """How ranks compare, for `times.html`; None where nothing was recorded.

    stragglers: (rank, times as long as the others).  rows: milliseconds per step, below `head`.
    """
    if not times.lasts:
        return None
    labels, cells = times.rows()
    sums = cells.sum(1)
    phases = 1e3 * sums[:, 1:] / sums[:, :1]
    rows = [
        [label, *(f"{phase:.3g}" for phase in row)]
        for label, row in zip(labels, phases.tolist(), strict=True)
    ]
    drawn = draw_heat_map(
        "time per step and rank", labels, times.lasts, 1e3 * compute_busy_time(cells), "ms"
    )
    return {
        "stragglers": times.stragglers(),
        "heat_map": drawn,
        "head": ["ms per step", *times.keys],
        "rows": rows,
    }
