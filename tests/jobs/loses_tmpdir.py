"""stepladder train tests/jobs/loses_tmpdir.py: what becomes of TMPDIR in step 5 is in the variable
PLANT.

TMPDIR is a mount of this run's own. Then each rank prints a line, which a temporary directory would
have to take. KILLED: a file that is made where the second rank kills itself, in step 7."""

import os
import shutil
import signal
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from stepladder import Job

TMPDIR = Path(os.environ["TMPDIR"])
IS_FIRST = os.environ.get("RANK", "0") == "0" and "STEPLADDER_JOINS" not in os.environ


@dataclass
class Config:
    epochs: int = 5
    global_batch: int = 16  # four steps an epoch
    workers: int = 1


def fill():
    """Take all bytes, then all names."""
    for number in range(10**6):
        with suppress(OSError), (TMPDIR / f"full-{number}").open("wb", buffering=0) as file:
            while file.write(bytes(1 << 16)):
                pass
            continue
        if not (TMPDIR / f"full-{number}").exists():
            return


def set_read_only():
    subprocess.run(["mount", "-o", "remount,bind,ro", TMPDIR], check=True)


def take_away():
    subprocess.run(["umount", "-l", TMPDIR], check=True)
    shutil.rmtree(TMPDIR)


PLANTS = {"none": lambda: None, "full": fill, "read-only": set_read_only, "gone": take_away}


class Data(torch.utils.data.Dataset):
    def __init__(self):
        self.x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.x[index].sum().sin()


def build(config):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    steps = []
    optimizer.register_step_post_hook(lambda *_: after(steps))

    def loss(model, batch):
        x, y = batch
        return (model(x)[:, 0] - y).square().sum(), len(x)

    def metrics(model, batch):
        x, y = batch
        return {"error": ((model(x)[:, 0] - y).abs().sum(), len(x))}

    data = Data()
    return Job(model, optimizer, loss, data, data, metrics=metrics, num_workers=config.workers)


def after(steps):
    """Do what belongs to the step that this process has just done."""
    steps.append(1)
    if len(steps) == 5 and IS_FIRST:
        PLANTS[os.environ["PLANT"]]()
    if len(steps) == 6:
        print("a rank prints", flush=True)
    if len(steps) == 7 and not IS_FIRST and "KILLED" in os.environ:
        with suppress(FileExistsError):
            Path(os.environ["KILLED"]).touch(exist_ok=False)
            os.kill(os.getpid(), signal.SIGKILL)
