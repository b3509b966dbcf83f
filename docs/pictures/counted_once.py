"""python docs/pictures/counted_once.py: how often each test image counts with DistributedSampler,
and with every N-th image.
"""

from __future__ import annotations

from collections import Counter

from drawing import Drawing, save
from torch.utils.data import DistributedSampler

NUM_IMAGES, RANKS = 10, 4
LEFT, WIDTH, HEIGHT, ROW = 90, 40, 26, 34
GAP = 320  # between the two halves


def picture() -> Drawing:
    padded = [
        list(DistributedSampler(range(NUM_IMAGES), RANKS, rank, shuffle=False))
        for rank in range(RANKS)
    ]
    strided = [list(range(NUM_IMAGES))[rank::RANKS] for rank in range(RANKS)]
    title = f"{NUM_IMAGES} test images on {RANKS} ranks: padded, some count twice; by stride, none"
    drawing = Drawing(LEFT + GAP + 250, 226, title)
    heads = "DistributedSampler pads", f"images[rank::{RANKS}]"
    for half, (head, shares) in enumerate(zip(heads, (padded, strided), strict=True)):
        left = LEFT + half * GAP
        drawing.text(left, 24, head, "bold", "start")
        counts = Counter(image for share in shares for image in share)
        seen: set[int] = set()
        for rank, share in enumerate(shares):
            y = 40 + rank * ROW
            drawing.text(left - 12, y + 18, f"rank {rank}", anchor="end")
            for number, image in enumerate(share):
                look = f"r{rank}"
                drawing.box(left + number * WIDTH, y, WIDTH - 4, HEIGHT, look, str(image))
                if image in seen or (counts[image] > 1 and number == len(share) - 1):
                    drawing.text(
                        left + number * WIDTH + WIDTH, y + 18, "again", "bad bold", "start"
                    )
                seen.add(image)
        total = sum(counts.values())
        is_right = total == NUM_IMAGES
        words = f"{total} counted, of {NUM_IMAGES} images"
        drawing.text(left, 196, words, "good bold" if is_right else "bad bold", "start")
    text = "the ranks add up their counts, right and all, and divide once"
    drawing.text(LEFT, 216, text, "small soft", "start")
    return drawing


if __name__ == "__main__":
    save(picture(), __file__)
