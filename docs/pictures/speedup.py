"""python docs/pictures/speedup.py: why a small network gains nothing from a second process."""

from __future__ import annotations

from drawing import Drawing, save

LEFT, WIDTH, HEIGHT = 150, 420, 26
# What communication takes of two processes' time: little to compute for each gradient, and much.
SHARES = {"a small batch": 0.55, "a large batch": 0.25}


def picture() -> Drawing:
    title = (
        "Two processes share the computing, but not the communication: a small batch gains nothing"
    )
    drawing = Drawing(LEFT + WIDTH + 150, 236, title)
    for number, (name, share) in enumerate(SHARES.items()):
        top = 30 + number * 94
        best = 2 * (1 - share)
        drawing.text(LEFT - 14, top + 18, name, "bold", "end")
        drawing.box(LEFT, top, WIDTH, HEIGHT, "r0", "one process computes")
        together = WIDTH / best
        computing = together * (1 - share)
        for rank in range(2):
            y = top + 30 + rank * 28
            drawing.text(LEFT - 14, y + 18, f"rank {rank} of 2", anchor="end")
            drawing.box(LEFT, y, computing, HEIGHT, f"r{rank}", "half of it")
            drawing.box(LEFT + computing, y, together - computing, HEIGHT, "r3", "sends")
        verdict = "good bold" if best > 1 else "bad bold"
        drawing.text(
            LEFT + max(WIDTH, together) + 10, top + 62, f"{best:.1f} times", verdict, "start"
        )
    text = "at best 2 x (1 - share): what is sent is the same, however little there is to compute"
    drawing.text(LEFT, 226, text, "small soft", "start")
    return drawing


if __name__ == "__main__":
    save(picture(), __file__)
