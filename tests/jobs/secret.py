"""A job with secrets in its Config, and a field that only sounds like one. It says what it was
given.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from stepladder import Job, mean_loss


@dataclass
class Config:
    hf_token: str = ""
    data_url: str = ""
    max_tokens: int = 8
    pad_token: str = "<pad>"
    global_batch: int = 8
    given: str = ""  # a file for what the job was given


def build(config: Config) -> Job:
    if config.given:
        Path(config.given).write_text(json.dumps(asdict(config)))
    torch.manual_seed(0)
    x, model = torch.randn(32, 4), nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Job(model, optimizer, mean_loss(nn.functional.mse_loss), (x, x[:, :1]))
