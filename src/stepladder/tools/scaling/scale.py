"""`stepladder scale`: what was measured on several sizes, in sentences, as a table, for programs
and as a page.
"""

from __future__ import annotations

import csv
import io
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.table import Table

from stepladder.tools.pages.figures import COLOURS, Figure, draw_bars, draw_lines, format_amount
from stepladder.tools.pages.page import render_page
from stepladder.tools.scaling.loss import MOST_PROCESSES, PARTS, UNTOLD, Size, fitted, useful_range

# What can be told of a script from outside: other words where it means something else than in a
# job.
OUTSIDE = {
    **PARTS,
    "data": ("waiting for a DataLoader", "more workers, or data in memory"),
    "communication": (
        "its thread sleeps: in an all-reduce, or for a disk",
        "fewer steps with larger batches",
    ),
    "replicated": ("the optimizer, which every process runs in full", "a larger batch"),
    UNTOLD: (
        "forward, backward and all-reduce of a GPU, which nobody sees from outside",
        "stepladder profile",
    ),
}
LEAST_SHARE = 0.02  # of a step's time, to be worth a word
MOST_BUSY = 0.1
HEAD = ("processes", "ms per step", "range", "speed-up", "efficiency")
USEFUL = "useful"
COLOUR_OF = dict(zip([*PARTS, UNTOLD], COLOURS, strict=True)) | {USEFUL: "#b0b0b0"}


@dataclass(frozen=True)
class Scaling:
    """What `scale` has found. weak: the batch grew with the number of processes.  outside: a
    script, whose samples nobody counted."""

    job: str
    weak: bool
    sizes: list[Size]
    outside: bool = False

    @property
    def kind(self) -> str:
        if self.outside and self.weak:
            return "weak scaling: a script's batch per process stays as it is, so N processes do N times the work"
        if self.outside:
            return "strong scaling: the script shares out one batch, as --strong says"
        return (
            "weak scaling: a fixed batch per process"
            if self.weak
            else "strong scaling: a fixed global batch"
        )

    @property
    def parts(self) -> dict[str, tuple[str, str]]:
        """What a step consists of, and for each part what it means here, and what helps."""
        return OUTSIDE if self.outside else PARTS

    def as_json(self) -> dict[str, Any]:
        one, law = self.sizes[0], fitted(self.sizes)
        useful, low, high = useful_range(self.sizes)
        sizes = [
            {
                "nproc": size.nproc,
                "nodes": size.nodes,
                "seconds_per_step": size.seconds,
                "rounds": size.rounds,
                "samples_per_second": None if self.outside else size.batch / size.seconds,
                "speedup": size.speedup(one),
                "efficiency": size.efficiency(one),
                "launch_seconds": size.launch,
                "lost": {name: None if math.isnan(s) else s for name, s in size.lost(one).items()},
            }
            for size in self.sizes
        ]
        predicted = {
            "contention": law.contention,
            "coherency": law.coherency,
            "useful_nproc": useful,
        }
        return {
            "schema": 1,
            "job": self.job,
            "outside": self.outside,
            "weak": self.weak,
            "sizes": sizes,
            "fit": {**predicted, "useful_range": [low, high]},
        }

    def verdicts(self) -> list[str]:
        """A sentence per size, and one on how many processes are useful."""
        one = self.sizes[0]
        said = [verdict(size, one, self.parts) for size in self.sizes[1:]]
        if len(self.sizes) > 1:
            said.append(predicted(self.sizes))
        busy = one.parts["cores"] / one.seconds
        if busy > MOST_BUSY:
            said.append(
                f"This machine was busy: on {one.nproc} process(es), for {busy:.0%} of a step's time no core was"
                " free. Other programs are part of these numbers; measure again when it is quiet."
            )
        if one.optimizers > 1:
            said.append(f"{one.optimizers} optimizers step in turn: a step here is one of theirs.")
        return said


def predicted(sizes: list[Size]) -> str:
    useful, low, high = useful_range(sizes)
    if useful == MOST_PROCESSES:
        return "No loss that grows with the number of processes was measured: nothing is said of more of them."
    span = f", {low} to {high} as the rounds vary" if low < high else ""
    return f"By the fitted law, efficiency stays above one half up to {useful} process(es){span}."


def verdict(size: Size, one: Size, meaning: dict[str, tuple[str, str]] = PARTS) -> str:
    """How fast, and where the lost time went, largest part first."""
    share = size.efficiency(one)
    start = f"{size.nproc} processes: {size.speedup(one):.2f} times as fast as {one.nproc}, efficiency {share:.0%}"
    parts = {name: part for name, part in size.shares_lost(one).items() if part > LEAST_SHARE}
    if share > 0.98 or not parts:
        return f"{start}."
    named = sorted(parts, key=lambda name: -parts[name])
    amounts = ", ".join(f"{name} {parts[name]:.0%}" for name in named)
    what, helps = meaning[named[0]]
    return f"{start}. Of each step's time, lost to: {amounts}. Most to {named[0]}: {what}. What helps: {helps}."


