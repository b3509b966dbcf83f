"""One self-contained HTML page with SVG plots: no script, no network, readable on a phone and in the dark."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

import numpy as np

from stepladder.core import durable
from stepladder.core.errors import InputError

# Okabe and Ito, 2008: told apart by the colour-blind too.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#f0e442", "#7f7f7f")
WIDTH, HEIGHT = 640, 260
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 12, 40  # room for the axes' words
WIDTH_OF_NUMBER = 32  # in a bar
MOST_POINTS = 400  # of a curve: more than pixels can show

STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8882; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
svg { width: 100%; height: auto; } svg text { font: 12px system-ui, sans-serif; fill: currentColor; }
div.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .15rem .6rem .15rem 0; text-align: right; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; white-space: nowrap; }
td:last-child { overflow-wrap: anywhere; }
table.words td, table.words th { text-align: left; } table.words td:nth-child(-n+3) { white-space: nowrap; }
svg g.on text { fill: #000; }
p.verdict { border-left: 4px solid #0072b2; padding-left: .8rem; } p.bad { border-color: #d55e00; }
"""

Points = Sequence[tuple[float, float]]


def page(title: str, sections: Iterable[str]) -> str:
    """A whole document. sections: HTML, from the functions below."""
    return (
        '<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body>\n<h1>{escape(title)}</h1>\n"
        + "\n".join(sections)
        + "\n</body>\n</html>\n"
    )


def write_whole(output: Path, text: str) -> None:
    """The file, whole or not at all. Raises InputError where it cannot be written."""
    try:
        durable.write(output, text)
    except OSError as error:
        hint = "the name of a file in a folder that you can write"
        if not output.parent.is_dir():
            hint = f"mkdir -p {output.parent}"
        raise InputError(f"{output} cannot be written: {error.strerror}", hint) from error


def section(title: str, *parts: str) -> str:
    return f"<section><h2>{escape(title)}</h2>\n" + "\n".join(parts) + "</section>"


def paragraph(text: str, kind: str = "") -> str:
    """kind: "verdict" or "verdict bad" to stand out."""
    return f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def table(head: Sequence[str], rows: Iterable[Sequence[object]], kind: str = "") -> str:
    """kind: "words" for cells of text, from left to right."""

    def cells(tag: str, row: Sequence[object]) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(str(cell))}</{tag}>" for cell in row) + "</tr>"

    body = f"<thead>{cells('th', head)}</thead><tbody>{''.join(cells('td', row) for row in rows)}</tbody>"
    return f'<div class="wide"><table class="{kind}">{body}</table></div>'


