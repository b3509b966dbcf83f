"""Train a small convolutional network on handwritten digits.

    stepladder train digits --nproc 2

The data are the 1,797 real digits of 8 x 8 pixels that come with scikit-learn (Alpaydin and Kaynak,
UCI, 1998), so nothing is downloaded. The last 360 are the test set, of which the network gets 97 to
99 % right.

The network uses group norm (Wu and He, 2018) instead of batch norm. Group norm normalizes one image
at a time, so the result does not depend on which process computes which part of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepladder import Job
from stepladder.core.extras import import_extra
from stepladder.core.numbers import validate_range
from stepladder.recipes._schedules import count_steps, one_cycle

TEST_IMAGES = 360
LABEL_SMOOTHING = 0.1  # raises the accuracy on images outside the training set by one percent


Batch = list[Tensor]  # images and labels
SumAndCount = tuple[Tensor, int]


@dataclass
class Config:
    """The settings of the job; each is a flag of `stepladder train digits`."""

    epochs: int = 15
    global_batch: int = 64
    lr: float = 0.005
    seed: int = 0
    width: int = 32  # channels of the first convolution
    dropout: float = 0.5  # part of the last layer's inputs, 0 to 1

    def __post_init__(self) -> None:
        validate_range(self, 1, 4096, "width")
        validate_range(self, 0, 1, "dropout")


def build(config: Config) -> Job:
    """Make the model, the optimizer, the data and the metrics of the job."""
    images, labels = _load_images()
    train_images = images[:-TEST_IMAGES]
    test_images = images[-TEST_IMAGES:]
    torch.manual_seed(config.seed)
    model = _make_model(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=config.lr)
    steps = count_steps(config.epochs, len(train_images), config.global_batch)
    return Job(
        model=model,
        optimizer=optimizer,
        loss=loss,
        train_data=(train_images, labels[:-TEST_IMAGES]),
        eval_data=(test_images, labels[-TEST_IMAGES:]),
        metrics=_classification_metrics,
        schedule=one_cycle(optimizer, steps, rise_steps=steps // 4),
        best=("test_accuracy", "max"),
    )


def _load_images() -> tuple[Tensor, Tensor]:
    """Return images, shape (1797, 1, 8, 8) with values in 0..1, and labels, shape (1797,)."""
    datasets = import_extra("sklearn.datasets", "recipe digits needs scikit-learn", "recipes")
    digits = datasets.load_digits()
    images = torch.from_numpy(digits.images).float().div(16).unsqueeze(1)
    labels = torch.from_numpy(digits.target).long()
    return images, labels


def _make_model(config: Config) -> nn.Module:
    width = config.width
    return nn.Sequential(
        *_conv_block(1, width, stride=1),
        *_conv_block(width, 2 * width, stride=2),
        *_conv_block(2 * width, 4 * width, stride=2),
        nn.Flatten(),
        nn.Dropout(config.dropout),
        nn.Linear(4 * width * 4, 10),
    )


def _conv_block(in_channels: int, out_channels: int, stride: int) -> list[nn.Module]:
    conv = nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False)
    norm = nn.GroupNorm(max(1, out_channels // 8), out_channels)
    return [conv, norm, nn.ReLU()]


def loss(model: nn.Module, batch: Batch) -> SumAndCount:
    """Return the sum of the losses of a batch, and the number of its images."""
    images, labels = batch
    logits = model(shift_images(images))
    total = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=LABEL_SMOOTHING)
    return total, len(labels)


def shift_images(images: Tensor) -> Tensor:
    """Shift each image by at most one pixel in both directions, at random in every step.

    The shifts come from torch's default generator. The trainer seeds it for each microbatch by
    seed, step and microbatch, so a resumed run, or a run on more processes, shifts an image by the
    same pixels.

    Args:
        images: Shape (n, 1, 8, 8).

    Returns:
        The shifted images, shape (n, 1, 8, 8). Pixels that enter at an edge are 0.
    """
    size = images.shape[-1]
    index = torch.arange(len(images), device=images.device)
    rows, columns = torch.randint(3, (2, len(images)), device=images.device)
    padded = F.pad(images, (1, 1, 1, 1))
    windows = padded.unfold(2, size, 1).unfold(3, size, 1)  # (n, 1, 3, 3, 8, 8)
    return windows[index, :, rows, columns]


def _classification_metrics(model: nn.Module, batch: Batch) -> dict[str, SumAndCount]:
    """Return the sum and the count of each metric on a batch."""
    images, labels = batch
    logits = model(images)
    num_correct = (logits.argmax(1) == labels).sum()
    total_loss = F.cross_entropy(logits, labels, reduction="sum")
    return {"test_accuracy": (num_correct, len(labels)), "test_loss": (total_loss, len(labels))}
