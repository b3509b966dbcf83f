"""stepladder train digits --nproc 2

The 1,797 real handwritten digits of 8 x 8 pixels that scikit-learn carries (Alpaydin and Kaynak, UCI, 1998):
real data without a download. The last 360 are the test set.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from stepladder import InputError, Job

TEST_IMAGES = 360


@dataclass
class Config:
    epochs: int = 20
    global_batch: int = 64
    lr: float = 0.003
    seed: int = 0
    width: int = 32
    dropout: float = 0.2


def build(config: Config) -> Job:
    images, labels = load_images()
    torch.manual_seed(config.seed)
    model = nn.Sequential(
        nn.Conv2d(1, config.width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(config.width, 2 * config.width, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(config.dropout),
        nn.Linear(2 * config.width * 16, 10),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=config.lr)
    return Job(
        model=model,
        optimizer=optimizer,
        loss=cross_entropy,
        train_data=(images[:-TEST_IMAGES], labels[:-TEST_IMAGES]),
        eval_data=(images[-TEST_IMAGES:], labels[-TEST_IMAGES:]),
        metrics=classification,
        best=("test_accuracy", "max"),
    )


def load_images() -> tuple[torch.Tensor, torch.Tensor]:
    """Images (1797, 1, 8, 8) in 0..1, labels (1797,)."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise InputError("recipe digits needs scikit-learn", "pip install 'stepladder[recipes]'") from error
    digits = load_digits()
    images = torch.from_numpy(digits.images).float().div(16).unsqueeze(1)
    return images, torch.from_numpy(digits.target).long()


def cross_entropy(model: nn.Module, batch: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="sum"), len(y)


def classification(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, tuple[torch.Tensor, int]]:
    x, y = batch
    logits = model(x)
    right = (logits.argmax(1) == y).sum()
    return {"test_accuracy": (right, len(y)), "test_loss": (F.cross_entropy(logits, y, reduction="sum"), len(y))}
