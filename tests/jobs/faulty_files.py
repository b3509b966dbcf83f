"""stepladder train tests/jobs/faulty_files.py: PLANT="metrics.jsonl EIO 7" fails in the first rank
from step 7 on.

Step 0: from the start. ONCE: a file that the one process makes in which it fails.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import faults
import torch

from stepladder import Job

place, error, step = os.environ.get("PLANT", "none EIO -1").split()


@dataclass
class Config:
    epochs: int = 3
    global_batch: int = 16  # four steps an epoch


def plant():
    if "ONCE" in os.environ:
        try:
            Path(os.environ["ONCE"]).touch(exist_ok=False)
        except FileExistsError:
            return
    faults.FAULT.plant(*faults.from_text(f"{place} {error}"))


if place != "none" and os.environ.get("RANK", "0") == "0":
    faults.install()
    if step == "0":
        plant()


def build(config):
    torch.manual_seed(0)
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    done = []

    def count(*_):
        done.append(1)
        if len(done) == int(step) and os.environ.get("RANK", "0") == "0":
            plant()
        if os.environ.get("RANK", "0") == "1":
            print("a rank prints", flush=True)

    optimizer.register_step_post_hook(count)

    def loss(model, batch):
        x, y = batch
        return (model(x)[:, 0] - y).square().sum(), len(x)

    return Job(model, optimizer, loss, (x, x.sum(1).sin()))