def lines(name: str, series: Mapping[str, Points], x_name: str, y_name: str, dots: Collection[str] = ()) -> str:
    """Curves over one pair of axes, with a legend where there are several. dots: of which each point is marked."""
    series = {label: thin(points) for label, points in series.items() if points}
    every = np.array([point for points in series.values() for point in points], dtype=float)
    if not len(every):
        return paragraph(f"{name}: nothing was recorded.")
    axes = Axes(every[:, 0].min(), every[:, 0].max(), every[:, 1].min(), every[:, 1].max())
    parts = [axes.draw(x_name, y_name)]
    for number, (label, points) in enumerate(series.items()):
        colour = COLOURS[number % len(COLOURS)]
        places = [(axes.x(x), axes.y(y)) for x, y in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        if label in dots or len(points) == 1:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
        if len(series) > 1:
            parts.append(legend(label, colour, number))
    return svg(name, parts, HEIGHT + (18 * -(-len(series) // 4) if len(series) > 1 else 0))


def thin(points: Points) -> Points:
    """At most MOST_POINTS points, each the mean of its neighbours."""
    if len(points) <= MOST_POINTS:
        return points
    return [tuple(part.mean(0)) for part in np.array_split(np.array(points, dtype=float), MOST_POINTS)]


def bars(
    name: str, rows: Mapping[str, Mapping[str, float]], unit: str, colours: Mapping[str, str] | None = None
) -> str:
    """A stacked bar per row, its parts named in a legend: where a step's time goes, one row per size.

    unit: of the sum beside each bar; "" for none.
    """
    kinds = list(dict.fromkeys(kind for parts in rows.values() for kind in parts))
    colours = colours or {kind: COLOURS[number % len(COLOURS)] for number, kind in enumerate(kinds)}
    most = max((sum(parts.values()) for parts in rows.values()), default=0.0) or 1.0
    left, tall = 110, 26
    parts = []
    for number, (label, amounts) in enumerate(rows.items()):
        x, y = float(left), TOP + number * tall
        parts.append(text(left - 8, y + 14, label, "end"))
        for kind, amount in amounts.items():
            width = amount / most * (WIDTH - left - 90)
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{tall - 8}" fill="{colours[kind]}">'
                f"<title>{escape(kind)}: {number_of(amount)} {escape(unit)}</title></rect>"
            )
            if width > WIDTH_OF_NUMBER:
                parts.append(f'<g class="on">{text(x + width / 2, y + 13, number_of(amount), "middle")}</g>')
            x += width
        if unit:
            parts.append(text(x + 6, y + 14, f"{number_of(sum(amounts.values()))} {unit}"))
    below = TOP + len(rows) * tall
    parts += [legend(kind, colours[kind], n, below + 12) for n, kind in enumerate(kinds)]
    return svg(name, parts, below + 18 * -(-len(kinds) // 4) + 8)


def number_of(amount: float) -> str:
    """Three digits, and no exponent."""
    return f"{amount:.0f}" if abs(amount) >= 100 else f"{amount:.3g}"


def heat_map(name: str, rows: Sequence[str], x_values: Sequence[float], values: np.ndarray, unit: str) -> str:
    """One line of cells per row. values: shape (rows, columns), NaN where there is none; darker is more."""
    finite = values[np.isfinite(values)]
    lo, hi = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    tall, wide = min(22.0, 360 / len(rows)), (WIDTH - LEFT - RIGHT) / len(x_values)
    parts = []
    for y, row in enumerate(values):
        if len(rows) <= 16 or y % (len(rows) // 16 + 1) == 0:
            parts.append(text(LEFT - 6, TOP + tall * (y + 0.7), rows[y], "end"))
        for x, value in enumerate(row):
            if np.isfinite(value):
                share = (value - lo) / (hi - lo) if hi > lo else 0.0
                parts.append(
                    f'<rect x="{LEFT + x * wide:.1f}" y="{TOP + y * tall:.1f}" width="{wide + 0.3:.1f}"'
                    f' height="{tall - 1:.1f}" fill="#d55e00" fill-opacity="{0.08 + 0.92 * share:.2f}">'
                    f"<title>{escape(rows[y])}, step {x_values[x]:g}: {value:.3g} {escape(unit)}</title></rect>"
                )
    below = TOP + tall * len(rows) + 16
    parts.append(text(LEFT, below, f"step {x_values[0]:g}"))
    parts.append(text(WIDTH - RIGHT, below, f"step {x_values[-1]:g}", "end"))
    parts.append(text(WIDTH / 2, below, f"light {lo:.3g}, dark {hi:.3g} {unit}", "middle"))
    return svg(name, parts, int(below) + 8)


def spans(name: str, rows: Sequence[tuple[str, float, float, str]], x_name: str) -> str:
    """A horizontal bar per row (label, from, to, words inside) over a common axis."""
    first, last = min(row[1] for row in rows), max(row[2] for row in rows)
    room, tall = WIDTH - LEFT - RIGHT, 24
    parts = []
    for number, (label, lo, hi, inside) in enumerate(rows):
        y = TOP + number * tall
        x = LEFT + (lo - first) / ((last - first) or 1) * room
        width = max(2.0, (hi - lo) / ((last - first) or 1) * room)
        parts.append(text(LEFT - 6, y + 14, label, "end"))
        parts.append(
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{tall - 6}" fill="{COLOURS[5]}"'
            f' fill-opacity="0.6"><title>{escape(inside)}</title></rect>'
        )
        anchor, at = ("start", x + 4) if x < WIDTH / 2 else ("end", x + width - 4)
        parts.append(text(at, y + 13, inside, anchor))
    below = TOP + len(rows) * tall + 14
    parts.append(text(LEFT, below, f"{x_name} {first:g}"))
    parts.append(text(WIDTH - RIGHT, below, f"{x_name} {last:g}", "end"))
    return svg(name, parts, below + 8)


class Axes:
    """Linear axes over [x0, x1] and [y0, y1], the second widened to round numbers."""

    def __init__(self, x0: float, x1: float, y0: float, y1: float) -> None:
        self.x_ticks, self.y_ticks = ticks(x0, x1), ticks(y0, y1)
        self.x0, self.x1 = x0, x1 if x1 > x0 else x0 + 1
        self.y0, self.y1 = min(y0, self.y_ticks[0]), max(y1, self.y_ticks[-1])
        if self.y1 <= self.y0:  # a constant: in the middle
            room = abs(self.y0) / 2 or 1.0
            self.y0, self.y1 = self.y0 - room, self.y1 + room

    def x(self, value: float) -> float:
        return LEFT + (value - self.x0) / (self.x1 - self.x0) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.y0) / (self.y1 - self.y0) * (HEIGHT - TOP - BOTTOM)

    def draw(self, x_name: str, y_name: str) -> str:
        parts = []
        for tick in self.y_ticks:
            y = self.y(tick)
            parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="var(--line)"/>')
            parts.append(text(LEFT - 6, y + 4, f"{tick:g}", "end"))
        parts += [text(self.x(tick), HEIGHT - BOTTOM + 16, f"{tick:g}", "middle") for tick in self.x_ticks]
        parts.append(text(WIDTH - RIGHT, HEIGHT - 6, x_name, "end"))
        parts.append(text(4, HEIGHT - 6, y_name))
        return "".join(parts)


def ticks(lo: float, hi: float) -> list[float]:
    """About five round numbers within [lo, hi]."""
    if hi <= lo:
        return [lo]
    rough = (hi - lo) / 5
    base = 10.0 ** np.floor(np.log10(rough))
    step = next(base * factor for factor in (1, 2, 5, 10) if base * factor >= rough)
    return [float(round(k * step, 12)) for k in range(int(np.ceil(lo / step)), int(np.floor(hi / step)) + 1)]


def legend(label: str, colour: str, number: int, y: float = HEIGHT + 12) -> str:
    x, y = LEFT + (number % 4) * 142, y + 18 * (number // 4)
    return f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{colour}"/>' + text(x + 14, y, label)


def text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def svg(name: str, parts: Iterable[str], height: float) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(name)}">'
        f"<title>{escape(name)}</title>" + "".join(parts) + "</svg>"
    )
