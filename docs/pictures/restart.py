"""python docs/pictures/restart.py: which epochs are trained when a rank of lesson 11 dies, with
the numbers of the lesson's flags.
"""

from __future__ import annotations

import re

from drawing import HERE, Drawing, save

LESSON = HERE.parents[1] / "lessons" / "11-a-rank-dies" / "lesson.py"
LEFT, WIDTH, ROW, HEIGHT = 80, 560, 36, 26


def read_default(flag: str) -> int:
    """Return the default of one of the lesson's flags."""
    found = re.search(rf'"--{flag}",[^)]*default=(\d+)', LESSON.read_text(encoding="utf-8"))
    assert found, flag
    return int(found[1])


def picture() -> Drawing:
    total, every, killed = map(read_default, ("total_epochs", "save_every", "fail_at"))
    resumed = killed // every * every
    title = f"A rank dies in epoch {killed}; torchrun starts all ranks again from epoch {resumed}"
    drawing = Drawing(LEFT + WIDTH + 16, 250, title)

    def x(epoch: float) -> float:
        return LEFT + WIDTH * epoch / total

    def start(number: int, begin: int, ends: tuple[int, int]) -> None:
        top = 40 + number * 104
        drawing.text(LEFT, top - 10, f"start {number + 1}", "bold", "start")
        for rank, end in enumerate(ends):
            y = top + rank * ROW
            kept = resumed if begin < resumed else end
            drawing.text(LEFT - 10, y + 18, f"rank {rank}", anchor="end")
            words = f"epochs {begin} to {kept - 1}"
            drawing.box(x(begin), y, x(kept) - x(begin), HEIGHT, f"r{rank}", words)
            drawing.box(x(kept), y, x(end) - x(kept), HEIGHT, f"r{rank} pale")

    start(0, 0, (killed, killed))
    start(1, resumed, (total, total))
    drawing.text(x(killed) + 8, 94, f"kill -9 in epoch {killed}", "bad bold", "start")
    drawing.text(x(killed) + 8, 58, "its collective fails; torchrun ends it too", "", "start")
    drawing.line(x(resumed), 102, x(resumed), 142, "dashed")
    drawing.text(
        x(resumed) + 8, 124, f"the snapshot after epoch {resumed - 1}", "small soft", "start"
    )
    text = f"a snapshot every {every} epochs: {resumed} to {killed - 1} (pale) are trained twice"
    drawing.text(LEFT, 240, text, "soft", "start")
    return drawing


if __name__ == "__main__":
    save(picture(), __file__)
