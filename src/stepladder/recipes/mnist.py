"""stepladder train mnist --data-dir data/mnist --nproc 2

MNIST (LeCun et al., 1998) to 99 % in two epochs on two CPU cores: a small strided CNN with batch
norm, one learning-rate cycle (Smith and Topin, 2018). `--net classic` is the net of the well-known
PyTorch example."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from stepladder import Job, Shards
from stepladder.core.numbers import validate_range
from stepladder.data.formats.idx import read_mnist

MEAN, STD = 0.1307, 0.3081  # of the training pixels, in 0..1


@dataclass
class Config:
    epochs: int = 2
    global_batch: int = 256
    lr: float = 0.6
    seed: int = 0
    data_dir: str = "data/mnist"
    net: Literal["small", "classic"] = "small"  # classic: that of the well-known example
    weight_decay: float = 1e-4  # L2 penalty

    def __post_init__(self) -> None:
        validate_range(self, 0, 1e6, "weight_decay")


def build(config: Config) -> Job:
    train_data, eval_data = read_data(Path(config.data_dir))
    torch.manual_seed(config.seed)
    classic = config.net == "classic"
    model = classic_net() if classic else small_net()
    if not classic:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    lr = (
        config.lr / 4 if classic else config.lr
    )  # the classic net has no batch norm to tame the rate
    optimizer = torch.optim.SGD(
        model.parameters(), lr=lr, momentum=0.9, nesterov=True, weight_decay=config.weight_decay
    )
    num_images = len(train_data) if isinstance(train_data, Shards) else len(train_data[1])
    steps = config.epochs * -(-num_images // config.global_batch)
    return Job(
        model=model,
        optimizer=optimizer,
        loss=cross_entropy,
        train_data=train_data,
        eval_data=eval_data,
        metrics=classification,
        schedule=torch.optim.lr_scheduler.LambdaLR(optimizer, one_cycle(steps)),
        best=("test_accuracy", "max"),
    )


def read_data(folder: Path) -> Any:
    """Training and test images and labels, from the four MNIST files, or streamed from `data
    shard`'s folders.
    """
    if (folder / "train").is_dir():
        return tuple(
            Shards(folder / part, columns=("images", "labels")) for part in ("train", "test")
        )
    mnist = read_mnist(folder)
    train, test = (mnist.train_images, mnist.train_labels), (mnist.test_images, mnist.test_labels)
    return tuple(tuple(map(torch.from_numpy, part)) for part in (train, test))


def one_cycle(steps: int) -> Callable[[int], float]:
    """Up to the full rate in the first quarter, then down to zero, both linear."""
    rise = max(1, steps // 4)
    return lambda step: min((step + 1) / rise, max(0.0, (steps - step) / (steps - rise + 1)))


def small_net() -> nn.Module:
    """Strided convolutions instead of pooling, 28 -> 14 -> 7 -> 4 pixels; 0.6 million
    multiplications an image.
    """

    def block(inputs: int, outputs: int, size: int) -> list[nn.Module]:
        conv = nn.Conv2d(inputs, outputs, size, stride=2, padding=size // 2, bias=False)
        return [conv, nn.BatchNorm2d(outputs), nn.ReLU()]

    return nn.Sequential(
        *block(1, 16, 5), *block(16, 32, 3), *block(32, 64, 3), nn.Flatten(), nn.Linear(1024, 10)
    )


def classic_net() -> nn.Module:
    """The layers of the PyTorch example: two 3 x 3 convolutions, max-pool, dropout, two linear
    layers.
    """
    return nn.Sequential(
        nn.Conv2d(1, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(9216, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, 10),
    )


def logits_of(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    """Images (n, 28, 28) uint8, normalised here: a quarter of the memory, and one conversion per
    batch.
    """
    return model(images.unsqueeze(1).float().div_(255).sub_(MEAN).div_(STD))


def cross_entropy(model: nn.Module, batch: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
    x, y = batch
    return F.cross_entropy(logits_of(model, x), y.long(), reduction="sum"), len(y)


def classification(
    model: nn.Module, batch: list[torch.Tensor]
) -> dict[str, tuple[torch.Tensor, int]]:
    x, y = batch
    logits, labels = logits_of(model, x), y.long()
    right = (logits.argmax(1) == labels).sum()
    loss = F.cross_entropy(logits, labels, reduction="sum")
    return {"test_accuracy": (right, len(y)), "test_loss": (loss, len(y))}
