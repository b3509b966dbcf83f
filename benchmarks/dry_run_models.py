"""Nine models of different kinds for dry_run.py, as a job file: stepladder train dry_run_models.py
--model cnn
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepladder import Job
from stepladder.recipes import gpt

ROWS = 64


@dataclass
class Config:
    model: Literal[
        "mlp", "cnn", "resnet", "encoder", "lstm", "recommender", "autoencoder", "tied", "gpt"
    ] = "mlp"
    global_batch: int = 32
    lr: float = 1e-3


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.inner(x))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(2000, 512)
        self.head = nn.Linear(512, 2000)
        self.lstm = nn.LSTM(512, 512, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.tokens(x))[0])


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            384, 6, 1536, dropout=0.1, batch_first=True, norm_first=True
        )
        self.tokens = nn.Embedding(2000, 384)
        self.head = nn.Linear(384, 2000)
        self.layers = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.tokens(x)))


class Tied(nn.Module):
    """The head has the embedding's weights, and one block is used four times."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(8000, 512)
        self.head = nn.Linear(512, 8000, bias=False)
        self.head.weight = self.tokens.weight
        self.block = nn.Sequential(
            nn.LayerNorm(512), nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)
        )

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.tokens(x)
        for _ in range(4):
            hidden = hidden + self.block(hidden)
        return self.head(hidden)


class Characters(gpt.GPT):
    """The recipe's, with 2000 characters."""

    def __init__(self) -> None:
        config = gpt.Config(layers=6, heads=6, width=384, ngrams=2)
        super().__init__(config, torch.arange(2000, dtype=torch.int32))


class Factors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(60_000, 128)
        self.items = nn.Embedding(40_000, 128)
        self.tower = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.tower(torch.cat([self.users(x[:, 0]), self.items(x[:, 1])], 1))


def convolution(channels: int) -> nn.Module:
    inner = [
        nn.Conv2d(channels, channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
    ]
    return Residual(
        nn.Sequential(*inner, nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels))
    )


def pictures() -> tuple[Tensor, Tensor]:
    return torch.rand(ROWS, 3, 32, 32), torch.randint(10, (ROWS,))


def texts(length: int = 64) -> tuple[Tensor, Tensor]:
    return torch.randint(2000, (ROWS, length)), torch.randint(2000, (ROWS, length))


def made(name: str) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """The model, and data that fit it."""
    if name == "mlp":
        hidden = [layer for _ in range(6) for layer in (nn.Linear(1536, 1536), nn.ReLU())]
        return nn.Sequential(*hidden, nn.Linear(1536, 10)), (
            torch.rand(ROWS, 1536),
            torch.randint(10, (ROWS,)),
        )
    if name == "cnn":
        sizes = [(3, 64), (64, 128), (128, 256), (256, 512)]
        layers = [
            m for i, o in sizes for m in (nn.Conv2d(i, o, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        ]
        return nn.Sequential(
            *layers, nn.Flatten(), nn.Linear(2048, 1024), nn.Linear(1024, 10)
        ), pictures()
    if name == "resnet":
        blocks = [convolution(96) for _ in range(4)]
        pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, 10)]
        return nn.Sequential(nn.Conv2d(3, 96, 3, padding=1), *blocks, *pool), pictures()
    if name == "autoencoder":
        down = [nn.Conv2d(3, 64, 4, 2, 1), nn.GELU(), nn.Conv2d(64, 256, 4, 2, 1), nn.GELU()]
        up = [nn.ConvTranspose2d(256, 64, 4, 2, 1), nn.GELU(), nn.ConvTranspose2d(64, 10, 4, 2, 1)]
        return nn.Sequential(*down, *up), (
            torch.rand(ROWS, 3, 32, 32),
            torch.randint(10, (ROWS, 32, 32)),
        )
    if name == "recommender":
        return Factors(), (torch.randint(40_000, (ROWS, 2)), torch.randint(10, (ROWS,)))
    sequences: dict[str, type[nn.Module]] = {
        "encoder": Encoder,
        "lstm": Recurrent,
        "tied": Tied,
        "gpt": Characters,
    }
    return sequences[name](), texts()


def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    x, y = batch
    logits = model(x)
    if logits.ndim == 3:  # of tokens
        logits = logits.transpose(1, 2)
    return F.cross_entropy(logits, y, reduction="sum"), y.numel()


def build(config: Config) -> Job:
    torch.manual_seed(0)
    model, data = made(config.model)
    adam = config.model not in ("cnn", "autoencoder")
    kind = torch.optim.AdamW if adam else torch.optim.SGD
    options: dict[str, Any] = {} if adam else {"momentum": 0.9 if config.model == "cnn" else 0.0}
    options |= {"fused": True} if config.model == "gpt" else {}
    optimizer = kind(model.parameters(), lr=config.lr, **options)
    return Job(
        model, optimizer, loss, data, clip_norm=1.0 if config.model in ("lstm", "encoder") else None
    )
