"""stepladder train digits --nproc 2

The 1,797 real handwritten digits of 8 x 8 pixels that scikit-learn carries (Alpaydin and Kaynak,
UCI, 1998): real data without a download. The last 360 are the test set, of which 97 to 99 % come
out right.

A small convolutional net, its images moved a little in every step. Group norm (Wu and He, 2018)
instead of batch norm: it looks at one image at a time, so it does not matter who computes which
part of a batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from stepladder import InputError, Job
from stepladder.core.numbers import validate_range

TEST_IMAGES = 360
SMOOTHING = (
    0.1  # of the labels in training: one image in a hundred more is right, on images left out of it
)


@dataclass
class Config:
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
    images, labels = load_images()
    torch.manual_seed(config.seed)
    width = config.width
    model = nn.Sequential(
        *block(1, width, stride=1),
        *block(width, 2 * width, stride=2),
        *block(2 * width, 4 * width, stride=2),
        nn.Flatten(),
        nn.Dropout(config.dropout),
        nn.Linear(4 * width * 4, 10),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=config.lr)
    steps = config.epochs * -(-(len(images) - TEST_IMAGES) // config.global_batch)
    rise = max(1, steps // 4)
    return Job(
        model=model,
        optimizer=optimizer,
        loss=loss,
        train_data=(images[:-TEST_IMAGES], labels[:-TEST_IMAGES]),
        eval_data=(images[-TEST_IMAGES:], labels[-TEST_IMAGES:]),
        metrics=classification,
        schedule=torch.optim.lr_scheduler.LambdaLR(
            optimizer,
            lambda step: min((step + 1) / rise, max(0.0, (steps - step) / (steps - rise + 1))),
        ),
        best=("test_accuracy", "max"),
    )


def load_images() -> tuple[torch.Tensor, torch.Tensor]:
    """Images (1797, 1, 8, 8) in 0..1, labels (1797,)."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise InputError(
            "recipe digits needs scikit-learn", "pip install 'stepladder[recipes]'"
        ) from error
    digits = load_digits()
    images = torch.from_numpy(digits.images).float().div(16).unsqueeze(1)
    return images, torch.from_numpy(digits.target).long()


def block(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
    conv = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
    return [conv, nn.GroupNorm(max(1, outputs // 8), outputs), nn.ReLU()]


def moved(images: torch.Tensor) -> torch.Tensor:
    """Images (n, 1, 8, 8), each moved by up to one pixel in both directions, anew in every step.

    Drawn from torch's default generator, which the trainer sets for each pass by seed, step and
    microbatch: so a resumed run, or one on more processes, moves a sample as the first would have.
    """
    size, number = images.shape[-1], torch.arange(len(images), device=images.device)
    down, right = torch.randint(3, (2, len(images)), device=images.device)
    windows = (
        F.pad(images, (1, 1, 1, 1)).unfold(2, size, 1).unfold(3, size, 1)
    )  # (n, 1, 3, 3, 8, 8)
    return windows[number, :, down, right]


def loss(model: nn.Module, batch: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
    x, y = batch
    return F.cross_entropy(model(moved(x)), y, reduction="sum", label_smoothing=SMOOTHING), len(y)


def classification(
    model: nn.Module, batch: list[torch.Tensor]
) -> dict[str, tuple[torch.Tensor, int]]:
    x, y = batch
    logits = model(x)
    right = (logits.argmax(1) == y).sum()
    return {
        "test_accuracy": (right, len(y)),
        "test_loss": (F.cross_entropy(logits, y, reduction="sum"), len(y)),
    }
