"""What `stepladder scale` has found, as a table, as CSV and as a page."""

from __future__ import annotations

import csv
import io
import math

import numpy as np
from rich.table import Table

from stepladder.tools.pages.figures import COLOURS, Figure, bars, lines, number_of
from stepladder.tools.pages.page import render
from stepladder.tools.scaling.loss import (
    PARTS,
    UNTOLD,
    Size,
    efficiency,
    fitted,
    scaling_loss,
    shares_lost,
    speedup,
)
from stepladder.tools.scaling.scale import Scaling

HEAD = ("processes", "ms per step", "range", "speed-up", "efficiency")
USEFUL = "useful"
COLOUR_OF = dict(zip([*PARTS, UNTOLD], COLOURS, strict=True)) | {USEFUL: "#b0b0b0"}


def as_table(scaling: Scaling) -> Table:
    """For the terminal. Lost: per cent of the step's time; - where it cannot be told."""
    shown = Table(title=f"{scaling.job}, {scaling.kind}")
    for head in (*HEAD, *PARTS, "launch s"):
        shown.add_column(head, justify="right", overflow="fold")
    one = scaling.sizes[0]
    for size in scaling.sizes:
        shares = [
            "" if size is one else "-" if math.isnan(seconds) else f"{seconds / size.seconds:.0%}"
            for seconds in scaling_loss(size, one).values()
        ]
        shown.add_row(*row(size, one), *shares, f"{size.launch:.1f}")
    return shown


def row(size: Size, one: Size) -> list[str]:
    """Below HEAD."""
    milliseconds = [number_of(1e3 * seconds) for seconds in (size.seconds, min(size.rounds), max(size.rounds))]
    return [
        processes(size), milliseconds[0], " to ".join(milliseconds[1:]), f"{speedup(size, one):.2f}",
        f"{efficiency(size, one):.0%}",
    ]  # fmt: skip


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
    names = " and ".join(filter(None, [", ".join(str(s.nproc) for s in sizes[:-1]), str(sizes[-1].nproc)]))
    return render(
        "scaling.html",
        title=f"{scaling.job} on {names} process{'es' * (names != '1')}",
        scaling=scaling,
        lost=_lost(scaling) if len(sizes) > 1 else None,
        times=_times(scaling),
        speed_up=_speed_up(sizes),
        steps=bars("a step's time by part", _steps(sizes), "ms", COLOUR_OF),
    )


def _lost(scaling: Scaling) -> dict[str, object]:
    """One bar per size, of a hundred per cent; and the largest size's losses in words, largest first."""
    one, last = scaling.sizes[0], scaling.sizes[-1]
    bars_of = {
        _label(size): {USEFUL: round(100 * efficiency(size, one))}
        | {name: max(0, round(100 * share)) for name, share in shares_lost(size, one).items()}
        for size in scaling.sizes[1:]
    }
    shares = shares_lost(last, one)
    rows = [
        [name, number_of(1e3 * shares[name] * last.seconds), f"{shares[name]:.0%}", *scaling.parts[name]]
        for name in sorted(shares, key=lambda name: -shares[name])
    ]
    figure = bars("where the efficiency went, by part", bars_of, "", COLOUR_OF)
    return {"figure": figure, "nproc": last.nproc, "milliseconds": number_of(1e3 * last.seconds), "rows": rows}


def _times(scaling: Scaling) -> dict[str, object]:
    head = [*HEAD, "s to the first step"]
    rows = [[*row(size, scaling.sizes[0]), f"{size.launch:.1f}"] for size in scaling.sizes]
    if not scaling.outside:
        head.insert(3, "samples per s")
        for shown, size in zip(rows, scaling.sizes, strict=True):
            shown.insert(3, number_of(size.batch / size.seconds))
    return {"head": head, "rows": rows}


def _speed_up(sizes: list[Size]) -> Figure:
    one, law, far = sizes[0], fitted(sizes), 2 * sizes[-1].nproc
    start = law.speedup(one.nproc)
    curves = {
        "ideal": [(float(n), n / one.nproc) for n in (one.nproc, far)],
        "fitted law": [(float(n), law.speedup(n) / start) for n in np.linspace(one.nproc, far, 60)],
        "measured": [(float(s.nproc), speedup(s, one)) for s in sizes],
    }
    return lines("speed-up", curves, "processes", "times as fast", dots=["measured"])


def _steps(sizes: list[Size]) -> dict[str, dict[str, float]]:
    """Milliseconds of each part."""
    rows = {}
    for size in sizes:
        known = {name: 1e3 * max(0.0, part) for name, part in size.parts.items() if not math.isnan(part)}
        rest = {UNTOLD: 1e3 * size.seconds - sum(known.values())} if len(known) < len(PARTS) else {}
        rows[_label(size)] = known | rest
    return rows


def _label(size: Size) -> str:
    return processes(size) + " processes" * (size.nodes == 1 and size.nproc > 1) + " process" * (size.nproc == 1)


def processes(size: Size) -> str:
    return f"{size.nproc} on {size.nodes} nodes" if size.nodes > 1 else str(size.nproc)
