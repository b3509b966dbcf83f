"""python docs/pictures/lanes.py: chunks dealt out to lanes, and the lanes of a step's batch, by
`StreamOrder`.
"""

from __future__ import annotations

import numpy as np
from drawing import Drawing, save

from stepladder.core.order import Chunks
from stepladder.core.plan import Plan

CHUNKS, ROWS, STEP, RANKS = 16, 8, 2, 2
PLAN = Plan(
    num_samples=CHUNKS * ROWS,
    global_batch=16,
    microbatch=4,
    seed=0,
    chunks=Chunks(((CHUNKS * ROWS, ROWS),), 16),
)


def picture() -> Drawing:
    order = PLAN.stream
    assert order is not None
    lanes, chunks = order.num_lanes, order.chunk_order(0)
    per_lane, width = CHUNKS // lanes, 84
    title = (
        f"{CHUNKS} chunks in random order, dealt out to {lanes} lanes; a batch takes rows of each"
    )
    heading = f"{CHUNKS} chunks of {ROWS} rows, shuffled and dealt out to {lanes} lanes"
    drawing = Drawing(760, 296, title)
    drawing.text(24, 26, heading, "bold", "start")
    drawing.text(24 + 5.6 * width + 70, 26, f"batch of step {STEP + 1}", "bold")
    for lane in range(lanes):
        y, span = 44 + lane * 48, PLAN.microbatches(STEP)[lane]
        rows = PLAN.indices(STEP, span)
        rank = next(rank for rank in range(RANKS) if span in PLAN.share(STEP, rank, RANKS))
        drawing.text(66, y + 21, f"lane {lane}", anchor="end")
        for place, chunk in enumerate(chunks[lane * per_lane : (lane + 1) * per_lane]):
            used = np.isin(chunk, rows // ROWS)
            drawing.box(
                80 + place * width,
                y,
                width - 6,
                32,
                f"r{rank}" if used else "panel",
                f"chunk {chunk}",
            )
        drawing.arrow(80 + per_lane * width, y + 16, 478, y + 16)
        drawing.box(484, y, 160, 32, f"r{rank}", " ".join(map(str, rows)))
        drawing.text(660, y + 21, f"rank {rank}", "bold", "start")
    said = (
        f"The batch of step {STEP + 1} has the rows on the right, drawn from the coloured chunks.",
        "On one process the same batch is read by one rank: the rows and their order stay.",
    )
    for line, words in enumerate(said):
        drawing.text(24, 258 + line * 20, words, "small soft", "start")
    return drawing


if __name__ == "__main__":
    save(picture(), __file__)
