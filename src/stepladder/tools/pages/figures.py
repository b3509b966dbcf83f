"""Plots as figures: marks of an SVG at their positions, or rows of boxes, drawn by `parts.html`."""

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
ROW_HEIGHT = 22
MAX_HEAT_MAP_HEIGHT = 360
MAX_HEAT_MAP_LABELS = 16
MIN_SPAN_WIDTH = 0.004  # of the row: one start may be of one step
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
class _Box:
    """A coloured part of a row. Both lengths are shares of the row's width.

    The title is shown when the pointer is over it, the text where there is room for it.
    """

    left: float
    width: float
    colour: str
    title: str
    text: str = ""
    opacity: float = 1.0


@dataclass(frozen=True)
class _BoxRow:
    """Boxes in one line, with a text on either side."""

    label: str
    boxes: Sequence[_Box]
    note: str = ""


@dataclass(frozen=True)
class Figure:
    """A picture of marks, or of rows, which the browser lays out.

    The name is its alt text, and the title above it. A figure without both has a note in their
    place, or says that nothing was recorded. The ends are written below the first and the last
    position of the rows. The legend has a swatch for each kind of mark. The values are a table
    below it, with its head as the first row: for keys and for those who see no picture.
    """

    name: str
    marks: Sequence[Mark] = ()
    height: float = 0
    rows: Sequence[_BoxRow] = ()
    row_height: float = ROW_HEIGHT
    ends: Sequence[str] = ()
    legend: Mapping[str, Mark] = field(default_factory=dict)
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
    max_sum = max((sum(parts.values()) for parts in rows.values()), default=0.0) or 1.0
    bars = []
    for label, parts in rows.items():
        boxes = []
        left = 0.0
        for kind, amount in parts.items():
            number = format_amount(amount)
            width = amount / max_sum
            boxes.append(_Box(left, width, colours[kind], f"{kind}: {number} {unit}", number))
            left += width
        note = ""
        if unit:
            note = f"{format_amount(sum(parts.values()))} {unit}"
        bars.append(_BoxRow(label, boxes, note))
    values = [["", *(f"{kind}, {unit}" if unit else kind for kind in colours)]]
    for label, parts in rows.items():
        values.append([label, *(format_amount(parts.get(kind, 0.0)) for kind in colours)])
    legend = {kind: _make_swatch(colour) for kind, colour in colours.items()}
    return Figure(name, rows=bars, legend=legend, values=values)


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
    label_step = -(-len(labels) // MAX_HEAT_MAP_LABELS)
    width = 1 / len(x_values)
    rows = []
    for number, (label, row) in enumerate(zip(labels, values.tolist(), strict=True)):
        cells = [
            _Box(
                column * width,
                width,
                HEAT_COLOUR,
                f"{label}, step {x:g}: {value:.3g} {unit}",
                opacity=value / (hi or 1),
            )
            for column, (x, value) in enumerate(zip(x_values, row, strict=True))
            if np.isfinite(value)
        ]
        rows.append(_BoxRow("" if number % label_step else label, cells))
    numbers = [["step", *labels]]
    for column, x in enumerate(x_values):
        texts = [f"{value:.3g}".replace("nan", "-") for value in values[:, column]]
        numbers.append([f"{x:g}", *texts])
    return Figure(
        name,
        rows=rows,
        row_height=min(ROW_HEIGHT, MAX_HEAT_MAP_HEIGHT / len(labels)),
        ends=(f"step {x_values[0]:g}", f"step {x_values[-1]:g}"),
        legend={
            f"{share * hi:.3g} {unit}": _make_swatch(HEAT_COLOUR, fill_opacity=share)
            for share in (0.25, 0.5, 0.75, 1.0)
        },
        values=numbers,
    )


def draw_spans(name: str, rows: Sequence[tuple[str, float, float, str]], x_name: str) -> Figure:
    """Draw a horizontal bar per row (label, first, last, text beside it) over a common axis."""
    first = min(row[1] for row in rows)
    last = max(row[2] for row in rows)
    scale = make_scale(first, last, 0, 1)
    spans = []
    for label, lo, hi, text in rows:
        width = max(MIN_SPAN_WIDTH, scale(hi) - scale(lo))
        spans.append(_BoxRow(label, [_Box(scale(lo), width, SPAN_COLOUR, text)], text))
    return Figure(name, rows=spans, ends=(f"{x_name} {first:g}", f"{x_name} {last:g}"))


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


def assign_colours(kinds: Collection[str]) -> dict[str, str]:
    return {kind: COLOURS[index % len(COLOURS)] for index, kind in enumerate(kinds)}
