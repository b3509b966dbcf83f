"""python docs/pictures/identical.py: two processes that know nothing of each other train the same
samples.
"""

from __future__ import annotations

from drawing import Drawing, save

STEPS = 8
LEFT, WIDTH, HEIGHT = 120, 50, 32


def picture() -> Drawing:
    title = "Two processes each make all steps of an epoch, and end with two equal models"
    drawing = Drawing(LEFT + STEPS * WIDTH + 130, 176, title)
    drawing.text(LEFT + STEPS * WIDTH / 2, 26, "the same steps, with the same samples", "bold")
    end = LEFT + STEPS * WIDTH
    for rank in range(2):
        y = 42 + rank * 58
        drawing.text(LEFT - 14, y + 21, f"process {rank}", anchor="end")
        for step in range(STEPS):
            words = f"step {step}" if step < STEPS - 1 else "..."
            drawing.box(LEFT + step * WIDTH, y, WIDTH - 4, HEIGHT, f"r{rank}", words)
        drawing.arrow(end, y + HEIGHT / 2, end + 30, y + HEIGHT / 2)
        drawing.box(end + 34, y, 80, HEIGHT, f"r{rank}", "model")
    drawing.text(end + 74, 92, "equal", "good bold")
    text = "twice the work, no time saved: nothing divides the samples, and nothing is sent"
    drawing.text(LEFT, 160, text, "soft", "start")
    return drawing


if __name__ == "__main__":
    save(picture(), __file__)
