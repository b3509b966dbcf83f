"""Plots as figures: the position of each mark. The template `parts.html` draws them as SVG."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# The palette of Okabe and Ito (2008), which the colour-blind can distinguish.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#f0e442", "#7f7f7f")
HEAT_COLOUR = COLOURS[1]
SPAN_COLOUR = COLOURS[5]
# All lengths are in pixels.
WIDTH = 640
HEIGHT = 260
# The margins of a plot, which hold the labels of its axes.
LEFT = 64
RIGHT = 12
TOP = 12
BOTTOM = 40
PLOT_RIGHT = WIDTH - RIGHT
PLOT_BOTTOM = HEIGHT - BOTTOM
PLOT_WIDTH = WIDTH - LEFT - RIGHT
BARS_LEFT = 110
BARS_RIGHT = 90
MAX_BAR_WIDTH = WIDTH - BARS_LEFT - BARS_RIGHT
BAR_ROW_HEIGHT = 26
SPAN_ROW_HEIGHT = 24
MIN_WIDTH_OF_NUMBER = 32  # narrower parts of a bar show no number
MAX_HEAT_MAP_HEIGHT = 360
MAX_HEAT_MAP_LABELS = 16
MAX_PLOT_POINTS = 400  # of a curve: more than pixels can show
LEGEND_COLUMNS = 4
LEGEND_COLUMN_WIDTH = 142
LEGEND_ROW_HEIGHT = 18

Points = Sequence[tuple[float, float]]
Scale = Callable[[float], float]  # from a value to pixels


class Mark:
    """An SVG element. Its title is shown when the pointer is over it.

    Attributes are given as keywords: an underscore becomes a hyphen, and one at the end is dropped
    ("class_"). Floats are rounded to a tenth of a pixel.
    """

    def __init__(self, tag: str, text: str = "", title: str = "", **attributes: Any) -> None:
        self.tag = tag
        self.text = text
        self.title = title
        self.attributes: dict[str, Any] = {}
        for name, value in attributes.items():
            svg_name = name.rstrip("_").replace("_", "-")
            self.attributes[svg_name] = round(value, 1) if isinstance(value, float) else value


@dataclass(frozen=True)
class Figure:
    """A picture of marks, which has none if nothing was recorded. The name is its alt text."""

    name: str
    marks: list[Mark]
    height: float
    width: int = WIDTH


def make_text(
    x: float,
    y: float,
    text: str,
    anchor: str = "start",
    **attributes: Any,
) -> Mark:
    return Mark("text", text, x=x, y=y, text_anchor=anchor, **attributes)


def draw_lines(
    name: str,
    series: Mapping[str, Points],
    x_name: str,
    y_name: str,
    dots: Collection[str] = (),
) -> Figure:
    """Draw curves over one pair of axes, with a legend if there are several.

    The curves named in `dots` have a dot at each point.
    """
    series = {label: thin_points(points) for label, points in series.items() if points}
    all_points = np.array([point for points in series.values() for point in points], dtype=float)
    if not len(all_points):
        return Figure(name, [], 0)
    marks, x_scale, y_scale = draw_axes(all_points, x_name, y_name)
    colours = assign_colours(series)
    for label, points in series.items():
        pixels = [(x_scale(x), y_scale(y)) for x, y in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in pixels)
        colour = colours[label]
        curve = Mark(
            "polyline",
            points=path,
            fill="none",
            stroke=colour,
            stroke_width="1.6",
        )
        marks.append(curve)
        if label in dots or len(points) == 1:
            for x, y in pixels:
                dot = Mark("circle", cx=x, cy=y, r=3, fill=colour)
                marks.append(dot)
    if len(series) == 1:
        return Figure(name, marks, HEIGHT)
    return add_legend(name, marks, colours, HEIGHT)


def draw_axes(points: np.ndarray, x_name: str, y_name: str) -> tuple[list[Mark], Scale, Scale]:
    """Return linear axes for all points, and the scales of x and y.

    The y axis is widened to round numbers.
    """
    x_min, y_min = points.min(0)
    x_max, y_max = points.max(0)
    x_ticks = choose_ticks(x_min, x_max)
    y_ticks = choose_ticks(y_min, y_max)
    y_min = min(y_min, y_ticks[0])
    y_max = max(y_max, y_ticks[-1])
    if y_max <= y_min:  # a constant is drawn in the middle
        margin = abs(y_min) / 2 or 1.0
        y_min -= margin
        y_max += margin
    x_scale = make_scale(x_min, x_max, LEFT, PLOT_RIGHT)
    y_scale = make_scale(y_min, y_max, PLOT_BOTTOM, TOP)
    marks = []
    for tick in y_ticks:
        y = y_scale(tick)
        grid_line = Mark("path", d=f"M{LEFT} {y:.1f}H{PLOT_RIGHT}", stroke="var(--line)")
        label = make_text(LEFT - 6, y + 4, f"{tick:g}", "end")
        marks += [grid_line, label]
    for tick in x_ticks:
        label = make_text(x_scale(tick), PLOT_BOTTOM + 16, f"{tick:g}", "middle")
        marks.append(label)
    marks.append(make_text(PLOT_RIGHT, HEIGHT - 6, x_name, "end"))
    marks.append(make_text(4, HEIGHT - 6, y_name))
    return marks, x_scale, y_scale


def make_scale(lo: float, hi: float, lo_pixel: float, hi_pixel: float) -> Scale:
    """Return the linear scale that maps lo and hi to two pixels; an empty range has length 1."""
    pixels_per_unit = (hi_pixel - lo_pixel) / ((hi - lo) or 1)
    return lambda value: lo_pixel + (value - lo) * pixels_per_unit


def thin_points(points: Points) -> Points:
    """Return at most MAX_PLOT_POINTS points, each the mean of its neighbours."""
    if len(points) <= MAX_PLOT_POINTS:
        return points
    parts = np.array_split(np.array(points, dtype=float), MAX_PLOT_POINTS)
    return [tuple(part.mean(0)) for part in parts]


def draw_bars(
    name: str,
    rows: Mapping[str, Mapping[str, float]],
    unit: str,
    colours: Mapping[str, str],
) -> Figure:
    """Draw a stacked bar per row, with a legend of its parts.

    The sum is written beside each bar if there is a unit.
    """
    colours = {kind: colours[kind] for parts in rows.values() for kind in parts}
    max_sum = max((sum(parts.values()) for parts in rows.values()), default=0.0) or 1.0
    marks: list[Mark] = []
    for index, (label, parts) in enumerate(rows.items()):
        y = TOP + index * BAR_ROW_HEIGHT
        marks.append(make_text(BARS_LEFT - 8.0, y + 14, label, "end"))
        x = float(BARS_LEFT)
        for kind, amount in parts.items():
            width = amount / max_sum * MAX_BAR_WIDTH
            number = format_amount(amount)
            part = Mark(
                "rect",
                title=f"{kind}: {number} {unit}",
                x=x,
                y=y,
                width=width,
                height=BAR_ROW_HEIGHT - 8,
                fill=colours[kind],
            )
            marks.append(part)
            if width > MIN_WIDTH_OF_NUMBER:
                marks.append(make_text(x + width / 2, y + 13, number, "middle", class_="on"))
            x += width
        if unit:
            marks.append(make_text(x + 6, y + 14, f"{format_amount(sum(parts.values()))} {unit}"))
    return add_legend(name, marks, colours, TOP + len(rows) * BAR_ROW_HEIGHT)


def format_amount(amount: float) -> str:
    """Return the number with three digits and, for usual sizes, without an exponent."""
    return f"{amount:.0f}" if abs(amount) >= 100 else f"{amount:.3g}"


def draw_heat_map(
    name: str,
    labels: Sequence[str],
    x_values: Sequence[float],
    values: np.ndarray,
    unit: str,
) -> Figure:
    """Draw one line of cells per label; a greater value is darker.

    The values have shape (labels, x_values). A cell with NaN is not drawn.
    """
    finite = values[np.isfinite(values)]
    lo = 0.0
    hi = 1.0
    if finite.size:
        lo = float(finite.min())
        hi = float(finite.max())
    row_height = min(22.0, MAX_HEAT_MAP_HEIGHT / len(labels))
    column_width = PLOT_WIDTH / len(x_values)
    label_step = 1
    if len(labels) > MAX_HEAT_MAP_LABELS:
        label_step = len(labels) // MAX_HEAT_MAP_LABELS + 1
    marks = [
        make_text(LEFT - 6, TOP + row_height * (row + 0.7), labels[row], "end")
        for row in range(0, len(labels), label_step)
    ]
    for row, column in np.argwhere(np.isfinite(values)):
        value = values[row, column]
        share = 0.0
        if hi > lo:
            share = (value - lo) / (hi - lo)
        cell = Mark(
            "rect",
            title=f"{labels[row]}, step {x_values[column]:g}: {value:.3g} {unit}",
            x=LEFT + column * column_width,
            y=TOP + row * row_height,
            width=column_width + 0.3,
            height=row_height - 1,
            fill=HEAT_COLOUR,
            fill_opacity=f"{0.08 + 0.92 * share:.2f}",
        )
        marks.append(cell)
    below = TOP + row_height * len(labels) + 16
    marks += draw_axis_ends(below, "step", x_values[0], x_values[-1])
    marks.append(make_text(WIDTH / 2, below, f"light {lo:.3g}, dark {hi:.3g} {unit}", "middle"))
    return Figure(name, marks, int(below) + 8)


def draw_spans(name: str, rows: Sequence[tuple[str, float, float, str]], x_name: str) -> Figure:
    """Draw a horizontal bar per row (label, first, last, text inside) over a common axis."""
    first = min(row[1] for row in rows)
    last = max(row[2] for row in rows)
    x_scale = make_scale(first, last, LEFT, PLOT_RIGHT)
    marks = []
    for index, (label, lo, hi, text) in enumerate(rows):
        x = x_scale(lo)
        y = TOP + index * SPAN_ROW_HEIGHT
        width = max(2.0, x_scale(hi) - x)
        bar = Mark(
            "rect",
            title=text,
            x=x,
            y=y,
            width=width,
            height=SPAN_ROW_HEIGHT - 6,
            fill=SPAN_COLOUR,
            fill_opacity="0.6",
        )
        marks.append(make_text(LEFT - 6, y + 14, label, "end"))
        marks.append(bar)
        # The text grows to the right in the left half of the picture, and to the left in the other.
        if x < WIDTH / 2:
            marks.append(make_text(x + 4, y + 13, text, "start"))
        else:
            marks.append(make_text(x + width - 4, y + 13, text, "end"))
    below = TOP + len(rows) * SPAN_ROW_HEIGHT + 14
    marks += draw_axis_ends(below, x_name, first, last)
    return Figure(name, marks, below + 8)


def choose_ticks(lo: float, hi: float) -> list[float]:
    """Return about five round numbers within [lo, hi]."""
    if hi <= lo:
        return [lo]
    min_step = (hi - lo) / 5
    base = 10.0 ** np.floor(np.log10(min_step))
    step = next(base * factor for factor in (1, 2, 5, 10) if base * factor >= min_step)
    first = int(np.ceil(lo / step))
    last = int(np.floor(hi / step))
    return [float(round(index * step, 12)) for index in range(first, last + 1)]


def draw_axis_ends(y: float, x_name: str, first: float, last: float) -> list[Mark]:
    """Return the labels of both ends of an axis without ticks."""
    return [
        make_text(LEFT, y, f"{x_name} {first:g}"),
        make_text(PLOT_RIGHT, y, f"{x_name} {last:g}", "end"),
    ]


def assign_colours(kinds: Collection[str]) -> dict[str, str]:
    return {kind: COLOURS[index % len(COLOURS)] for index, kind in enumerate(kinds)}


def add_legend(name: str, marks: list[Mark], colours: Mapping[str, str], height: float) -> Figure:
    """Return the figure of the marks with a legend below them."""
    legend: list[Mark] = []
    for index, (kind, colour) in enumerate(colours.items()):
        row, column = divmod(index, LEGEND_COLUMNS)
        x = LEFT + column * LEGEND_COLUMN_WIDTH
        y = height + 12 + row * LEGEND_ROW_HEIGHT
        box = Mark(
            "rect",
            x=x,
            y=y - 9,
            width=10,
            height=10,
            fill=colour,
        )
        legend.append(box)
        legend.append(make_text(x + 14, y, kind))
    num_rows = -(-len(colours) // LEGEND_COLUMNS)
    return Figure(name, marks + legend, height + num_rows * LEGEND_ROW_HEIGHT + 8)