def as_table(scaling: Scaling) -> Table:
    """For the terminal. Lost: per cent of the step's time; - where it cannot be told."""
    shown = Table(title=f"{scaling.job}, {scaling.kind}")
    for head in (*HEAD, *PARTS, "launch s"):
        shown.add_column(head, justify="right", overflow="fold")
    one = scaling.sizes[0]
    for size in scaling.sizes:
        shares = [
            "" if size is one else "-" if math.isnan(seconds) else f"{seconds / size.seconds:.0%}"
            for seconds in size.lost(one).values()
        ]
        shown.add_row(*row(size, one), *shares, f"{size.launch:.1f}")
    return shown


def row(size: Size, one: Size) -> list[str]:
    """Below HEAD."""
    milliseconds = [
        format_amount(1e3 * seconds)
        for seconds in (size.seconds, min(size.rounds), max(size.rounds))
    ]
    return [
        processes(size),
        milliseconds[0],
        " to ".join(milliseconds[1:]),
        f"{size.speedup(one):.2f}",
        f"{size.efficiency(one):.0%}",
    ]


def as_csv(scaling: Scaling) -> str:
    rows = scaling.as_json()["sizes"]
    out = io.StringIO()
    names = [name for name in rows[0] if name not in ("lost", "rounds")]
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*names, *(f"lost_{part}" for part in PARTS)])
    for row in rows:
        writer.writerow([*(row[name] for name in names), *row["lost"].values()])
    return out.getvalue()


def as_page(scaling: Scaling) -> str:
    """A self-contained page: first where the efficiency went, then everything it is drawn from."""
    sizes = scaling.sizes
    names = " and ".join(
        filter(None, [", ".join(str(s.nproc) for s in sizes[:-1]), str(sizes[-1].nproc)])
    )
    return render_page(
        "scaling.html",
        title=f"{scaling.job} on {names} process{'es' * (names != '1')}",
        scaling=scaling,
        lost=_lost(scaling) if len(sizes) > 1 else None,
        times=_times(scaling),
        speed_up=_speed_up(sizes),
        steps=draw_bars("a step's time by part", _steps(sizes), "ms", COLOUR_OF),
    )


def _lost(scaling: Scaling) -> dict[str, object]:
    """One bar per size, of a hundred per cent; and the largest size's losses in words, largest
    first.
    """
    one, last = scaling.sizes[0], scaling.sizes[-1]
    bars_of = {
        _label(size): {USEFUL: round(100 * size.efficiency(one))}
        | {name: max(0, round(100 * share)) for name, share in size.shares_lost(one).items()}
        for size in scaling.sizes[1:]
    }
    shares = last.shares_lost(one)
    rows = [
        [
            name,
            format_amount(1e3 * shares[name] * last.seconds),
            f"{shares[name]:.0%}",
            *scaling.parts[name],
        ]
        for name in sorted(shares, key=lambda name: -shares[name])
    ]
    figure = draw_bars("where the efficiency went, by part", bars_of, "", COLOUR_OF)
    return {
        "figure": figure,
        "nproc": last.nproc,
        "milliseconds": format_amount(1e3 * last.seconds),
        "rows": rows,
    }


def _times(scaling: Scaling) -> dict[str, object]:
    head = [*HEAD, "s to the first step"]
    rows = [[*row(size, scaling.sizes[0]), f"{size.launch:.1f}"] for size in scaling.sizes]
    if not scaling.outside:
        head.insert(3, "samples per s")
        for shown, size in zip(rows, scaling.sizes, strict=True):
            shown.insert(3, format_amount(size.batch / size.seconds))
    return {"head": head, "rows": rows}


def _speed_up(sizes: list[Size]) -> Figure:
    one, law, far = sizes[0], fitted(sizes), 2 * sizes[-1].nproc
    start = law.speedup(one.nproc)
    curves = {
        "ideal": [(float(n), n / one.nproc) for n in (one.nproc, far)],
        "fitted law": [(float(n), law.speedup(n) / start) for n in np.linspace(one.nproc, far, 60)],
        "measured": [(float(s.nproc), s.speedup(one)) for s in sizes],
    }
    return draw_lines("speed-up", curves, "processes", "times as fast", dots=["measured"])


def _steps(sizes: list[Size]) -> dict[str, dict[str, float]]:
    """Milliseconds of each part."""
    rows = {}
    for size in sizes:
        known = {
            name: 1e3 * max(0.0, part) for name, part in size.parts.items() if not math.isnan(part)
        }
        rest = {UNTOLD: 1e3 * size.seconds - sum(known.values())} if len(known) < len(PARTS) else {}
        rows[_label(size)] = known | rest
    return rows


def _label(size: Size) -> str:
    if size.nodes > 1:
        return processes(size)
    return f"{size.nproc} process{'es' * (size.nproc > 1)}"


def processes(size: Size) -> str:
    return f"{size.nproc} on {size.nodes} nodes" if size.nodes > 1 else str(size.nproc)
