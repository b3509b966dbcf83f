"""The job of goodput.py as a script under torchrun and under torchft: same model, data, order,
learning rate.

    torchrun ... goodput_rivals.py torchrun FOLDER --every N
    python goodput_rivals.py torchft FOLDER

Each process appends a record per step to FOLDER/steps-RANK. Under torchrun, rank 0 saves every N
steps, and all resume from there. Under torchft, a process takes its share of the step that its
manager is at, as torchft's own DistributedSampler deals it: what belongs to one that is down is
left out."""

from __future__ import annotations

import argparse
import logging
import os
import struct
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from stepladder.core.plan import Plan, Span
from stepladder.recipes.mlp import Config, build

SAMPLES = 48_000
GLOBAL_BATCH = 96
MICROBATCH = 16
LEARNING_RATE = 0.02
FEATURES = 64
HIDDEN = 1024
NPROC = 3
RECORD = struct.Struct(
    "qqqd"
    # attempt, step from 0, samples of the whole step, 0 if it was in vain, this process's loss summed
)
SECONDS_TO_ANSWER = timedelta(seconds=10)


class Share:
    """What one process trains, and where it writes that down."""

    def __init__(self, folder: Path, rank: int) -> None:
        config = Config(
            global_batch=GLOBAL_BATCH,
            lr=LEARNING_RATE,
            samples=SAMPLES,
            features=FEATURES,
            hidden=HIDDEN,
        )
        self.job = build(config)
        self.rank = rank
        self.plan = Plan(SAMPLES, GLOBAL_BATCH, MICROBATCH, config.seed)
        self.file = os.open(folder / f"steps-{rank}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def batch(self, step: int) -> list[torch.Tensor]:
        size = GLOBAL_BATCH // NPROC
        places = self.plan.indices(step, Span(0, self.rank * size, (self.rank + 1) * size))
        rows = torch.from_numpy(places)
        return [tensor[rows] for tensor in self.job.train_data]

    def loss(self, model: torch.nn.Module, step: int) -> torch.Tensor:
        x, y = self.batch(step)
        return F.mse_loss(model(x), y)

    def record(self, attempt: int, step: int, samples: int, loss: torch.Tensor) -> None:
        total = loss.item() * GLOBAL_BATCH / NPROC
        os.write(self.file, RECORD.pack(attempt, step, samples, total))


def under_torchrun(folder: Path, every: int) -> None:
    dist.init_process_group("gloo")
    share = Share(folder, dist.get_rank())
    saved = folder / "saved.pt"
    step = 0
    optimizer = share.job.optimizer
    if saved.exists():
        state = torch.load(saved)
        share.job.model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    model = DistributedDataParallel(share.job.model)
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    while True:
        loss = share.loss(model, step)
        optimizer.zero_grad()
        share.record(attempt, step, GLOBAL_BATCH, loss.detach())
        loss.backward()
        optimizer.step()
        step += 1
        if step % every == 0 and share.rank == 0:
            state = {
                "model": share.job.model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "step": step,
            }
            torch.save(state, saved.with_suffix(".new"))
            saved.with_suffix(".new").replace(saved)


def split_like(flat: torch.Tensor, model: torch.nn.Module) -> list[torch.Tensor]:
    params = list(model.parameters())
    parts = flat.split([param.numel() for param in params])
    return [part.view(param.shape) for part, param in zip(parts, params, strict=True)]


def under_torchft(folder: Path) -> None:
    import torchft

    logging.disable(logging.WARNING)  # a kilobyte a step otherwise
    share = Share(folder, int(os.environ["REPLICA"]))
    job = share.job

    def state() -> dict[str, Any]:
        return {"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict()}

    def adopt(state: dict[str, Any]) -> None:
        job.model.load_state_dict(state["model"])
        job.optimizer.load_state_dict(state["optimizer"])

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=SECONDS_TO_ANSWER),
        min_replica_size=2,
        load_state_dict=adopt,
        state_dict=state,
        replica_id=f"replica_{share.rank}",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        timeout=SECONDS_TO_ANSWER,
        hostname="127.0.0.1",
    )
    optimizer = torchft.Optimizer(manager, job.optimizer)
    while True:
        step = manager.current_step()
        optimizer.zero_grad()  # begins the quorum of this step
        loss = share.loss(job.model, step)
        loss.backward()
        # Not by torchft's DistributedDataParallel: after an all-reduce that failed, its hook ends
        # the process.
        grads = torch.cat(
            [param.grad.flatten() for param in job.model.parameters() if param.grad is not None]
        )
        manager.allreduce(grads).wait()
        for param, grad in zip(job.model.parameters(), split_like(grads, job.model), strict=True):
            param.grad = grad
        optimizer.step()
        if manager.is_participating():
            done = manager.current_step() == step + 1
            samples = manager.num_participants() * GLOBAL_BATCH // NPROC if done else 0
            share.record(0, step, samples, loss.detach())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("under", choices=["torchrun", "torchft"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--every", type=int, default=0)
    args = parser.parse_args()
    if args.under == "torchrun":
        under_torchrun(args.folder, args.every)
    else:
        under_torchft(args.folder)
