"""Train a convolutional network on MNIST.

    stepladder train mnist --data-dir data/mnist --nproc 2

It reaches 99 % on MNIST (LeCun et al., 1998) in two epochs on two CPU cores: a small network of
strided convolutions with batch norm, and one cycle of the learning rate (Smith and Topin, 2018).
`--net classic` is the network of PyTorch's MNIST example.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepladder import Job, Shards
from stepladder.core.numbers import validate_range
from stepladder.data.idx import read_mnist
from stepladder.recipes._schedules import count_steps, one_cycle

PIXEL_MEAN = 0.1307  # of the training images, whose values are in 0..1
PIXEL_STD = 0.3081


Batch = list[Tensor]  # images and labels
SumAndCount = tuple[Tensor, int]


@dataclass
class Config:
    """The settings of the job; each is a flag of `stepladder train mnist`."""

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
    """Make the model, the optimizer, the data and the metrics of the job."""
    train_data, eval_data = read_data(Path(config.data_dir))
    torch.manual_seed(config.seed)
    if config.net == "classic":
        model = _classic_net()
        lr = config.lr / 4  # without batch norm the full rate diverges
    else:
        model = small_net()
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        lr = config.lr
    optimizer = torch.optim.SGD(
        model.parameters(), lr=lr, momentum=0.9, nesterov=True, weight_decay=config.weight_decay
    )
    num_images = len(train_data) if isinstance(train_data, Shards) else len(train_data[1])
    steps = count_steps(config.epochs, num_images, config.global_batch)
    return Job(
        model=model,
        optimizer=optimizer,
        loss=loss,
        train_data=train_data,
        eval_data=eval_data,
        metrics=_classification_metrics,
        schedule=one_cycle(optimizer, steps, rise_steps=steps // 4),
        best=("test_accuracy", "max"),
    )


def read_data(folder: Path) -> tuple[Any, Any]:
    """Return the training data and the test data.

    A folder of the four MNIST files gives tensors in memory. A folder that `stepladder data shard`
    wrote, with the subfolders train and test, gives shards, which are streamed.
    """
    if (folder / "train").is_dir():
        columns = ("images", "labels")
        return Shards(folder / "train", columns), Shards(folder / "test", columns)
    mnist = read_mnist(folder)
    train_data = (mnist.train_images, mnist.train_labels)
    test_data = (mnist.test_images, mnist.test_labels)
    return tuple(map(torch.from_numpy, train_data)), tuple(map(torch.from_numpy, test_data))


def small_net() -> nn.Module:
    """Make a network of strided convolutions: 28 -> 14 -> 7 -> 4 pixels.

    It has no pooling and takes 0.6 million multiplications an image.

    Returns:
        A network from images, shape (n, 1, 28, 28), to logits, shape (n, 10).
    """
    return nn.Sequential(
        *_conv_block(1, 16, kernel_size=5),
        *_conv_block(16, 32, kernel_size=3),
        *_conv_block(32, 64, kernel_size=3),
        nn.Flatten(),
        nn.Linear(1024, 10),
    )


def _conv_block(in_channels: int, out_channels: int, kernel_size: int) -> list[nn.Module]:
    padding = kernel_size // 2
    conv = nn.Conv2d(in_channels, out_channels, kernel_size, stride=2, padding=padding, bias=False)
    return [conv, nn.BatchNorm2d(out_channels), nn.ReLU()]


def _classic_net() -> nn.Module:
    """Make the network of PyTorch's MNIST example."""
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


def compute_logits(model: nn.Module, images: Tensor) -> Tensor:
    """Normalize the images and return the model's output for them.

    The data stay bytes in memory, a quarter of the size of floats, until a batch needs them.

    Args:
        model: The network.
        images: Shape (n, 28, 28), uint8.

    Returns:
        The logits, shape (n, 10).
    """
    pixels = images.unsqueeze(1).float()
    return model(pixels.div_(255).sub_(PIXEL_MEAN).div_(PIXEL_STD))


def loss(model: nn.Module, batch: Batch) -> SumAndCount:
    """Return the sum of the losses of a batch, and the number of its images."""
    images, labels = batch
    logits = compute_logits(model, images)
    return F.cross_entropy(logits, labels.long(), reduction="sum"), len(labels)


def _classification_metrics(model: nn.Module, batch: Batch) -> dict[str, SumAndCount]:
    """Return the sum and the count of each metric on a batch."""
    images, labels = batch
    logits = compute_logits(model, images)
    num_correct = (logits.argmax(1) == labels).sum()
    total_loss = F.cross_entropy(logits, labels.long(), reduction="sum")
    return {"test_accuracy": (num_correct, len(labels)), "test_loss": (total_loss, len(labels))}
