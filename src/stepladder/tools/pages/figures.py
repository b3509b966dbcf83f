"""Plots as figures: the position of each mark. The template `parts.html` draws them as SVG."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

# The hues of Okabe and Ito (2008), which the colour-blind can distinguish. Each is as bright as
# contrast asks for (WCAG AA): 3 to a white and to a dark page, 4.5 to black text in a bar.
COLOURS = ("#0081c9", "#dd6200", "#00a276", "#c977a5", "#c48700", "#489ac7", "#9b9327", "#848484")
HEAT_COLOUR = COLOURS[1]
SPAN_COLOUR = COLOURS[5]
# All lengths are in pixels.
WIDTH = 640
HEIGHT = 260
# The margins of a plot, which hold the labels of its axes.
LEFT = 76
RIGHT = 12
TOP = 12
BOTTOM = 40
PLOT_RIGHT = WIDTH - RIGHT
PLOT_BOTTOM = HEIGHT - BOTTOM
PLOT_WIDTH = WIDTH - LEFT - RIGHT
BARS_LEFT = 130
BARS_RIGHT = 90
MAX_BAR_WIDTH = WIDTH - BARS_LEFT - BARS_RIGHT
BAR_ROW_HEIGHT = 26
SPAN_ROW_HEIGHT = 24
MAX_HEAT_MAP_HEIGHT = 360
MAX_HEAT_MAP_LABELS = 16
NUM_TICKS = 5
LETTER_WIDTH = 10  # at most, where the page is narrow
SWATCH_WIDTH = 22
SWATCH_HEIGHT = 12

Scale = Callable[[float], float]  # from a value to pixels


class Mark:
    """An SVG element. Its title is shown when the pointer is over it.

    Attributes are given as keywords: an underscore becomes a hyphen, and one at the end is dropped
    ("class_"). Floats are rounded to a tenth of a pixel.
    """

    def __init__(
        self,
        tag: str,
        text: str = "",
        title: str = "",
        children: Sequence[Mark] = (),
        **attributes: Any,
    ) -> None:
        self.tag = tag
        self.text = text
        self.title = title
        self.children = children
        self.attributes: dict[str, Any] = {}
        for name, value in attributes.items():
            svg_name = name.rstrip("_").replace("_", "-")
            self.attributes[svg_name] = round(value, 1) if isinstance(value, float) else value


@dataclass(frozen=True)
class Figure:
    """A picture of marks. The name is its alt text, and the title above it.

    A figure without marks has a note in their place, or says that nothing was recorded. The legend
    has a swatch for each kind of mark. The values are a table below it, with its head as the first
    row: for keys and for those who see no picture.
    """

    name: str
    marks: list[Mark]
    height: float
    legend: Mapping[str, Mark] = field(default_factory=dict)
    width: int = WIDTH
    note: str = ""
    values: Sequence[Sequence[str]] = ()


def make_text(x: float, y: float, text: str, anchor: str = "start", **attributes: Any) -> Mark:
    return Mark("text", text, x=x, y=y, text_anchor=anchor, **attributes)


def _make_swatch(colour: str, **attributes: Any) -> Mark:
    """Return the entry of a legend for an area of a colour."""
    return Mark("rect", width=SWATCH_WIDTH, height=SWATCH_HEIGHT, fill=colour, **attributes)


def make_scale(lo: float, hi: float, lo_pixel: float, hi_pixel: float) -> Scale:
    """Return the linear scale that maps lo and hi to two pixels; an empty range has length 1."""
    pixels_per_unit = (hi_pixel - lo_pixel) / ((hi - lo) or 1)
    return lambda value: lo_pixel + (value - lo) * pixels_per_unit


def draw_bars(
    name: str, rows: Mapping[str, Mapping[str, float]], unit: str, colours: Mapping[str, str]
) -> Figure:
    """Draw a stacked bar per row, with a legend of its parts that are not 0.

    The sum is written beside each bar if there is a unit.
    """
    rows = {label: {k: v for k, v in parts.items() if v} for label, parts in rows.items()}
    colours = {kind: colours[kind] for parts in rows.values() for kind in parts}
    sums = [sum(parts.values()) for parts in rows.values()]
    max_sum = max(sums, default=0.0) or 1.0
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
            if width > len(number) * LETTER_WIDTH:
                marks.append(make_text(x + width / 2, y + 13, number, "middle", class_="on"))
            x += width
        if unit:
            marks.append(make_text(x + 6, y + 14, f"{format_amount(sum(parts.values()))} {unit}"))
    values = [["", *(f"{kind}, {unit}" if unit else kind for kind in colours)]]
    for label, parts in rows.items():
        values.append([label, *(format_amount(parts.get(kind, 0.0)) for kind in colours)])
    legend = {kind: _make_swatch(colour) for kind, colour in colours.items()}
    return Figure(name, marks, TOP + len(rows) * BAR_ROW_HEIGHT, legend, values=values)


def format_amount(amount: float) -> str:
    """Return the number with three digits and, for usual sizes, without an exponent."""
    return f"{amount:.0f}" if abs(amount) >= 100 else f"{amount:.3g}"


def draw_heat_map(
    name: str, labels: Sequence[str], x_values: Sequence[float], values: np.ndarray, unit: str
) -> Figure:
    """Draw one line of cells per label: the strength of the colour grows with the value, from 0.

    The values have shape (labels, x_values). A cell with NaN is not drawn.
    """
    finite = values[np.isfinite(values)]
    hi = float(finite.max()) if finite.size else 1.0
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
        cell = Mark(
            "rect",
            title=f"{labels[row]}, step {x_values[column]:g}: {value:.3g} {unit}",
            x=LEFT + column * column_width,
            y=TOP + row * row_height,
            width=column_width + 0.3,
            height=row_height - 1,
            fill=HEAT_COLOUR,
            fill_opacity=f"{value / (hi or 1):.2f}",
        )
        marks.append(cell)
    below = TOP + row_height * len(labels) + 16
    marks += _draw_axis_ends(below, "step", x_values[0], x_values[-1])
    legend = {
        f"{share * hi:.3g} {unit}": _make_swatch(HEAT_COLOUR, fill_opacity=share)
        for share in (0.25, 0.5, 0.75, 1.0)
    }
    numbers = [["step", *labels]]
    for column, x in enumerate(x_values):
        texts = [f"{value:.3g}".replace("nan", "-") for value in values[:, column]]
        numbers.append([f"{x:g}", *texts])
    return Figure(name, marks, int(below) + 8, legend, values=numbers)


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
    marks += _draw_axis_ends(below, x_name, first, last)
    return Figure(name, marks, below + 8)


def choose_ticks(lo: float, hi: float) -> list[float]:
    """Return about five round numbers within [lo, hi]."""
    if hi <= lo:
        return [lo]
    base = 10.0 ** np.floor(np.log10((hi - lo) / NUM_TICKS))

    def get_ticks(step: float) -> list[float]:
        first = int(np.ceil(lo / step))
        last = int(np.floor(hi / step))
        return [float(round(index * step, 12)) for index in range(first, last + 1)]

    choices = [get_ticks(base * factor) for factor in (10, 5, 2, 1)]
    return min(choices, key=lambda ticks: abs(len(ticks) - NUM_TICKS))


def _draw_axis_ends(y: float, x_name: str, first: float, last: float) -> list[Mark]:
    """Return the labels of both ends of an axis without ticks."""
    return [
        make_text(LEFT, y, f"{x_name} {first:g}"),
        make_text(PLOT_RIGHT, y, f"{x_name} {last:g}", "end"),
    ]


def assign_colours(kinds: Collection[str]) -> dict[str, str]:
    return {kind: COLOURS[index % len(COLOURS)] for index, kind in enumerate(kinds)}
