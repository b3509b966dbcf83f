"""A tiny job that does as the variable TROUBLE says: "WHAT RANK STEP [MARKER]", once if a marker
file is named.

WHAT is a key of TROUBLES. STEP counts from 1 over the whole run, also after a resume; 0 is `build`.
The marker file gets the process id."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from stepladder import InputError, Job

SAMPLES, FEATURES = 72, 6  # 5 steps per epoch, the last one of 8 samples


@dataclass
class Config:
    epochs: int = 2
    global_batch: int = 16
    lr: float = 0.05
    seed: int = 0
    wide: int = 8


def build(config: Config) -> Job:
    trouble(0)
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(SAMPLES, FEATURES, generator=generator)
    torch.manual_seed(config.seed)
    model = nn.Sequential(
        nn.Linear(FEATURES, config.wide), nn.Tanh(), nn.Dropout(0.2), nn.Linear(config.wide, 1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)

    def loss(model: nn.Module, batch: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
        factor = trouble(schedule.last_epoch + 1)
        inputs, targets = batch
        return F.mse_loss(model(inputs), targets, reduction="sum") * factor, len(inputs)

    return Job(
        model,
        optimizer,
        loss,
        (x, x.sum(1, keepdim=True)),
        (x[:40], x[:40].sum(1, keepdim=True)),
        lambda model, batch: {
            "error": (F.mse_loss(model(batch[0]), batch[1], reduction="sum"), len(batch[0]))
        },
        schedule,
    )


def trouble(step: int) -> float:
    """What TROUBLE asks for at this step. The factor for the loss."""
    what, rank, at, *marker = os.environ.get("TROUBLE", "nothing 0 -1").split()
    if int(at) != step or os.environ.get("RANK", "0") != rank:
        return 1.0
    if marker:
        try:
            with Path(marker[0]).open("x") as file:
                file.write(str(os.getpid()))
        except FileExistsError:
            return 1.0
    return TROUBLES[what](step)


def fail(step: int) -> float:
    raise RuntimeError(f"trouble at step {step}")


def hold(_step: int) -> float:
    """Stand still until this process is asked to stop; at step 0 nobody listens, and the signal
    ends it.
    """
    while not getattr(
        getattr(signal.getsignal(signal.SIGTERM), "__self__", None), "stop_requested", False
    ):
        time.sleep(0.01)
    return 1.0


def deaf(_step: int) -> float:
    time.sleep(600)
    return 1.0


def bad_input(_step: int) -> float:
    raise InputError("the job found bad input", "mend it")


def plain_assert(step: int) -> float:
    assert step < 0
    return 1.0


def hang_up(_step: int) -> float:
    os.kill(os.getpid(), signal.SIGHUP)
    return 1.0


def die(_step: int) -> float:
    os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def leave(_step: int) -> float:
    sys.exit(3)


def say(step: int) -> float:
    print(f"here at step {step}")
    return 1.0


def say_and_hold(step: int) -> float:
    say(step)
    return hold(step)


def take_memory(_step: int) -> float:
    """More than this process may have."""
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    return float(torch.zeros(16 << 30, dtype=torch.uint8).sum())


def take_the_kernels_memory(_step: int) -> float:
    """More than the control group in the variable MEMORY_GROUP may have."""
    Path(os.environ["MEMORY_GROUP"], "cgroup.procs").write_text(str(os.getpid()))
    return float(torch.ones(1 << 30, dtype=torch.uint8).sum())


def abort(step: int) -> float:
    os.abort()


TROUBLES = {
    "abort": abort,
    "raise": fail, "hold": hold, "deaf": deaf, "bad_input": bad_input, "assert": plain_assert, "die": die,
    "leave": leave, "hangup": hang_up, "print": say,
    "memory": take_memory, "kernel-memory": take_the_kernels_memory, "print-and-hold": say_and_hold, "nan": lambda _: float("nan"),
}  # fmt: skip
