"""What the tests of snapshots store: a small model with everything that is hard to store, and a
plain one.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from processes import SECONDS
from ranks import CONTEXT
from stepladder.storage.snapshot import Snapshot, read_snapshot
from stepladder.storage.snapshot_store import Snapshots


class Awkward(nn.Module):
    """Tied weights, channels_last convolution, bf16 parameter, 0-dim and empty buffers, a bool
    buffer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(4)
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.gain = nn.Parameter(torch.randn(4, dtype=torch.bfloat16))
        self.register_buffer("calls", torch.tensor(0, dtype=torch.int64))
        self.register_buffer("empty", torch.empty(0, 3))
        self.register_buffer("mask", torch.tensor([True, False]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.head(self.norm(self.conv(x)).mean((2, 3)) * self.gain.float())


class Training:
    """The model with Adam, and steps on data that follow from the step's number."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = Awkward()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.step = 0

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.step += 1
            x = torch.randn(6, 3, 5, 5, generator=torch.Generator().manual_seed(self.step))
            self.optimizer.zero_grad()
            self.model(x).square().sum().backward()
            self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return {
            "optimizer": self.optimizer.state_dict(),
            "position": (self.step, 0.5),
            "note": None,
        }

    def restore(self, snapshot: Snapshot) -> None:
        snapshot.restore_model(self.model)
        self.optimizer.load_state_dict(snapshot.state()["optimizer"])
        self.step = snapshot.step


def bits(tree: Any) -> Any:
    """A nested state with every tensor as (dtype, shape, bytes), so that == compares bits and NaN
    equals NaN.
    """
    if isinstance(tree, torch.Tensor):
        raw = tree.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return str(tree.dtype), tuple(tree.shape), raw
    if isinstance(tree, dict):
        return {name: bits(value) for name, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [bits(value) for value in tree]
    return tree


def model_of(step: int) -> nn.Module:
    """A model whose weights say which step they are of."""
    model = nn.Linear(30, 20)
    nn.init.constant_(model.weight, float(step))
    return model


def save(snapshots: Snapshots, step: int) -> None:
    snapshots.save(step, model_of(step), {"numbers": torch.arange(100)}, {"ledger": "chain"})
    snapshots.wait()


def whole_steps(folder: Path) -> list[int]:
    """Steps that a later run finds, each verified."""
    return [read_snapshot(path).step for path in Snapshots(folder).paths()]


ACTS = (
    (os, "fsync"),
    (shutil, "rmtree"),
    (Path, "mkdir"),
    (Path, "write_bytes"),
    (Path, "rename"),
    (Path, "replace"),
)


def kill_before_act(number: int, function: Callable[..., Any], *args: Any) -> None:
    """Call the function, and be killed before the number-th time that the disk is told anything."""
    acts = []

    def counting(act: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            acts.append(act)
            if len(acts) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return act(*args, **kwargs)

        return counted

    for owner, name in ACTS:
        setattr(owner, name, counting(getattr(owner, name)))
    function(*args)


def run_until_killed(function: Callable[..., Any], *args: Any) -> None:
    """Run a function in a process that kills itself."""
    process = CONTEXT.Process(target=function, args=args)
    process.start()
    process.join(SECONDS)
    code = process.exitcode
    process.kill()
    process.join()
    assert code == -signal.SIGKILL, f"the writer should have killed itself, its exit code is {code}"
