"""stepladder train finetune_job.py --weights out/base/model.safetensors: fine-tune a trained model.

Its first layer starts from the weights in a file and is frozen; its last layer is new, and is
trained on another task with a warm-up and a cosine schedule.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from plain import load_data, make_model
from safetensors.torch import load_file
from stepladder import InputError, Job, mean_loss
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

WARM_UP_STEPS = 20


@dataclass
class Config:
    weights: str = "out/base/model.safetensors"
    epochs: int = 5
    global_batch: int = 64
    lr: float = 0.01
    hidden: int = 128
    seed: int = 0


def is_even(data):
    """Return the same images with another label: whether the digit is even."""
    images, digits = data[:]
    return images, (digits % 2 == 0).long()


def build(config):
    if not Path(config.weights).is_file():
        raise InputError(
            f"--weights {config.weights} is no file",
            "stepladder export RUN_DIR --to safetensors out/base, or --weights FILE",
        )
    model = make_model(config)
    model.load_state_dict(load_file(config.weights))
    model[-1] = torch.nn.Linear(model[-1].in_features, 2)
    for parameter in model[:-1].parameters():
        parameter.requires_grad = False
    train_data, test_data = map(is_even, load_data())

    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=config.lr)
    steps = config.epochs * -(-len(train_data[0]) // config.global_batch)
    warm_up = LinearLR(optimizer, 0.1, total_iters=WARM_UP_STEPS)
    decay = CosineAnnealingLR(optimizer, steps - WARM_UP_STEPS)
    schedule = SequentialLR(optimizer, [warm_up, decay], [WARM_UP_STEPS])
    loss = mean_loss(F.cross_entropy)
    best = ("accuracy", "max")
    return Job(model, optimizer, loss, train_data, test_data, metrics, schedule, best=best)


def metrics(model, batch):
    images, labels = batch
    correct = (model(images).argmax(dim=1) == labels).sum()
    return {"accuracy": (correct, len(labels))}
