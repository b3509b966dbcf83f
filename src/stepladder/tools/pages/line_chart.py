"""Line charts: curves over one pair of axes, what happened, and the values under the pointer."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, pairwise

import numpy as np

from stepladder.tools.pages.figures import (
    HEIGHT,
    LEFT,
    LETTER_WIDTH,
    PLOT_BOTTOM,
    PLOT_RIGHT,
    SWATCH_HEIGHT,
    SWATCH_WIDTH,
    TOP,
    WIDTH,
    Figure,
    Mark,
    Scale,
    assign_colours,
    choose_ticks,
    format_amount,
    make_scale,
    make_text,
)

MAX_HOVER_BANDS = 120
DASHES = ("none", "7 3", "2 3", "10 3 2 3")  # of curves in turn: colours are not all there is
EVENT_COLOUR = "var(--muted)"
LABEL_ROW_HEIGHT = 18
NOTE_ROW_HEIGHT = 20
SWATCH_LINE = ((0, SWATCH_HEIGHT / 2), (SWATCH_WIDTH, SWATCH_HEIGHT / 2))  # in a legend

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class ChartEvent:
    """Something that happened at a position of the x axis, such as the loss of a rank."""

    x: float
    label: str  # a word or two, beside the line
    text: str


def draw_lines(
    name: str,
    series: Mapping[str, Points],
    x_name: str,
    y_name: str,
    dots: Collection[str] = (),
    events: Sequence[ChartEvent] = (),
    x_range: tuple[float, float] | None = None,
) -> Figure:
    """Draw curves over one pair of axes, with a legend if there are several.

    The values at a position appear when the pointer is there, and in a table below. If no curve
    has two points, or all values are the same, the figure says the values in words.

    Args:
        name: The figure's name.
        series: The points of each curve.
        x_name: The name of the x axis.
        y_name: The name of the y axis.
        dots: The names of the curves that have a dot at each point.
        events: What happened, drawn as lines from top to bottom.
        x_range: The first and the last position of the x axis; None for those of the points.
    """
    series = {label: points for label, points in series.items() if points}
    if all(len(points) == 1 for points in series.values()):
        return Figure(name, note=_describe_points(series, x_name))
    all_points = np.array([point for points in series.values() for point in points], dtype=float)
    first, lowest = all_points.min(0)
    last, highest = all_points.max(0)
    if lowest == highest:
        return Figure(name, note=f"{lowest:.6g} from {x_name} {first:g} to {last:g}")
    if x_range:
        first, last = x_range
    x_scale = make_scale(first, last, LEFT, PLOT_RIGHT)
    shown = [event for event in events if first <= event.x <= last]
    event_marks, top = _draw_events(sorted(shown, key=lambda event: event.x), x_scale)
    marks, y_scale = _draw_y_axis(lowest, highest, top, y_name)
    for tick in choose_ticks(first, last):
        if tick.is_integer():  # there is no half step or process
            marks.append(make_text(x_scale(tick), PLOT_BOTTOM + 16, f"{tick:g}", "middle"))
    marks.append(make_text(PLOT_RIGHT, HEIGHT - 6, x_name, "end"))
    colours = assign_colours(series)
    legend = {}
    for (label, points), dashes in zip(series.items(), cycle(DASHES), strict=False):
        pixels = [(x_scale(x), y_scale(y)) for x, y in points]
        has_dots = label in dots or len(points) == 1
        marks += _draw_curve(pixels, colours[label], dashes, has_dots)
        swatch = _draw_curve(SWATCH_LINE, colours[label], dashes, has_dots=False)
        legend[label] = Mark("g", children=swatch)
    if len(series) == 1:
        legend.clear()
    values = [[x_name, *series], *_read_values(series)]
    marks += _make_hover_bands(values, x_scale)
    marks += event_marks  # last, as the bands would hide their titles from the pointer
    return Figure(name, marks, HEIGHT, legend=legend, values=values)


def _draw_curve(pixels: Points, colour: str, dashes: str, has_dots: bool) -> list[Mark]:
    """Return a line through points, with a dot at each of them if there shall be dots."""
    curve = Mark(
        "polyline",
        points=" ".join(f"{x:.1f},{y:.1f}" for x, y in pixels),
        fill="none",
        stroke=colour,
        stroke_width="1.8",
        stroke_dasharray=dashes,
    )
    if not has_dots:
        return [curve]
    return [curve, *(Mark("circle", cx=x, cy=y, r=3, fill=colour) for x, y in pixels)]


def _describe_points(series: Mapping[str, Points], x_name: str) -> str:
    """Return in words what curves of one point would show."""
    values = [
        f"{label} {y:.6g} at {x_name} {x:g}" for label, points in series.items() for x, y in points
    ]
    return ", ".join(values)


def _draw_y_axis(lowest: float, highest: float, top: float, name: str) -> tuple[list[Mark], Scale]:
    """Return the marks of a linear axis, and its scale, whose highest value is at `top`.

    The axis is widened to round numbers.
    """
    ticks = choose_ticks(lowest, highest)
    scale = make_scale(min(lowest, ticks[0]), max(highest, ticks[-1]), PLOT_BOTTOM, top)
    marks = [make_text(4, HEIGHT - 6, name)]
    for tick in ticks:
        y = scale(tick)
        grid_line = Mark("path", d=f"M{LEFT} {y:.1f}H{PLOT_RIGHT}", stroke="var(--line)")
        marks += [grid_line, make_text(LEFT - 6, y + 4, f"{tick:g}", "end")]
    return marks, scale


def find_x_range(curves: Iterable[Points]) -> tuple[float, float] | None:
    """Return the first and the last position of all curves, if they have points."""
    positions = [x for points in curves for x, _ in points]
    return (min(positions), max(positions)) if positions else None


def _draw_events(events: Sequence[ChartEvent], x_scale: Scale) -> tuple[list[Mark], float]:
    """Return each event's mark, and the height below their labels, where curves may begin.

    A label that would lie on another one lies below it. Labels take at most half of the plot from
    curves.
    """
    marks = []
    ends: list[float] = []  # of the last label in each row
    for event in events:
        x = x_scale(event.x)
        width = 4 + len(event.label) * LETTER_WIDTH
        is_near_end = x + width > WIDTH
        begin = x - width if is_near_end else x
        row = next((row for row, end in enumerate(ends) if end <= begin), len(ends))
        ends[row : row + 1] = [begin + width]
        marks.append(_draw_event(event, x, is_near_end, TOP + 8 + LABEL_ROW_HEIGHT * row))
    return marks, min(TOP + LABEL_ROW_HEIGHT * len(ends), (TOP + PLOT_BOTTOM) / 2)


def _draw_event(event: ChartEvent, x: float, is_near_end: bool, y: float) -> Mark:
    """Return a dashed line with its label, which tells what happened under the pointer."""
    label = make_text(
        x - 4 if is_near_end else x + 4,
        y,
        event.label,
        "end" if is_near_end else "start",
        class_="over",
    )
    line = Mark(
        "path",
        d=f"M{x:.1f} {TOP}V{PLOT_BOTTOM}",
        stroke=EVENT_COLOUR,
        stroke_width="1.5",
        stroke_dasharray="3 3",
    )
    return Mark("g", title=event.text, children=[line, label])


def _read_values(series: Mapping[str, Points]) -> Iterator[list[str]]:
    """Yield positions, evenly chosen if there are many, each with the value of every curve.

    A curve with fewer points than the others has its last value before the position, with its own
    position, or "-".
    """
    positions = sorted({x for points in series.values() for x, _ in points})
    step = -(-len(positions) // MAX_HOVER_BANDS)
    earlier = -math.inf
    for position in positions[step // 2 :: step]:
        row = [f"{position:g}"]
        for points in series.values():
            past = bisect_right(points, position, key=lambda point: point[0])
            if not past:
                row.append("-")
                continue
            x, value = points[past - 1]
            row.append(format_amount(value) + f" (of {x:g})" * (x <= earlier))
        yield row
        earlier = position


def _make_hover_bands(values: Sequence[Sequence[str]], x_scale: Scale) -> list[Mark]:
    """Return bands from top to bottom, each with the values that the page shows under the pointer.

    Args:
        values: The names of the x axis and the curves, then a row of values for each band.
        x_scale: The scale of the x axis.
    """
    names, *rows = values
    pixels = [x_scale(float(row[0])) for row in rows]
    middles = [(left + right) / 2 for left, right in pairwise(pixels)]
    edges = [float(LEFT), *middles, float(PLOT_RIGHT)]
    bands = []
    for index, row in enumerate(rows):
        left, right = edges[index], edges[index + 1]
        area = Mark(
            "rect", x=left, y=TOP, width=right - left, height=PLOT_BOTTOM - TOP, fill="transparent"
        )
        texts = [f"{name} {value}" for name, value in zip(names, row, strict=True) if value != "-"]
        note = Mark("g", class_="note", children=_make_note(pixels[index], texts))
        bands.append(Mark("g", class_="band", children=[area, note]))
    return bands


def _make_note(x: float, rows: Sequence[str]) -> list[Mark]:
    """Return a line at x, and the rows on the side that has more room."""
    offset, anchor = (8, "start") if x < WIDTH / 2 else (-8, "end")
    texts = [
        make_text(x + offset, TOP + 30 + index * NOTE_ROW_HEIGHT, row, anchor, class_="over")
        for index, row in enumerate(rows)
    ]
    return [Mark("path", d=f"M{x:.1f} {TOP}V{PLOT_BOTTOM}", stroke="currentColor"), *texts]
