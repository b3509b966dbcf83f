"""Plots as figures: where each mark of a picture stands. The template `parts.html` draws them as
SVG.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# Okabe and Ito, 2008: told apart by the colour-blind too.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#f0e442", "#7f7f7f")
HEAT = "#d55e00"
WIDTH, HEIGHT = 640, 260
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 12, 40  # room for the axes' words
LEFT_OF_BARS, RIGHT_OF_BARS = 110, 90
ROW = 26  # of bars, and of spans
WIDTH_OF_NUMBER = 32  # in a bar
MAX_PLOT_POINTS = 400  # of a curve: more than pixels can show

Points = Sequence[tuple[float, float]]
Scale = Callable[[float], float]


class Mark:
    """An element of SVG. title: what a pointer over it shows.

    Attributes: numbers to a tenth of a pixel; a name's _ becomes -, the last one goes.
    """

    def __init__(self, tag: str, text: str = "", title: str = "", **attributes: Any) -> None:
        self.tag, self.text, self.title = tag, text, title
        self.attributes = {
            name.rstrip("_").replace("_", "-"): round(value, 1)
            if isinstance(value, float)
            else value
            for name, value in attributes.items()
        }


@dataclass(frozen=True)
class Figure:
    """WIDTH wide. name: for those who do not see it.  marks: none where nothing was recorded."""

    name: str
    marks: list[Mark]
    height: float
    width: int = WIDTH


def words(x: float, y: float, said: str, anchor: str = "start", **attributes: Any) -> Mark:
    return Mark("text", said, x=x, y=y, text_anchor=anchor, **attributes)


def draw_lines(
    name: str, series: Mapping[str, Points], x_name: str, y_name: str, dots: Collection[str] = ()
) -> Figure:
    """Curves over one pair of axes, with a legend where there are several. dots: of which each
    point is marked.
    """
    series = {label: thin_points(points) for label, points in series.items() if points}
    every = np.array([point for points in series.values() for point in points], dtype=float)
    if not len(every):
        return Figure(name, [], 0)
    marks, x_of, y_of = axes(every, x_name, y_name)
    for (label, points), colour in zip(series.items(), colours_of(series).values(), strict=True):
        places = [(x_of(x), y_of(y)) for x, y in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        marks.append(Mark("polyline", points=path, fill="none", stroke=colour, stroke_width="1.6"))
        if label in dots or len(points) == 1:
            marks += [Mark("circle", cx=x, cy=y, r=3, fill=colour) for x, y in places]
    if len(series) == 1:
        return Figure(name, marks, HEIGHT)
    return with_legend(name, marks, colours_of(series), HEIGHT)


def axes(points: np.ndarray, x_name: str, y_name: str) -> tuple[list[Mark], Scale, Scale]:
    """Linear axes for all points, the second widened to round numbers; and where a value stands on
    each.
    """
    (x0, y0), (x1, y1) = points.min(0), points.max(0)
    x_ticks, y_ticks = choose_ticks(x0, x1), choose_ticks(y0, y1)
    y0, y1 = min(y0, y_ticks[0]), max(y1, y_ticks[-1])
    if y1 <= y0:  # a constant: in the middle
        room = abs(y0) / 2 or 1.0
        y0, y1 = y0 - room, y1 + room
    x_of, y_of = scale(x0, x1, LEFT, WIDTH - RIGHT), scale(y0, y1, HEIGHT - BOTTOM, TOP)
    marks = []
    for tick in y_ticks:
        y = y_of(tick)
        marks.append(Mark("path", d=f"M{LEFT} {y:.1f}H{WIDTH - RIGHT}", stroke="var(--line)"))
        marks.append(words(LEFT - 6, y + 4, f"{tick:g}", "end"))
    marks += [words(x_of(tick), HEIGHT - BOTTOM + 16, f"{tick:g}", "middle") for tick in x_ticks]
    marks += [words(WIDTH - RIGHT, HEIGHT - 6, x_name, "end"), words(4, HEIGHT - 6, y_name)]
    return marks, x_of, y_of


def scale(lo: float, hi: float, at_lo: float, at_hi: float) -> Scale:
    """Where a value stands in pixels. A range of nothing is one long."""
    unit = (at_hi - at_lo) / ((hi - lo) or 1)
    return lambda value: at_lo + (value - lo) * unit


def thin_points(points: Points) -> Points:
    """At most MOST_POINTS points, each the mean of its neighbours."""
    if len(points) <= MAX_PLOT_POINTS:
        return points
    return [
        tuple(part.mean(0))
        for part in np.array_split(np.array(points, dtype=float), MAX_PLOT_POINTS)
    ]


def draw_bars(
    name: str, rows: Mapping[str, Mapping[str, float]], unit: str, colours: Mapping[str, str]
) -> Figure:
    """A stacked bar per row, its parts named in a legend: where a step's time goes, one row per
    size.

    unit: of the sum beside each bar; "" for none.
    """
    colours = {kind: colours[kind] for parts in rows.values() for kind in parts}
    most = max((sum(parts.values()) for parts in rows.values()), default=0.0) or 1.0
    marks = []
    for number, (label, amounts) in enumerate(rows.items()):
        x, y = float(LEFT_OF_BARS), TOP + number * ROW
        marks.append(words(x - 8, y + 14, label, "end"))
        for kind, amount in amounts.items():
            width = amount / most * (WIDTH - LEFT_OF_BARS - RIGHT_OF_BARS)
            title = f"{kind}: {format_amount(amount)} {unit}"
            marks.append(
                Mark("rect", title=title, x=x, y=y, width=width, height=ROW - 8, fill=colours[kind])
            )
            if width > WIDTH_OF_NUMBER:
                marks.append(
                    words(x + width / 2, y + 13, format_amount(amount), "middle", class_="on")
                )
            x += width
        if unit:
            marks.append(words(x + 6, y + 14, f"{format_amount(sum(amounts.values()))} {unit}"))
    return with_legend(name, marks, colours, TOP + len(rows) * ROW)


def format_amount(amount: float) -> str:
    """Three digits, and no exponent."""
    return f"{amount:.0f}" if abs(amount) >= 100 else f"{amount:.3g}"


def draw_heat_map(
    name: str, rows: Sequence[str], x_values: Sequence[float], values: np.ndarray, unit: str
) -> Figure:
    """One line of cells per row. values: shape (rows, columns), NaN where there is none; darker is
    more.
    """
    finite = values[np.isfinite(values)]
    lo, hi = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    tall, wide = min(22.0, 360 / len(rows)), (WIDTH - LEFT - RIGHT) / len(x_values)
    every = len(rows) // 16 + 1 if len(rows) > 16 else 1  # of the rows is labelled
    marks = [
        words(LEFT - 6, TOP + tall * (y + 0.7), rows[y], "end") for y in range(0, len(rows), every)
    ]
    for y, x in np.argwhere(np.isfinite(values)):
        share = (values[y, x] - lo) / (hi - lo) if hi > lo else 0.0
        box: dict[str, Any] = {
            "x": LEFT + x * wide,
            "y": TOP + y * tall,
            "width": wide + 0.3,
            "height": tall - 1,
        }
        title = f"{rows[y]}, step {x_values[x]:g}: {values[y, x]:.3g} {unit}"
        marks.append(
            Mark("rect", title=title, **box, fill=HEAT, fill_opacity=f"{0.08 + 0.92 * share:.2f}")
        )
    below = TOP + tall * len(rows) + 16
    marks += ends(below, "step", x_values[0], x_values[-1])
    marks.append(words(WIDTH / 2, below, f"light {lo:.3g}, dark {hi:.3g} {unit}", "middle"))
    return Figure(name, marks, int(below) + 8)


def draw_spans(name: str, rows: Sequence[tuple[str, float, float, str]], x_name: str) -> Figure:
    """A horizontal bar per row (label, from, to, words inside) over a common axis."""
    first, last = min(row[1] for row in rows), max(row[2] for row in rows)
    x_of, tall = scale(first, last, LEFT, WIDTH - RIGHT), 24
    marks = []
    for number, (label, lo, hi, inside) in enumerate(rows):
        x, y, width = x_of(lo), TOP + number * tall, max(2.0, x_of(hi) - x_of(lo))
        box: dict[str, Any] = {"x": x, "y": y, "width": width, "height": tall - 6}
        marks.append(words(LEFT - 6, y + 14, label, "end"))
        marks.append(Mark("rect", title=inside, **box, fill=COLOURS[5], fill_opacity="0.6"))
        anchor, at = ("start", x + 4) if x < WIDTH / 2 else ("end", x + width - 4)
        marks.append(words(at, y + 13, inside, anchor))
    below = TOP + len(rows) * tall + 14
    return Figure(name, marks + ends(below, x_name, first, last), below + 8)


def choose_ticks(lo: float, hi: float) -> list[float]:
    """About five round numbers within [lo, hi]."""
    if hi <= lo:
        return [lo]
    rough = (hi - lo) / 5
    base = 10.0 ** np.floor(np.log10(rough))
    step = next(base * factor for factor in (1, 2, 5, 10) if base * factor >= rough)
    return [
        float(round(k * step, 12))
        for k in range(int(np.ceil(lo / step)), int(np.floor(hi / step)) + 1)
    ]


def ends(y: float, x_name: str, first: float, last: float) -> list[Mark]:
    """The two ends of an axis without ticks."""
    return [
        words(LEFT, y, f"{x_name} {first:g}"),
        words(WIDTH - RIGHT, y, f"{x_name} {last:g}", "end"),
    ]


def colours_of(kinds: Collection[str]) -> dict[str, str]:
    return {kind: COLOURS[number % len(COLOURS)] for number, kind in enumerate(kinds)}


def with_legend(name: str, marks: list[Mark], colours: Mapping[str, str], height: float) -> Figure:
    """The figure with a legend below it, four kinds in a line."""
    for number, (kind, colour) in enumerate(colours.items()):
        x, y = LEFT + (number % 4) * 142, height + 12 + 18 * (number // 4)
        marks += [
            Mark("rect", x=x, y=y - 9, width=10, height=10, fill=colour),
            words(x + 14, y, kind),
        ]
    return Figure(name, marks, height + 18 * -(-len(colours) // 4) + 8)
