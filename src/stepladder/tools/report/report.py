"""`stepladder report`: one page that tells a run's story."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from stepladder.core.output_file import refuse_unwritable, write_output
from stepladder.core.secrets import masked
from stepladder.rank.progress import STEP_KEYS, TIMING_KEYS
from stepladder.storage.audit import Audit, audit
from stepladder.tools.pages.figures import Figure, heat_map, lines, spans
from stepladder.tools.pages.page import render
from stepladder.tools.report.record import Record, Window, read_record, speeds, stragglers, values_of
from stepladder.tools.report.script_record import ScriptRecord, is_script, read_script

MOST_COLUMNS = 120  # of the heat map


def write_report(run_dir: Path, output: Path) -> None:
    """Raises InputError where there is no run, or no place for the page."""
    refuse_unwritable(output, "-o")
    if is_script(run_dir):
        page = report_of_script(read_script(run_dir))
    else:
        page = report(read_record(run_dir), audit(run_dir))
    write_output(output, page, "-o")


def report(record: Record, audited: Audit) -> str:
    last = values_of(record.evaluations[-1]) if record.evaluations else {}
    hashed = {"weights_sha256": record.result["weights_sha256"]} if record.result else {}
    starts = [
        (f"start {s.attempt}", s.first, s.last, f"{s.world_size} process(es), steps {s.first}-{s.last}")
        for s in record.starts
    ]
    return render(
        "run.html",
        title=f"{record.name} in {record.run_dir}",
        outcome=f"{'finished' if record.result else 'not finished'}: {record.progress},"
        f" {len(starts)} start(s) on {sizes_of(record) or 0} process(es);"
        f" samples lost {audited.lost}, repeated {audited.repeated}",
        audited=audited,
        last_values=[*((name, f"{value:.6g}") for name, value in last.items()), *hashed.items()],
        curves=list(curves(record)),
        throughput=lines(
            "throughput", {"samples": speeds(record.windows, record.batch)}, "step", "samples per second"
        ),
        ranks=compared(record.windows, TIMING_KEYS),
        starts=starts and spans("starts", starts, "step"),
        epochs=[[e.epoch + 1, e.lost, e.repeated, e.never_seen] for e in audited.epochs],
        config=masked(record.config),
    )


def report_of_script(record: ScriptRecord) -> str:
    """Its curves, samples and snapshots are its own."""
    zero = record.starts[0].begun if record.starts else 0.0
    starts = [
        (f"start {number}", s.begun - zero, s.ended - zero, f"{s.world_size} process(es), {s.steps} steps")
        for number, s in enumerate(record.starts, start=1)
    ]
    on = f" on {sizes_of(record)} process(es)" if starts else ""
    launches = [
        [
            time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(one.begun)), one.host,
            "-" if one.code is None else one.code, one.python, one.command,
        ]
        for one in record.launches
    ]  # fmt: skip
    return render(
        "script.html",
        title=f"{record.name} in {record.run_dir}",
        outcome=f"{record.state}: {record.progress}, {len(starts)} start(s){on}",
        record=record,
        throughput=lines("throughput", {"steps": speeds(record.windows)}, "step", "steps per second"),
        ranks=compared(record.windows, STEP_KEYS),
        starts=starts and spans("starts", starts, "second"),
        launches=launches,
    )


def sizes_of(record: Record | ScriptRecord) -> str:
    """Numbers of processes, one start after the other."""
    return " > ".join(str(start.world_size) for start in record.starts)


def curves(record: Record) -> Iterator[Figure]:
    yield lines("training loss", {"loss": [(r["step"], r["loss"]) for r in record.steps]}, "step", "loss")
    yield lines("learning rate", {"rate": [(r["step"], r["lr"]) for r in record.steps]}, "step", "learning rate")
    for name in dict.fromkeys(name for row in record.evaluations for name in values_of(row)):
        points = [(r["step"], r[name]) for r in record.evaluations if name in r]
        yield lines(name, {name: points}, "step", name, dots=[name])


def compared(windows: list[Window], keys: Sequence[str]) -> dict[str, object] | None:
    """How ranks compare, for `times.html`; None where nothing was recorded. keys: of the windows' seconds.

    stragglers: (rank, times as long as the others).  rows: milliseconds per step, below `head`.
    """
    if not windows:
        return None
    chosen = [windows[i] for i in np.unique(np.linspace(0, len(windows) - 1, MOST_COLUMNS).astype(int))]
    labels = [f"rank {rank}" for rank in range(max(len(window.seconds) for window in windows))]
    values = np.full((len(labels), len(chosen)), np.nan)
    for column, window in enumerate(chosen):
        values[: len(window.own), column] = 1e3 * window.own
    rows = []
    for rank, label in enumerate(labels):
        there = [window for window in windows if rank < len(window.seconds)]
        seconds = sum(window.seconds[rank] for window in there) / sum(window.count for window in there)
        rows.append([label, *(f"{1e3 * phase:.3g}" for phase in seconds)])
    drawn = heat_map("time per step and rank", labels, [window.last for window in chosen], values, "ms")
    head = ["ms per step", *keys]
    return {"stragglers": stragglers(windows), "heat_map": drawn, "head": head, "rows": rows}
