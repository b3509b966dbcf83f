"""What the pictures of this folder share: an SVG file whose colours follow a light or a dark page.

Text stays text. Nothing is fetched, nothing is a script. Printed, a picture has its light colours.
"""

from __future__ import annotations

import math
from html import escape
from pathlib import Path

HERE = Path(__file__).parent
SIZE = 13  # of letters
STYLE = """
text { font: %(size)spx system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: %(ink)s }
.mono { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace }
.mono { font-size: 12px; white-space: pre }
.bold { font-weight: 600 }
.small { font-size: 12px }
.soft { fill: %(soft)s }
.bad { fill: %(bad)s; stroke: none }
.good { fill: %(good)s; stroke: none }
rect, path, circle { stroke: %(edge)s; stroke-width: 1; fill: %(paper)s }
.page { stroke: %(panel)s }
.panel { fill: %(panel)s }
.line { fill: none; stroke: %(soft)s; stroke-width: 1.5 }
.dashed { stroke-dasharray: 4 4 }
.head { fill: %(soft)s; stroke: none }
.r0 { fill: %(r0)s } .r1 { fill: %(r1)s } .r2 { fill: %(r2)s } .r3 { fill: %(r3)s }
.pale { opacity: .4 }
"""
LIGHT = {
    "paper": "#ffffff", "panel": "#f3f5f7", "ink": "#1f2328", "soft": "#59636e", "edge": "#8c959f",
    "bad": "#c02026", "good": "#1a7f37", "r0": "#b6d7ff", "r1": "#ffd8a8", "r2": "#b8e6c1", "r3": "#e2ccf7",
}  # fmt: skip
DARK = {
    "paper": "#0d1117", "panel": "#1b222c", "ink": "#e6edf3", "soft": "#9aa5b1", "edge": "#6e7781",
    "bad": "#ff7b72", "good": "#56d364", "r0": "#1f4f8f", "r1": "#7d4a0d", "r2": "#1d6035", "r3": "#5b3a80",
}  # fmt: skip


class Drawing:
    """Shapes in the order in which they are drawn. title: what a screen reader says."""

    def __init__(self, width: float, height: float, title: str, style: str = "") -> None:
        self.width, self.height, self.title, self.style = width, height, title, style
        self.shapes: list[str] = []

    def box(
        self, x: float, y: float, width: float, height: float, look: str = "", words: str = ""
    ) -> None:
        """A rectangle with its words in the middle. look: classes of STYLE."""
        self.shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" class="{look}"/>'
        )
        if words:
            self.text(x + width / 2, y + height / 2 + SIZE * 0.36, words)

    def text(self, x: float, y: float, words: str, look: str = "", anchor: str = "middle") -> None:
        """One line. y: where letters stand. anchor: start, middle or end."""
        self.shapes.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" class="{look}">{escape(words)}</text>'
        )

    def line(self, x: float, y: float, to_x: float, to_y: float, look: str = "") -> None:
        self.shapes.append(f'<path d="M{x:g} {y:g}L{to_x:g} {to_y:g}" class="line {look}"/>')

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        self.line(x, y, to_x, to_y)
        turn = math.degrees(math.atan2(to_y - y, to_x - x))
        where = f"translate({to_x:g} {to_y:g}) rotate({turn:.4g})"
        self.shapes.append(f'<path d="M1 0L-8 4L-8 -4Z" transform="{where}" class="head"/>')

    def svg(self) -> str:
        dark = "\n".join(f"  {line}" for line in rules(DARK, LIGHT))
        return "\n".join([
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} {self.height:g}"'
            f' width="{self.width:g}" height="{self.height:g}" role="img">',
            f"<title>{escape(self.title)}</title>",
            f"<style>{STYLE % {**LIGHT, 'size': SIZE}}",
            f"@media screen and (prefers-color-scheme: dark) {{\n{dark}\n}}{self.style}</style>",
            f'<rect width="{self.width:g}" height="{self.height:g}" rx="6" class="page"/>',
            *self.shapes,
            "</svg>\n",
        ])  # fmt: skip


def rules(colours: dict[str, str], instead_of: dict[str, str]) -> list[str]:
    """The rules of STYLE that have a colour, in these colours."""
    made, other = (
        (STYLE % {**which, "size": SIZE}).strip().splitlines() for which in (colours, instead_of)
    )
    return [line for line, same in zip(made, other, strict=True) if line != same]


def save(drawing: Drawing, script: str) -> None:
    """Beside the script, by its name."""
    (HERE / Path(script).with_suffix(".svg").name).write_text(drawing.svg(), encoding="utf-8")
