"""python docs/pictures/dealing.py: whom DistributedSampler deals which samples, and what one step
has.
"""

from __future__ import annotations

from drawing import Drawing, save
from torch.utils.data import DistributedSampler

NUM_SAMPLES, BATCH_SIZE, RANKS = 12, 3, 2
LEFT, WIDTH, HEIGHT = 160, 44, 32


def picture() -> Drawing:
    samplers = [DistributedSampler(range(NUM_SAMPLES), RANKS, rank) for rank in range(RANKS)]
    shares = [list(sampler) for sampler in samplers]
    title = f"{NUM_SAMPLES} samples in a new order, dealt to {RANKS} ranks in turn like cards"
    drawing = Drawing(LEFT + NUM_SAMPLES * WIDTH + 16, 236, title)
    drawing.text(LEFT - 14, 50, "the epoch's order", anchor="end")
    for place in range(NUM_SAMPLES):
        rank = place % RANKS
        sample = shares[rank][place // RANKS]
        drawing.box(LEFT + place * WIDTH, 30, WIDTH - 4, HEIGHT, f"r{rank}", str(sample))
        column = LEFT + place // RANKS * WIDTH + WIDTH / 2 - 2
        drawing.line(LEFT + place * WIDTH + WIDTH / 2 - 2, 64, column, 98 + rank * 48, "pale")
    step_width = BATCH_SIZE * WIDTH
    drawing.box(LEFT - 6, 92, step_width + 8, 94, "panel")
    for rank, share in enumerate(shares):
        y = 98 + rank * 48
        drawing.text(LEFT - 14, y + 21, f"rank {rank}", anchor="end")
        for number, sample in enumerate(share):
            drawing.box(LEFT + number * WIDTH, y, WIDTH - 4, HEIGHT, f"r{rank}", str(sample))
    words = f"step 1: {BATCH_SIZE} samples on each rank,"
    drawing.text(LEFT - 6, 206, f"{words} a global batch of {BATCH_SIZE * RANKS}", "bold", "start")
    text = "set_epoch(epoch) shuffles the order anew; the dealing stays"
    drawing.text(LEFT - 6, 226, text, "small soft", "start")
    return drawing


if __name__ == "__main__":
    save(picture(), __file__)
