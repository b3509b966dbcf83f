"""python docs/pictures/ring.py: an all-reduce in a ring, as lesson 21 makes it: who holds which sum."""

from __future__ import annotations

from drawing import Drawing, save

RANKS = 4


def held_after(step: int) -> list[list[int]]:
    """Return how many ranks' numbers are in each chunk of each rank, after so many steps."""
    held = [[1] * RANKS for _ in range(RANKS)]
    for number in range(step):
        before = [row[:] for row in held]
        for rank in range(RANKS):
            left = (rank - 1) % RANKS
            chunk = (left - number) % RANKS
            if number < RANKS - 1:
                held[rank][chunk] += before[left][chunk]
            else:
                held[rank][chunk] = before[left][chunk]
    return held


def picture() -> Drawing:
    drawing = Drawing(
        760,
        236,
        "All-reduce in a ring of 4 ranks: after 3 steps each rank has one chunk that is whole,"
        " after 6 steps all of them",
    )
    stages = [("at the start", 0), ("after 3 sends each", 3), ("after 6 sends each", 6)]
    for index, (label, step) in enumerate(stages):
        x = 60 + index * 246
        drawing.text(x + 100, 24, label, "bold")
        for rank, row in enumerate(held_after(step)):
            y = 40 + rank * 40
            if index == 0:
                drawing.text(50, y + 22, f"rank {rank}", "soft", "end")
            for chunk, count in enumerate(row):
                look = f"r{chunk}" if count == RANKS else f"r{chunk} pale"
                drawing.box(x + chunk * 50, y, 46, 34, look, f"{count}/4")
    drawing.text(380, 224, "how many of the 4 ranks' numbers are in a chunk", "soft")
    return drawing


if __name__ == "__main__":
    save(picture(), __file__)
