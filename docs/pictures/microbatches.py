"""python docs/pictures/microbatches.py: who computes which microbatch of a step, as `Plan.share`
says.
"""

from __future__ import annotations

from drawing import Drawing, save

from stepladder import Plan

PLAN = Plan(num_samples=1437, global_batch=64, microbatch=8)
SIZES = 1, 2, 3


def picture() -> Drawing:
    count, width = PLAN.num_microbatches, 70
    title = f"The {count} microbatches of a step on {', '.join(map(str, SIZES[:-1]))} and {SIZES[-1]} processes"
    drawing = Drawing(760, 226, title)
    drawing.text(
        150 + count * width / 2,
        26,
        f"one step: a global batch of {PLAN.global_batch} samples",
        "bold",
    )
    for column, span in enumerate(PLAN.microbatches(0)):
        drawing.text(
            150 + column * width + width / 2, 48, f"{span.lo} to {span.hi - 1}", "small soft"
        )
    for row, size in enumerate(SIZES):
        y = 58 + row * 44
        drawing.text(136, y + 21, f"{size} process{'es' * (size > 1)}", anchor="end")
        for rank in range(size):
            for span in PLAN.share(0, rank, size):
                drawing.box(
                    150 + span.number * width + 1, y, width - 2, 34, f"r{rank}", f"rank {rank}"
                )
    words = f"each box is a microbatch of {PLAN.microbatch} samples"
    drawing.text(150 + count * width / 2, 208, words, "small soft")
    return drawing


if __name__ == "__main__":
    save(picture(), __file__)
