"""python docs/pictures/all_reduce.py: what every rank holds before an all-reduce and after it."""

from __future__ import annotations

from drawing import Drawing, save

GRADIENTS = [[1, 4], [2, 0], [3, 5], [4, 2]]  # any numbers: two of each rank


def picture() -> Drawing:
    drawing = Drawing(
        760, 208, "Four ranks have two numbers each; after the all-reduce each has both sums"
    )
    total = [sum(column) for column in zip(*GRADIENTS, strict=True)]
    drawing.text(88, 48, "before", "soft", "end")
    drawing.text(88, 116, "all-reduce", "bold", "end")
    drawing.text(88, 174, "after", "soft", "end")
    words = "the sums of all ranks' numbers, place by place; every rank must take part"
    drawing.box(96, 92, 648, 36, "panel", words)
    for rank, numbers in enumerate(GRADIENTS):
        x = 96 + rank * 166
        drawing.text(x + 75, 22, f"rank {rank}", "bold")
        drawing.arrow(x + 75, 62, x + 75, 90)
        drawing.arrow(x + 75, 128, x + 75, 152)
        for place in range(2):
            drawing.box(x + place * 77, 30, 73, 30, f"r{rank}", str(numbers[place]))
            drawing.box(x + place * 77, 154, 73, 30, "", str(total[place]))
    return drawing


if __name__ == "__main__":
    save(picture(), __file__)
