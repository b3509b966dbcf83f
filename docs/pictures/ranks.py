"""python docs/pictures/ranks.py: rank, local rank and node, as `World` has them."""

from __future__ import annotations

from drawing import Drawing, save

from stepladder import World

NODES, PER_NODE = 2, 4


def picture() -> Drawing:
    drawing = Drawing(
        760, 196, f"{NODES} nodes with {PER_NODE} processes each: ranks and local ranks"
    )
    for node in range(NODES):
        left = 16 + node * 372
        drawing.box(left, 16, 356, 132, "panel")
        drawing.text(left + 178, 38, f"node {node}", "bold")
        for local in range(PER_NODE):
            rank = node * PER_NODE + local
            world = World(rank, NODES * PER_NODE, local, PER_NODE)
            x = left + 14 + local * 84
            drawing.box(x - 2, 52, 80, 82, f"r{local}")
            drawing.text(x + 38, 76, f"rank {world.rank}", "bold")
            drawing.text(x + 38, 98, f"local rank {world.local_rank}", "small")
            drawing.text(x + 38, 118, f"GPU {world.local_rank}", "small")
    drawing.text(380, 176, f"world size {NODES * PER_NODE}: one process for each GPU")
    return drawing


if __name__ == "__main__":
    save(picture(), __file__)
