"""A tiny job in exact mode that stands still at gates, or fails, as environment variables say.

GATES="FOLDER 7 14": rank 0 writes FOLDER/at-7 in step 7 and waits for FOLDER/open-7, or to be
stopped. TOGETHER="3": as long as there are fewer ranks, each step waits to be stopped for another
node, up to the second. DIES="1 3 5": rank 1 kills itself in step 5 whenever there are 3 ranks.
HANGS="1 5 FILE": rank 1 goes on for ever in step 5, once: FILE gets its process id. RAISES="1 5":
rank 1 raises in step 5; RAISES="any 5": every rank. SLEEPS="3": each step takes three seconds.
ENDS_IN="30": the batch job's time limit is so many seconds away, however long it took to start.

Steps count from 1 over the whole run, also after a resume.
"""

from __future__ import annotations

import os
import signal
import time
import traceback
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from stepladder import Job
from stepladder.rank.preemption import END_TIME_VARIABLE
from stepladder.recipes import mlp


@dataclass
class Config:
    epochs: int = 2
    global_batch: int = 32
    lr: float = 0.02
    seed: int = 0
    samples: int = 320  # ten steps per epoch


def build(config: Config) -> Job:
    if "ENDS_IN" in os.environ:
        os.environ[END_TIME_VARIABLE] = str(int(time.time()) + int(os.environ["ENDS_IN"]))
    job = mlp.build(mlp.Config(**vars(config)))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        job.optimizer, lambda _: 1.0
    )  # knows the step, also after a resume
    passed: set[int] = set()

    def loss(model: nn.Module, batch: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
        step = schedule.last_epoch + 1
        if step not in passed and not is_for_snapshot():
            passed.add(step)
            before(step)
        return mlp.squared_error(model, batch)

    return replace(job, loss=loss, schedule=schedule)


def is_for_snapshot() -> bool:
    """Tell whether the loss is the one that a snapshot has, and none of a step."""
    stack = traceback.walk_stack(None)
    return any(frame.f_code.co_name == "_compute_next_values" for frame, _ in stack)


def before(step: int) -> None:
    rank, size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    time.sleep(float(os.environ.get("SLEEPS", "0")))
    if os.environ.get("DIES", "").split() == [rank, size, str(step)]:
        os.kill(os.getpid(), signal.SIGKILL)
    if os.environ.get("RAISES", "").split() in ([rank, str(step)], ["any", str(step)]):
        raise RuntimeError(f"raised at step {step}")
    if os.environ.get("HANGS", "").split()[:2] == [rank, str(step)]:
        hang(Path(os.environ["HANGS"].split()[2]))
    while (
        rank == "0"
        and step <= 2
        and int(size) < int(os.environ.get("TOGETHER", "0"))
        and not asked_to_stop()
    ):
        time.sleep(0.02)
    folder, *steps = os.environ.get("GATES", "-").split()
    if is_first() and str(step) in steps:
        (Path(folder) / f"at-{step}").write_text("here")
        while not (Path(folder) / f"open-{step}").exists() and not asked_to_stop():
            time.sleep(0.02)


def is_first() -> bool:
    """RANK is that of the start; when the first rank is lost, another one is the first of those
    that go on.
    """
    return not dist.is_initialized() or dist.get_rank() == 0


def asked_to_stop() -> bool:
    return getattr(
        getattr(signal.getsignal(signal.SIGTERM), "__self__", None), "stop_requested", False
    )


def hang(marker: Path) -> None:
    if not marker.exists():
        marker.write_text(str(os.getpid()))
        while True:
            time.sleep(0.1)
