"""stepladder train gpt --data-dir data/shakespeare --nproc 2

A language model of characters: a small transformer (Vaswani et al., 2017) that reads DIR/input.txt.
The first nine tenths are for training; `val_loss` is over all of the last tenth, in nats per token.
`stepladder recipe sample` prints what it writes.

Each step counts on a CPU, so it learns fast: normed queries and keys (Henry et al., 2020), squared
ReLU (So et al., 2021), layers that begin as nothing, and embeddings of each token together with
those before it, hashed, as of Huang et al. (2025): most of the weights, of which a token reads a
few rows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepladder import InputError, Job
from stepladder.core.errors import as_input_error
from stepladder.core.numbers import validate_range

MOST_CHARACTERS = 256  # of a text with more, and of what is no text, bytes are the tokens
# of the embedding of n-grams; a prime, so that those that share a row have nothing in common
ROWS = 8191
TABLE_RATE = 2.0  # the learning rate of embeddings, in that of matrices: a row is seldom met
SPAN = 5  # blocks in a row of the data, of which a step takes one
NOTHING = -1  # past the end of the text


@dataclass
class Config:
    epochs: int = 1
    global_batch: int = 8  # blocks
    lr: float = 4e-3
    seed: int = 0
    data_dir: str = "data/shakespeare"
    layers: int = 4
    heads: int = 4
    width: int = 128  # numbers for each token between the layers, a multiple of the heads
    block: int = 64  # tokens that the model sees at once
    ngrams: int = 4  # longest run of tokens that has an embedding; 1: none but that of the token
    dropout: float = 0.0  # part of what each layer adds, 0 to 1
    weight_decay: float = 0.1  # of matrices

    def __post_init__(self) -> None:
        validate_range(self, 1, 1e5, "layers", "heads", "width", "block")
        validate_range(self, 1, 8, "ngrams")
        validate_range(self, 0, 1, "dropout")
        validate_range(self, 0, 1e6, "weight_decay")
        if self.width % self.heads:
            raise InputError(
                f"--width {self.width} is no multiple of --heads {self.heads}",
                "--width 128 --heads 4",
            )


def build(config: Config) -> Job:
    tokens, characters = read_tokens(Path(config.data_dir) / "input.txt", config.block)
    block, cut = config.block, len(tokens) * 9 // 10
    train, validation = tokens[:cut], tokens[cut:]
    torch.manual_seed(config.seed)
    model = GPT(config, characters)
    matrices = [weight for weight in model.layers.parameters() if weight.ndim == 2]
    others = [
        weight for weight in model.parameters() if all(weight is not matrix for matrix in matrices)
    ]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": others, "lr": TABLE_RATE * config.lr, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.99), fused=True)
    rows = train.unfold(0, SPAN * block, (SPAN - 1) * block)  # views of the text
    steps = config.epochs * -(-len(rows) // config.global_batch)
    rise = max(1, steps // 20)
    missing = -(len(validation) - 1) % block
    return Job(
        model=model,
        optimizer=optimizer,
        loss=loss,
        train_data=rows,
        eval_data=F.pad(validation, (0, missing), value=NOTHING).unfold(0, block + 1, block),
        metrics=lambda model, rows: {"val_loss": summed(model, rows)},
        schedule=torch.optim.lr_scheduler.LambdaLR(
            optimizer,
            lambda step: min((step + 1) / rise, max(0.0, (steps - step) / (steps - rise + 1))),
        ),
        best=("val_loss", "min"),
        eval_batch=256,
        unit="tokens",
    )


def read_tokens(path: Path, block: int) -> tuple[Tensor, Tensor]:
    """The file's tokens, shape (tokens,), int16, and the code points that they stand for; none if
    they are bytes.

    Raises InputError where there is no such file, or too little in it.
    """
    with as_input_error(
        f"cannot read {path}",
        "stepladder data get shakespeare, or --data-dir DIR with a text input.txt",
    ):
        data = path.read_bytes()
    characters: Any
    tokens: Any
    try:
        points = np.frombuffer(data.decode().encode("utf-32-le"), np.uint32)
        characters, tokens = np.unique(points, return_inverse=True)
    except UnicodeDecodeError:
        characters = np.arange(MOST_CHARACTERS + 1)
    if len(characters) > MOST_CHARACTERS:
        characters, tokens = characters[:0], np.frombuffer(data, np.uint8)
    if len(tokens) < 20 * block:  # the validation split is a tenth
        fits = len(tokens) // 20
        hint = f"--block {fits}, or a longer text" if fits else "a longer text"
        raise InputError(f"{path} has {len(tokens)} tokens", hint)
    return torch.from_numpy(tokens.astype(np.int16)), torch.from_numpy(characters.astype(np.int32))


def normed(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])


class Layer(nn.Module):
    """Attention to the tokens so far, then two linear layers; each adds to what came in, at first
    nothing.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        width, self.heads, self.dropout = config.width, config.heads, config.dropout
        self.qkv, self.out = (
            nn.Linear(width, 3 * width, bias=False),
            nn.Linear(width, width, bias=False),
        )
        self.up, self.down = (
            nn.Linear(width, 4 * width, bias=False),
            nn.Linear(4 * width, width, bias=False),
        )
        self.sharpness = nn.Parameter(torch.ones(self.heads, 1, 1))
        for linear in (self.out, self.down):
            nn.init.zeros_(linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        """x: shape (rows, tokens, width)."""
        x = x + self.dropped(self.attended(normed(x)))
        return x + self.dropped(self.down(F.relu(self.up(normed(x))).square()))

    def attended(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = (normed(q) * self.sharpness).to(v.dtype), normed(k).to(v.dtype)
        found = F.scaled_dot_product_attention(
            q, k, v, is_causal=True
        )  # (rows, heads, tokens, width of a head)
        return self.out(found.transpose(1, 2).flatten(2))

    def dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class GPT(nn.Module):
    """Tokens of shape (rows, tokens) to the logits of each next one, shape (rows, tokens,
    vocabulary).

    characters: the code points of the tokens, kept with the weights; none where the tokens are
    bytes."""

    characters: Tensor

    def __init__(self, config: Config, characters: Tensor) -> None:
        super().__init__()
        self.register_buffer("characters", characters)
        self.block, self.vocabulary = config.block, len(characters) or 256
        self.tokens = nn.Embedding(self.vocabulary, config.width)
        self.places = nn.Embedding(config.block, config.width)
        self.sizes = [min(ROWS, self.vocabulary**length) for length in range(2, config.ngrams + 1)]
        self.ngrams = nn.ModuleList(nn.Embedding(size, config.width) for size in self.sizes)
        for embedding in (self.tokens, self.places, *self.ngrams):
            nn.init.normal_(embedding.weight, std=0.02)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.head = nn.Linear(config.width, self.vocabulary, bias=False)
        nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        found = self.tokens(x) + self.places.weight[: x.shape[1]]
        number = before = x
        for table, size in zip(self.ngrams, self.sizes, strict=True):
            before = F.pad(before, (1, 0))[:, :-1]  # token 0 before the first
            number = number * self.vocabulary + before
            found = found + table(number % size)
        for layer in self.layers:
            found = layer(found)
        return self.head(normed(found))


def summed(model: nn.Module, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of each row's tokens but the first, given those before: its sum, and how many there
    are.
    """
    x, y = rows[:, :-1].long().clamp(min=0), rows[:, 1:].long()
    logits = model(x).flatten(0, 1).float()
    total = F.cross_entropy(logits, y.flatten(), ignore_index=NOTHING, reduction="sum")
    return total, (y != NOTHING).sum()


def loss(model: nn.Module, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Of one block in each row, drawn anew in each step."""
    block = rows.shape[1] // SPAN
    first = torch.randint((SPAN - 1) * block, (len(rows), 1), device=rows.device)
    return summed(model, rows.gather(1, first + torch.arange(block + 1, device=rows.device)))


@torch.no_grad()
def continued(model: GPT, prompt: Tensor, count: int, temperature: float) -> Tensor:
    """`prompt`, shape (tokens,), and `count` tokens more, each drawn by what the model gives it."""
    model.eval()
    found = prompt.long()
    for _ in range(count):
        logits = model(found[None, -model.block :])[0, -1].float()
        if temperature > 0:
            following = torch.multinomial((logits / temperature).softmax(0), 1)
        else:
            following = logits.argmax(0, keepdim=True)
        found = torch.cat([found, following])
    return found
