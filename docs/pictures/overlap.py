"""python docs/pictures/overlap.py: profile a wide net on two processes, and draw its shortest step.

The step is drawn from the end of the forward pass. Other work on the machine makes it uneven: then
again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from drawing import HERE, Drawing

LAYERS, STEPS = 6, 8
JOB = f"""
from dataclasses import dataclass
import torch
from stepladder import Job, mean_loss


@dataclass
class Config:
    global_batch: int = 512


def build(config):
    model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range({LAYERS})))
    data = torch.randn(4096, 2048)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return Job(model, optimizer, mean_loss(torch.nn.functional.mse_loss), (data, data))
"""
LAYER = "autograd::engine::evaluate_function: AddmmBackward0"
LEFT, WIDTH, MOMENT = 152, 592, 1.5  # shorter ones, such as the ranks' votes, are no boxes
Event = dict[str, Any]


def profile(folder: Path) -> list[list[Event]]:
    """What each rank did in the shortest step, from its backward pass on, in order."""
    (folder / "job.py").write_text(JOB, encoding="utf-8")
    command = ["stepladder", "profile", "job.py", "--nproc", "2", "--steps", str(STEPS)]
    subprocess.run(command, cwd=folder, check=True)
    ranks: list[list[list[Event]]] = []
    for path in sorted(folder.glob("profiles/job/tensorboard/rank-*.json")):
        whole = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        events = sorted((one for one in whole if one.get("ph") == "X"), key=lambda one: one["ts"])
        begun = [one["ts"] for one in events if one["name"] == "stepladder:backward"]
        ended = [one["ts"] + one["dur"] for one in events if one["name"] == "stepladder:optimizer"]
        ranks.append([
            [one for one in events if begin <= one["ts"] < end] for begin, end in zip(begun, ended, strict=True)
        ])  # fmt: skip
    return list(min(zip(*ranks, strict=True), key=lambda step: max(map(seconds, step))))


def seconds(events: list[Event]) -> float:
    return events[-1]["ts"] - events[0]["ts"]


def picture(ranks: list[list[Event]]) -> Drawing:
    drawing = Drawing(
        760, 250, "Gradients of finished layers travel while the backward pass computes the others"
    )
    begin = min(events[0]["ts"] for events in ranks)
    updates = [one for events in ranks for one in events if one["name"] == "stepladder:optimizer"]
    end = max(one["ts"] + one["dur"] for one in updates)

    def bar(one: Event, y: float, height: float, look: str, words: str = "") -> None:
        width = one["dur"] / (end - begin) * WIDTH
        drawing.box(
            LEFT + (one["ts"] - begin) / (end - begin) * WIDTH, y, width, height, look, words
        )

    for rank, events in enumerate(ranks):
        y = 34 + rank * 92
        drawing.text(16, y + 38, f"rank {rank}", "bold", "start")
        drawing.text(LEFT - 10, y + 20, "backward", "small", "end")
        drawing.text(LEFT - 10, y + 54, "all-reduce", "small", "end")
        threads = sorted({one["tid"] for one in events if one["name"] == "gloo:all_reduce"})
        layers = [one for one in events if one["name"] == LAYER]
        for number, one in enumerate(layers):
            bar(
                one,
                y,
                30,
                "r0",
                f"layer {LAYERS - number}" if one["dur"] > 0.1 * (end - begin) else "",
            )
        for one in events:
            if one["name"] == "gloo:all_reduce" and one["dur"] > MOMENT * 1000:
                bar(one, y + 36 + 13 * threads.index(one["tid"]), 12, "r1")
            if one["name"] == "stepladder:optimizer":
                bar(one, y, 30, "r2")
    for index, (look, words) in enumerate(
        (("r0", "a layer's gradient"), ("r1", "a bucket"), ("r2", "optimizer"))
    ):
        drawing.box(LEFT + index * 170, 220, 16, 16, look)
        drawing.text(LEFT + 24 + index * 170, 233, words, "small", "start")
    drawing.text(LEFT + WIDTH, 233, f"{(end - begin) / 1000:.0f} ms", "small soft", "end")
    drawing.text(LEFT, 22, "the backward pass begins with the last layer", "small soft", "start")
    return drawing


if __name__ == "__main__":
    with TemporaryDirectory() as made:
        found = profile(Path(made))
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    (folder / "overlap.svg").write_text(picture(found).svg(), encoding="utf-8")
