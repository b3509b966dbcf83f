"""python docs/pictures/memory.py: the bytes of one parameter on 4 ranks, by what is sharded."""

from __future__ import annotations

from drawing import Drawing, save

RANKS = 4
BYTES = {"weight": 4, "gradient": 4, "AdamW": 8}
SHARDED = {
    "DDP": (),
    "ZeRO 1": ("AdamW",),
    "ZeRO 2": ("gradient", "AdamW"),
    "ZeRO 3, fully_shard": ("weight", "gradient", "AdamW"),
}
SCALE = 30  # pixels of a byte


def picture() -> Drawing:
    drawing = Drawing(
        760,
        226,
        "Bytes of a parameter on each of 4 ranks: 16 with DDP, 10, 7 and 4 with ZeRO 1, 2, 3",
    )
    for row, (name, sharded) in enumerate(SHARDED.items()):
        y = 18 + row * 50
        drawing.text(166, y + 24, name, "bold", "end")
        x = 178.0
        total = 0.0
        for index, (kind, size) in enumerate(BYTES.items()):
            held = size / RANKS if kind in sharded else size
            total += held
            label = kind if held >= 2 else ""
            drawing.box(x, y, held * SCALE - 3, 36, f"r{index}", label)
            x += held * SCALE
        drawing.text(x + 8, y + 24, f"{total:g} bytes", "", "start")
    return drawing


if __name__ == "__main__":
    save(picture(), __file__)
