"""stepladder train tests/jobs/killed.py --nproc 3 --sync exact: ranks that kill themselves where
KILL says.

KILL: words like "1:forward:5", for the rank with number 1 in the forward pass of its step 5, or of
any for "*". Each kills once; one that is deaf or unheard lives, and has not seen that the others
have met, or that the weights are gathered. AVERAGED: AdamW, and an average of the weights.
WRONG="5": whoever computes the loss of sample 5 raises. AS_NCCL: over gloo, waits for collectives
and leaves groups as it is done with NCCL."""

import os
import signal
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import torch

import stepladder.train.comm as collectives
from stepladder import Job
from stepladder.core.errors import PeerLost
from stepladder.storage.snapshot_store import Snapshots
from stepladder.train.comm import Comm
from stepladder.train.layout.zero1 import Zero1
from stepladder.train.pending import Pending
from stepladder.train.recorder import Recorder
from stepladder.train.recovery import SessionRecovery, StepJournal
from stepladder.train.session import Session
from stepladder.train.sync.base import Sync
from stepladder.train.trainer import TrainingLoop

PLANTED = [word.split(":") for word in os.environ.get("KILL", "").split()]
AVERAGED = "AVERAGED" in os.environ
now = {"rank": int(os.environ.get("RANK", -1)), "step": 0, "collectives": 0, "groups": 0}


@dataclass
class Config:
    """lr: learning rate."""

    lr: float = 0.05


def kill(point):
    for number, (rank, where, step) in enumerate(PLANTED):
        if where == point and now["rank"] == int(rank) and step in ("*", str(now["step"])):
            try:
                Path(os.environ["KILLED"], f"killed-{number}").touch(exist_ok=False)
            except FileExistsError:
                continue
            if where in ("deaf", "unheard"):
                raise PeerLost(f"rank {rank} is {where}")
            os.kill(os.getpid(), signal.SIGKILL)


def before(owner, name, point):
    """Kill before that function, or after it where the point ends with '+'; {groups}: how many were
    formed.
    """
    function = getattr(owner, name)

    def wrapped(self, *args, **options):
        if point.endswith("+"):
            result = function(self, *args, **options)
            kill(point[:-1].format(**now))
            return result
        kill(point.format(**now))
        return function(self, *args, **options)

    setattr(owner, name, wrapped)


def around_step(module, name):
    """Kill before and after the arithmetic of a step: --shard refuses hooks of the optimizer."""
    function = getattr(module, name)

    def wrapped(*args, **options):
        kill("optimizer")
        function(*args, **options)
        kill("stepped")

    setattr(module, name, wrapped)


def noting(function):
    def step(self):
        now.update(
            rank=self.comm.members[self.comm.world.rank], step=self.state.step + 1, collectives=0
        )
        return function(self)

    return step


def counting(function):
    def start(self, *args, **options):
        now["collectives"] += 1
        kill(f"exchange-{now['collectives']}")
        pending = function(self, *args, **options)
        kill(f"in-exchange-{now['collectives']}")
        return pending

    return start


def counting_groups(function):
    def synchronize(self):
        now["groups"] += 1
        kill(f"group-{now['groups']}")
        return function(self)

    return synchronize


if "AS_NCCL" in os.environ:
    destroy, poll = collectives.destroy_group, collectives.poll_work
    collectives.join_shared_memory = lambda *_: None
    collectives.destroy_group = lambda _, under_way: destroy(True, under_way)
    collectives.poll_work = lambda work, _, until: poll(work, True, until)

SessionRecovery._synchronize = counting_groups(SessionRecovery._synchronize)
TrainingLoop.step = noting(TrainingLoop.step)
before(Comm, "init_process_group", "meeting")
for name in ("_start", "combine", "start_sum"):  # the last two by way of shared memory
    setattr(Comm, name, counting(getattr(Comm, name)))
before(Recorder, "record_samples", "ledger+")
before(Sync, "finish", "vote+")
before(Sync, "finish", "deaf+")
before(Zero1, "gather", "unheard+")
before(Session, "end_epoch", "evaluation+")
before(Session, "snapshot", "snapshot-begins")
before(Snapshots, "save", "snapshot+")
before(StepJournal, "synchronize", "levelled-{groups}+")
before(Pending, "wait", "wait")
around_step(import_module("torch.optim.sgd"), "sgd")
around_step(import_module("torch.optim.adam"), "adam")  # AdamW, too


class Data(torch.utils.data.Dataset):
    def __init__(self):
        self.x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        kill("reading")
        return self.x[index], self.x[index].sum().sin()


def build(config):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr, momentum=0.9)
    if AVERAGED:
        optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr)
    data = Data()
    wrong = (
        data.x[int(os.environ["WRONG"])] if "WRONG" in os.environ else torch.full((8,), torch.nan)
    )

    def loss(model, batch):
        kill("forward")
        x, y = batch
        if (x == wrong.to(x.device)).all(1).any():
            raise ValueError("a sample that this loss cannot take")
        total = (model(x)[:, 0] - y).square().sum()
        total.register_hook(lambda _: kill("backward"))
        return total, len(x)

    def metrics(model, batch):
        kill("evaluating")
        x, y = batch
        return {"error": ((model(x)[:, 0] - y).abs().sum(), len(x))}

    return Job(
        model, optimizer, loss, data, data, metrics=metrics, ema_decay=0.9 if AVERAGED else None
    )
