"""A tiny job that fails in the place that the variable PLACE names, as the variable HOW says.

PLACE is a key of `at`'s callers below, HOW a key of HOWS. On several ranks all of them fail, but in
the data only the rank that reads the item."""

from __future__ import annotations

import atexit
import os
import signal
import threading
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, default_collate

from stepladder import InputError, Job

PLACE, HOW = os.environ.get("PLACE", ""), os.environ.get("HOW", "error")
SAMPLES, BAD = 32, 17


@dataclass
class Config:
    epochs: int = 2
    global_batch: int = 8
    lr: float = 0.05
    workers: int = 2


class Wants(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"planted: {first} and {second}")


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class Bare(BaseException):
    pass


@dataclass(frozen=True)
class Frozen(Exception):
    text: str


def local_class() -> BaseException:
    class Local(Exception):
        pass

    return Local("planted")


def with_step() -> BaseException:
    error = RuntimeError("planted")
    error.step = object()  # type: ignore[attr-defined]
    return error


HOWS: dict[str, Any] = {
    "error": partial(RuntimeError, "planted"), "stop": partial(StopIteration, "planted"),
    "exit 0": partial(SystemExit, 0), "exit 3": partial(SystemExit, 3), "exit 75": partial(SystemExit, 75),
    "interrupt": partial(KeyboardInterrupt, "planted"), "local": local_class, "wants": partial(Wants, 1, 2),
    "mute": Mute, "bare": partial(Bare, "planted"), "pipe": partial(BrokenPipeError, 32, "planted"),
    "frozen": partial(Frozen, "planted"), "step": with_step, "input": partial(InputError, "planted", "type it"),
    "memory": partial(MemoryError, "planted"),
}  # fmt: skip


def at(place: str) -> None:
    """Fail here, if PLACE says so."""
    if place != PLACE:
        return
    if HOW == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif HOW == "leave":
        os._exit(5)
    raise HOWS[HOW]()


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        if index == BAD:
            at("dataset")
        return torch.full((4,), index / SAMPLES), torch.ones(1)


class Falls:
    def __del__(self) -> None:
        at("del")


def collate(items: list[Any]) -> Any:
    at("collate")
    return default_collate(items)


def start_thread() -> None:
    thread = threading.Thread(target=at, args=("thread",))
    thread.start()
    thread.join()
    if PLACE == "waits":  # a thread that nobody ends keeps the interpreter from its end
        threading.Thread(target=threading.Event().wait, name="of-the-job").start()


def build(config: Config) -> Job:
    at("build")
    atexit.register(at, "atexit")
    start_thread()
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr)

    def rate(step: int) -> float:
        if step > 1:
            at("schedule")
        return 1.0

    def loss(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        Falls()
        at("loss")
        if PLACE == "waits":
            raise RuntimeError("planted")
        return ((model(batch[0]) - batch[1]) ** 2).sum(), len(batch[0])

    def metrics(model: nn.Module, batch: Any) -> dict[str, Any]:
        at("metrics")
        return {"error": ((model(batch[0]) - batch[1]).abs().sum(), len(batch[0]))}

    def derived(values: dict[str, float]) -> dict[str, float]:
        at("derived")
        return {}

    return Job(
        model,
        optimizer,
        loss,
        Rows(),
        Rows() if PLACE != "dataset" else None,
        metrics,
        torch.optim.lr_scheduler.LambdaLR(optimizer, rate),
        derived=derived,
        num_workers=config.workers,
        collate=collate,
    )
