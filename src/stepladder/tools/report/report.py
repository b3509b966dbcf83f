"""`stepladder report`: one page that tells a run's story."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stepladder.rank.progress import STEP_KEYS, TIMING_KEYS
from stepladder.storage.audit import Audit, audit
from stepladder.tools.page import heat_map, lines, page, paragraph, section, spans, table, write_whole
from stepladder.tools.report.record import Record, Window, read_record, stragglers
from stepladder.tools.report.script_record import ScriptRecord, is_script, read_script

MOST_COLUMNS = 120  # of the heat map


def write_report(run_dir: Path, output: Path) -> None:
    """Raises InputError where there is no run, or no place for the page."""
    if is_script(run_dir):
        write_whole(output, report_of_script(read_script(run_dir)))
    else:
        write_whole(output, report(read_record(run_dir), audit(run_dir)))


def report(record: Record, audited: Audit) -> str:
    """The page of a run: HTML."""
    recipe = record.config["definition"]["recipe"]
    return page(
        f"{recipe} in {record.run_dir}",
        [
            _outcome(record, audited), _curves(record), _throughput(record),
            _ranks(record.windows, TIMING_KEYS), _starts(record), _ledger(audited),
            _environment(record.config),
        ],
    )  # fmt: skip


def report_of_script(record: ScriptRecord) -> str:
    """The page of a script's run: HTML. Its curves, samples and snapshots are its own."""
    sizes = " > ".join(str(start.world_size) for start in record.starts)
    facts = f"{record.state}: {record.steps} optimizer steps, {len(record.starts)} start(s)"
    good = record.state in ("finished", "running")
    parts = [
        paragraph(facts + (f" on {sizes} process(es)" if sizes else ""), "verdict" if good else "verdict bad")
    ]
    if not record.starts:
        parts.append(paragraph("No step of a torch optimizer was made."))
    parts += [
        paragraph(f"Start {number}: rank(s) {', '.join(map(str, start.missing))} left no times in this folder.")
        for number, start in enumerate(record.starts, start=1)
        if start.missing
    ]
    if any(start.gpu for start in record.starts):
        parts.append(paragraph("On a GPU, compute is all but data: `stepladder profile` tells more apart."))
    speed = lines("throughput", {"steps": record.steps_per_second}, "step", "steps per second")
    return page(
        f"{record.name} in {record.run_dir}",
        [
            section("Outcome", *parts), section("Throughput", speed), _ranks(record.windows, STEP_KEYS),
            _starts_of_script(record), _launches(record),
        ],
    )  # fmt: skip


def _outcome(record: Record, audited: Audit) -> str:
    state = "finished" if record.result else "not finished"
    sizes = " > ".join(str(start.world_size) for start in record.starts)
    facts = paragraph(
        f"{state}: {record.progress}, {len(record.starts)} start(s) on {sizes or 0} process(es);"
        f" samples lost {audited.lost}, repeated {audited.repeated}",
        "verdict" if audited.ok else "verdict bad",
    )
    last: dict[str, Any] = record.evaluations[-1] if record.evaluations else {}
    values = [(name, f"{value:.6g}") for name, value in last.items() if name not in ("step", "epoch")]
    if record.result:
        values.append(("weights_sha256", record.result["weights_sha256"]))
    return section("Outcome", facts, table(["last evaluation", ""], values))


def _curves(record: Record) -> str:
    plots = [
        lines("training loss", {"loss": [(r["step"], r["loss"]) for r in record.steps]}, "step", "loss"),
        lines("learning rate", {"rate": [(r["step"], r["lr"]) for r in record.steps]}, "step", "learning rate"),
    ]
    names = dict.fromkeys(n for row in record.evaluations for n in row if n not in ("step", "epoch"))
    for name in names:
        points = [(r["step"], r[name]) for r in record.evaluations if name in r]
        plots.append(lines(name, {name: points}, "step", name, dots=[name]))
    return section("Curves", *plots)


def _throughput(record: Record) -> str:
    plot = lines("throughput", {"samples": record.samples_per_second}, "step", "samples per second")
    return section("Throughput", plot)


def _ranks(windows: list[Window], phases: Sequence[str]) -> str:
    if not windows:
        return section("Ranks", paragraph("No times were recorded."))
    parts = [
        paragraph(f"rank {rank} takes {times:.1f} times as long as the others for its share", "verdict bad")
        for rank, times in stragglers(windows)
    ] or [paragraph("No rank is clearly slower than the others.", "verdict")]
    chosen = [windows[i] for i in np.unique(np.linspace(0, len(windows) - 1, MOST_COLUMNS).astype(int))]
    ranks = max(len(window.seconds) for window in windows)
    values = np.full((ranks, len(chosen)), np.nan)
    for column, window in enumerate(chosen):
        values[: len(window.own), column] = 1e3 * window.own
    labels = [f"rank {rank}" for rank in range(ranks)]
    parts.append(paragraph("Milliseconds per step of each rank's own work (data and compute), before it waits:"))
    parts.append(heat_map("time per step and rank", labels, [w.last for w in chosen], values, "ms"))
    rows = []
    for rank in range(ranks):
        there = [window for window in windows if rank < len(window.seconds)]
        seconds = sum(window.seconds[rank] for window in there) / sum(window.count for window in there)
        rows.append([labels[rank], *(f"{1e3 * phase:.3g}" for phase in seconds)])
    parts.append(table(["ms per step", *phases], rows))
    return section("Ranks", *parts)


def _starts(record: Record) -> str:
    if not record.starts:
        return section("Starts", paragraph("The ranks have not started."))
    rows = [
        (
            f"start {s.attempt}",
            float(s.first),
            float(s.last),
            f"{s.world_size} process(es), steps {s.first}-{s.last}",
        )
        for s in record.starts
    ]
    return section("Starts and sizes", spans("starts", rows, "step"))


def _starts_of_script(record: ScriptRecord) -> str:
    if not record.starts:
        return ""
    zero = record.starts[0].begun
    rows = [
        (
            f"start {number}",
            s.begun - zero,
            s.ended - zero,
            f"{s.world_size} process(es), {s.steps} steps",
        )
        for number, s in enumerate(record.starts, start=1)
    ]
    return section("Starts and sizes", spans("starts", rows, "second"))


def _launches(record: ScriptRecord) -> str:
    rows = [
        (
            time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(one.begun)),
            one.host,
            "-" if one.code is None else one.code,
            one.python,
            one.command,
        )
        for one in record.launches
    ]
    return section("Launches", table(["begun (UTC)", "host", "exit code", "Python", "command"], rows, "words"))


def _ledger(audited: Audit) -> str:
    rows = [[e.epoch + 1, e.lost, e.repeated, e.never_seen] for e in audited.epochs]
    problems = [paragraph(problem, "verdict bad") for problem in audited.problems]
    text = f"{audited.attempts} attempt(s), {audited.superseded} step(s) rolled back and done again."
    return section("Ledger", paragraph(text), *problems, table(["epoch", "lost", "repeated", "never seen"], rows))


def _environment(config: dict[str, Any]) -> str:
    settings = table(["setting", ""], config["definition"].items())
    return section("Environment", table(["", ""], config["environment"].items()), settings)
