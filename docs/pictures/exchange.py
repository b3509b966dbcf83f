"""python docs/pictures/exchange.py: what a step takes in shared memory, of what it takes on gloo.

The figures are those of benchmarks/results/ddp_exchange.md.
"""

from __future__ import annotations

import re
from pathlib import Path

from drawing import Drawing, save

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "ddp_exchange.md"
CASES = {
    "MLP 20-64-1": "DDP, MLP 20-64-1",
    "small conv net": "DDP, small conv net",
    "character GPT": "DDP, character GPT",
    "character GPT, FSDP2": "FSDP2, character GPT",
}
WIDTH_OF_GLOO = 440  # pixels


def read_steps() -> dict[str, tuple[int, int]]:
    """Return the microseconds of a step on gloo and in shared memory, by case."""
    rows = re.findall(r"^\| 2, alone, ([^|]+) \| (\d+) \| (\d+) \|", RESULTS.read_text(), re.M)
    return {case: (int(on_gloo), int(in_memory)) for case, on_gloo, in_memory in rows}


def picture() -> Drawing:
    drawing = Drawing(
        760,
        266,
        "The time of a step in shared memory, beside that of the same step on gloo, for four models",
    )
    steps = read_steps()
    for row, (case, name) in enumerate(CASES.items()):
        y = 16 + row * 62
        on_gloo, in_memory = steps[case]
        width = WIDTH_OF_GLOO * in_memory / on_gloo
        drawing.text(166, y + 28, name, "bold", "end")
        drawing.box(178, y, WIDTH_OF_GLOO, 20, "r1")
        drawing.text(178 + WIDTH_OF_GLOO + 8, y + 15, f"gloo, {on_gloo:,} µs", "small", "start")
        drawing.box(178, y + 24, width, 20, "r0")
        drawing.text(178 + width + 8, y + 39, f"memory, {in_memory:,} µs", "small", "start")
    return drawing


if __name__ == "__main__":
    save(picture(), __file__)
