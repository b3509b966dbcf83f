"""python docs/pictures/ranking.py: how a recommender scores films, and what HR@10 counts."""

from __future__ import annotations

from drawing import Drawing, save


def draw_table(drawing: Drawing, x: float, name: str, chosen: int, look: str) -> None:
    """Draw a table of vectors, one of which is chosen."""
    drawing.text(x + 60, 26, name, "bold")
    for row in range(6):
        y = 38 + row * 22
        if row == chosen:
            drawing.box(x, y, 120, 18, look)
        else:
            drawing.box(x, y, 120, 18, "panel")


def picture() -> Drawing:
    title = (
        "The vectors of a user and of a film give a score; a hit is a last film among the best ten"
    )
    drawing = Drawing(760, 226, title)
    draw_table(drawing, 20, "users", 2, "r0")
    draw_table(drawing, 200, "films", 4, "r1")
    drawing.text(80, 190, "a row: 32 numbers", "small soft")
    drawing.text(260, 190, "a row: 32 numbers", "small soft")
    drawing.text(170, 94, "×", "bold")
    drawing.arrow(330, 104, 384, 104)
    drawing.text(430, 100, "score of")
    drawing.text(430, 118, "this film")
    drawing.arrow(476, 104, 528, 104)
    drawing.text(636, 26, "100 films in order of score", "bold")
    for place in range(12):
        x, y = 540 + place % 6 * 34, 44 + place // 6 * 56
        is_last = place == 7
        words = str(place + 1) if place < 10 else "..."
        drawing.box(x, y, 28, 28, "r2" if is_last else "panel", words if place < 11 else "100")
    drawing.text(636, 152, "the user's last film has place 8:", "small")
    drawing.text(636, 170, "among the first ten, a hit", "good bold")
    text = "each rank ranks its own users; the ranks add up hits and users, and divide once: HR@10"
    drawing.text(20, 212, text, "soft", "start")
    return drawing


if __name__ == "__main__":
    save(picture(), __file__)
