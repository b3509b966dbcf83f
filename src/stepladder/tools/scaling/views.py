"""What `stepladder scale` has found, as a table, as CSV and as a page."""

from __future__ import annotations

import csv
import io
import math

import numpy as np
from rich.table import Table

from stepladder.tools import page
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

USEFUL = "useful"
COLOUR_OF = dict(zip([*PARTS, UNTOLD], page.COLOURS, strict=True)) | {USEFUL: "#b0b0b0"}


def as_table(scaling: Scaling) -> Table:
    """For the terminal. Lost: per cent of the step's time; - where it cannot be told."""
    shown = Table(title=f"{scaling.job}, {scaling.kind}")
    for head in ("processes", "ms per step", "range", "speed-up", "efficiency", *PARTS, "launch s"):
        shown.add_column(head, justify="right", overflow="fold")
    one = scaling.sizes[0]
    for size in scaling.sizes:
        shares = [
            "" if size is one else "-" if math.isnan(seconds) else f"{seconds / size.seconds:.0%}"
            for seconds in scaling_loss(size, one).values()
        ]
        shown.add_row(
            processes(size), page.number_of(1e3 * size.seconds), spread(size), f"{speedup(size, one):.2f}",
            f"{efficiency(size, one):.0%}", *shares, f"{size.launch:.1f}",
        )  # fmt: skip
    return shown


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
    verdicts = [page.paragraph(text, "verdict") for text in scaling.verdicts()]
    parts = [page.section("Result", page.paragraph(f"{scaling.kind[0].upper()}{scaling.kind[1:]}."), *verdicts)]
    if len(sizes) > 1:
        parts.append(page.section("Where the efficiency went", *_efficiency(scaling)))
    parts += [
        page.section("Times", page.table(*_times(scaling))),
        page.section("Speed-up", _speed_up(sizes)),
        page.section("A step's time", page.bars("a step's time by part", _steps(sizes), "ms", COLOUR_OF)),
    ]
    names = " and ".join(filter(None, [", ".join(str(s.nproc) for s in sizes[:-1]), str(sizes[-1].nproc)]))
    return page.page(f"{scaling.job} on {names} process{'es' * (names != '1')}", parts)


def _efficiency(scaling: Scaling) -> list[str]:
    """One bar per size, of a hundred per cent; and the largest size's losses in words, largest first."""
    one, last = scaling.sizes[0], scaling.sizes[-1]
    rows = {
        _label(size): {USEFUL: round(100 * efficiency(size, one))}
        | {name: max(0, round(100 * share)) for name, share in shares_lost(size, one).items()}
        for size in scaling.sizes[1:]
    }
    words = (
        "Per cent of a step's time. Useful is what the step would take if speed grew with the processes; each"
        " colour is what one part takes beyond that."
    )
    shares = shares_lost(last, one)
    meaning = [
        [name, page.number_of(1e3 * shares[name] * last.seconds), f"{shares[name]:.0%}", *scaling.parts[name]]
        for name in sorted(shares, key=lambda name: -shares[name])
    ]
    head = ["lost to", "ms", "of a step", "what it is", "what helps"]
    return [
        page.paragraph(words),
        page.bars("where the efficiency went, by part", rows, "", COLOUR_OF),
        page.paragraph(
            f"On {last.nproc} processes, of a step's {page.number_of(1e3 * last.seconds)} ms; below zero is won:"
        ),
        page.table(head, meaning, "words"),
    ]


def _times(scaling: Scaling) -> tuple[list[str], list[list[str]]]:
    one = scaling.sizes[0]
    head = ["processes", "ms per step", "range", "speed-up", "efficiency", "s to the first step"]
    rows = [
        [
            processes(s), page.number_of(1e3 * s.seconds), spread(s), f"{speedup(s, one):.2f}",
            f"{efficiency(s, one):.0%}", f"{s.launch:.1f}",
        ]
        for s in scaling.sizes
    ]  # fmt: skip
    if not scaling.outside:
        head.insert(3, "samples per s")
        for row, size in zip(rows, scaling.sizes, strict=True):
            row.insert(3, page.number_of(size.batch / size.seconds))
    return head, rows


def _speed_up(sizes: list[Size]) -> str:
    one, law, far = sizes[0], fitted(sizes), 2 * sizes[-1].nproc
    start = law.speedup(one.nproc)
    curves = {
        "ideal": [(float(n), n / one.nproc) for n in (one.nproc, far)],
        "fitted law": [(float(n), law.speedup(n) / start) for n in np.linspace(one.nproc, far, 60)],
        "measured": [(float(s.nproc), speedup(s, one)) for s in sizes],
    }
    return page.lines("speed-up", curves, "processes", "times as fast", dots=["measured"])


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


def spread(size: Size) -> str:
    return f"{page.number_of(1e3 * min(size.rounds))} to {page.number_of(1e3 * max(size.rounds))}"


def processes(size: Size) -> str:
    return f"{size.nproc} on {size.nodes} nodes" if size.nodes > 1 else str(size.nproc)
