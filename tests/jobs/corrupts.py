"""A small job in which one rank computes wrongly: for `--replay-every`, in tests and in
benchmarks/recompute_check.py.

PLANT="KIND MODE RANK STEP" in the environment: what goes wrong, how often, on which rank, from
which step on. kinds: product (a matrix product of forward), backward (one of backward), weight (in
memory), batch (in memory), gradient (of a whole microbatch, before it is sent): a bit of it is
flipped.  modes: once (in a microbatch that is replayed), missed (in one that is not), sometimes
(each third pass), always. PLANTED: a file that says it was done."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from stepladder import Job
from stepladder.train.sync.exact import TreeBucket
from stepladder.train.trainer import TrainingLoop

KIND, MODE, RANK, STEP = os.environ.get("PLANT", "none never 0 0").split()
PLANTED = Path(os.environ.get("PLANTED", "planted"))
RIGHT_PASS, RIGHT_PUSH = TrainingLoop._run_pass, TreeBucket.push


@dataclass
class Config:
    epochs: int = 1000
    global_batch: int = 24
    lr: float = 0.05
    seed: int = 0


class Fault:
    """Whether this process is struck in the pass under way, its own or one that it computes again."""

    struck, passes, flips = False, 0, 0

    def begin(self, loop: Any, number: int) -> None:
        self.struck = False
        if loop.state.step + 1 < int(STEP):
            return
        self.passes += 1
        if MODE in ("once", "missed"):
            chosen = (
                loop.listeners[0]._choose_microbatch(loop.state.step, loop.comm.world.rank).number
            )
            self.struck = (number == chosen) == (MODE == "once") and not PLANTED.exists()
            if self.struck:
                PLANTED.touch()
        else:
            self.struck = MODE == "always" or self.passes % 3 == 1

    @torch.no_grad()
    def flip(self, kind: str, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, with another bit each time, where a fault of this kind strikes."""
        if self.struck and kind == KIND:
            tensor.view(torch.int32).view(-1)[self.flips % tensor.numel()] ^= 1 << 20
            self.flips += kind == "weight"
        return tensor


FAULT = Fault()


def faulty_pass(loop: Any, span: Any, batch: Any, backward: Any) -> Any:
    FAULT.begin(loop, span.number)
    FAULT.flip("batch", batch[0])
    FAULT.flip("weight", loop.model.first.weight)
    return RIGHT_PASS(loop, span, batch, backward)


def faulty_push(bucket: Any, microbatch: int) -> None:
    if bucket.params:
        FAULT.flip("gradient", bucket.leaf)
    RIGHT_PUSH(bucket, microbatch)


NAMES = "STEPLADDER_JOINS", "RANK", "SLURM_PROCID"
if next((os.environ[name] for name in NAMES if name in os.environ), "0") == RANK and KIND != "none":
    TrainingLoop._run_pass, TreeBucket.push = faulty_pass, faulty_push


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.1)
        self.last = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = self.first(x)
        product = product + (FAULT.flip("product", product.detach().clone()) - product).detach()
        if product.requires_grad:
            product.register_hook(lambda grad: FAULT.flip("backward", grad.clone()))
        return self.last(self.drop(self.norm(product).tanh()))


def loss(model: nn.Module, batch: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
    x, y = batch
    return F.mse_loss(model(x), y, reduction="sum"), len(x)


def build(config: Config) -> Job:
    torch.manual_seed(config.seed)
    x = torch.randn(96, 6, generator=torch.Generator().manual_seed(7))
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr, momentum=0.9)
    return Job(model, optimizer, loss, (x, x.sum(1, keepdim=True).sin()))
