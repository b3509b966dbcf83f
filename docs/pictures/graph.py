"""python docs/pictures/graph.py: kernels that are called one by one, and the same replayed as a
CUDA graph.
"""

from __future__ import annotations

from drawing import Drawing, save

LEFT, CALL, KERNEL, KERNELS = 112, 62, 26, 8  # a sketch: a call takes longer than a small kernel


def picture() -> Drawing:
    drawing = Drawing(
        760, 246, "Kernels called one by one leave gaps; replayed as a graph they leave none"
    )
    for y, title in (
        (38, "without a graph: a call for each kernel"),
        (142, "with --capture: one call for all"),
    ):
        drawing.text(16, y - 14, title, "bold", "start")
        drawing.text(LEFT - 12, y + 17, "CPU", "small", "end")
        drawing.text(LEFT - 12, y + 47, "GPU", "small", "end")
    for number in range(KERNELS):
        drawing.box(LEFT + number * CALL, 38, CALL - 2, 24, "r0", "call")
        drawing.box(LEFT + (number + 1) * CALL, 68, KERNEL, 24, "r1")
        drawing.box(LEFT + CALL + number * KERNEL, 172, KERNEL, 24, "r1")
    drawing.box(LEFT, 142, CALL - 2, 24, "r0", "replay")
    drawing.line(
        LEFT + CALL + KERNELS * KERNEL + 8, 184, LEFT + KERNELS * CALL + KERNEL, 184, "dashed"
    )
    drawing.text(
        LEFT + CALL + KERNELS * KERNEL + 14, 166, "time for the next step", "small soft", "start"
    )
    drawing.box(LEFT, 216, 16, 16, "r1")
    drawing.text(LEFT + 24, 229, "a kernel, as of a small layer", "small", "start")
    return drawing


if __name__ == "__main__":
    save(picture(), __file__)
