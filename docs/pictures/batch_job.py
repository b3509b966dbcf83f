"""python docs/pictures/batch_job.py: what starts what in a batch job, by hand from slurm/ and the
launcher.
"""

from __future__ import annotations

from drawing import Drawing, save

NODES, PER_NODE = 2, 2


def picture() -> Drawing:
    title = "sbatch queues a script, srun starts an agent on each node, each agent starts its ranks"
    drawing = Drawing(760, 330, title)
    drawing.text(28, 42, "login node", "soft", "start")
    drawing.box(130, 20, 200, 34, "panel", "stepladder submit")
    drawing.arrow(330, 37, 398, 37)
    drawing.box(400, 20, 200, 34, "panel", "sbatch job.sbatch")
    drawing.arrow(500, 54, 500, 86)
    drawing.text(512, 76, "waits in Slurm's queue", "small soft", "start")
    drawing.box(14, 136, 360, 182, "panel")
    drawing.box(386, 136, 360, 182, "panel")
    drawing.box(290, 88, 310, 32, "", "batch script: srun, one task per node")
    for node in range(NODES):
        left = 14 + node * 372
        drawing.text(left + 12, 158, f"node {node}", "bold", "start")
        drawing.arrow(360 + node * 160, 120, left + 180, 166)
        drawing.box(left + 100, 168, 160, 34, "", "agent")
        drawing.text(left + 180, 306, "the agent starts its ranks and watches them", "small soft")
        for local in range(PER_NODE):
            rank = node * PER_NODE + local
            drawing.arrow(left + 150 + local * 60, 202, left + 95 + local * 170, 246)
            drawing.box(left + 20 + local * 170, 248, 150, 34, f"r{rank}", f"rank {rank}")
    return drawing


if __name__ == "__main__":
    save(picture(), __file__)
