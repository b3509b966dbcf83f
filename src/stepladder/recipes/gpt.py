"""Train a language model of characters.

    stepladder train gpt --data-dir data/shakespeare --nproc 2

The model is a small transformer (Vaswani et al., 2017) that reads DIR/input.txt. The first nine
tenths of the text are for training. The metric `val_loss` is over all of the last tenth, in nats
per token. `stepladder recipe sample` prints text that a trained model writes.

The parts that make the model learn faster are in _gpt_fast.py.
"""

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
from stepladder.recipes._gpt_fast import HashedNgrams, SquaredReLU, normalize, zero_linear
from stepladder.recipes._schedules import count_steps, one_cycle

MAX_CHARACTERS = 256  # the tokens are bytes if a file has more different characters, or no UTF-8
# Learning rate relative to the rate of matrices: a step gives a gradient to few rows of a table.
EMBEDDING_RATE = 2.0
BLOCKS_PER_ROW = 5  # a row of the data has 5 consecutive blocks, and a step trains on one of them
PADDING = -1  # fills the last row after the end of the text

SumAndCount = tuple[Tensor, Tensor]


@dataclass
class Config:
    """The settings of the job; each is a flag of `stepladder train gpt`."""

    epochs: int = 1
    global_batch: int = 8  # blocks
    lr: float = 4e-3
    seed: int = 0
    data_dir: str = "data/shakespeare"
    layers: int = 4
    heads: int = 4
    width: int = 128  # length of a token's vector, a multiple of --heads
    block: int = 64  # tokens that the model sees at once
    ngrams: int = 4  # longest run of tokens that has an embedding; 1: single tokens only
    dropout: float = 0.0  # fraction of each layer's output that is set to zero, 0 to 1
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
    """Make the model, the optimizer, the data and the metrics of the job."""
    tokens, characters = read_tokens(Path(config.data_dir) / "input.txt", config.block)
    num_training = len(tokens) * 9 // 10
    train_data = _make_training_rows(tokens[:num_training], config.block)
    torch.manual_seed(config.seed)
    model = GPT(config, characters)
    optimizer = _make_optimizer(model, config)
    steps = count_steps(config.epochs, len(train_data), config.global_batch)
    return Job(
        model=model,
        optimizer=optimizer,
        loss=loss,
        train_data=train_data,
        eval_data=_make_validation_rows(tokens[num_training:], config.block),
        metrics=lambda model, rows: {"val_loss": sum_token_losses(model, rows)},
        schedule=one_cycle(optimizer, steps, rise_steps=steps // 20),
        best=("val_loss", "min"),
        eval_batch=256,
        unit="tokens",
    )


def _make_optimizer(model: GPT, config: Config) -> torch.optim.Optimizer:
    """Make AdamW: the layers' matrices have weight decay, all other weights a higher rate."""
    matrices = [weight for weight in model.layers.parameters() if weight.ndim == 2]
    matrix_ids = {id(weight) for weight in matrices}
    others = [weight for weight in model.parameters() if id(weight) not in matrix_ids]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": others, "lr": EMBEDDING_RATE * config.lr, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.99), fused=True)


# -- data ------------------------------------------------------------------------------------------


def read_tokens(path: Path, block: int) -> tuple[Tensor, Tensor]:
    """Read a text as tokens. Each different character of the text is a token of the vocabulary.

    Args:
        path: The text file.
        block: The number of tokens that the model sees at once.

    Returns:
        The tokens, shape (n,), int16, and the code point of each token's character, shape
        (vocabulary,). If the tokens are bytes, there are no code points.

    Raises:
        InputError: If the file is missing or too short.
    """
    hint = "stepladder data get shakespeare, or --data-dir DIR with a text input.txt"
    with as_input_error(f"cannot read {path}", hint):
        data = path.read_bytes()
    tokens, characters = _encode_tokens(data)
    if len(tokens) < 20 * block:  # the validation split, a tenth, then has two blocks
        longest_block = len(tokens) // 20
        hint = f"--block {longest_block}, or a longer text" if longest_block else "a longer text"
        raise InputError(f"{path} has {len(tokens)} tokens", hint)
    return torch.from_numpy(tokens.astype(np.int16)), torch.from_numpy(characters.astype(np.int32))


def _encode_tokens(data: bytes) -> tuple[Any, Any]:
    """Return tokens and code points as NumPy arrays; see `read_tokens`."""
    raw_bytes = np.frombuffer(data, np.uint8)
    no_characters = np.empty(0, np.uint32)
    try:
        code_points = np.frombuffer(data.decode().encode("utf-32-le"), np.uint32)
    except UnicodeDecodeError:
        return raw_bytes, no_characters
    characters, tokens = np.unique(code_points, return_inverse=True)
    if len(characters) > MAX_CHARACTERS:
        return raw_bytes, no_characters
    return tokens, characters


def _make_training_rows(tokens: Tensor, block: int) -> Tensor:
    """Return rows of BLOCKS_PER_ROW blocks as views of the text; consecutive rows share a block."""
    return tokens.unfold(0, BLOCKS_PER_ROW * block, (BLOCKS_PER_ROW - 1) * block)


def _make_validation_rows(tokens: Tensor, block: int) -> Tensor:
    """Return rows of block + 1 tokens that cover the text, the last one filled with PADDING."""
    missing = -(len(tokens) - 1) % block
    return F.pad(tokens, (0, missing), value=PADDING).unfold(0, block + 1, block)


# -- model -----------------------------------------------------------------------------------------


class _Layer(nn.Module):
    """A layer of the transformer: attention to the earlier tokens, then a feed-forward network."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = zero_linear(width, width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.activation = SquaredReLU()
        self.down = zero_linear(4 * width, width)
        self.dropout = nn.Dropout(config.dropout)
        self.sharpness = nn.Parameter(torch.ones(self.heads, 1, 1))  # scales the attention's logits

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output.

        Args:
            x: Shape (rows, tokens, width), as the output.
        """
        x = x + self.dropout(self.attend(normalize(x)))
        return x + self.dropout(self.feed_forward(normalize(x)))

    def attend(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(2, (3, self.heads, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each (rows, heads, tokens, width of a head)
        q = (normalize(q) * self.sharpness).to(v.dtype)
        k = normalize(k).to(v.dtype)
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attention.transpose(1, 2).flatten(2))

    def feed_forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))


class GPT(nn.Module):
    """A transformer that predicts the next token."""

    characters: Tensor

    def __init__(self, config: Config, characters: Tensor) -> None:
        """Make the model.

        Args:
            config: The sizes of the model.
            characters: The code point of each token, saved with the weights; empty for bytes.
        """
        super().__init__()
        self.register_buffer("characters", characters)
        self.block = config.block
        self.vocabulary = len(characters) or MAX_CHARACTERS
        self.tokens = nn.Embedding(self.vocabulary, config.width)
        # The embeddings of positions. Snapshots contain the attribute's name, so it stays.
        self.places = nn.Embedding(config.block, config.width)
        self.ngrams = HashedNgrams(self.vocabulary, config.ngrams, config.width)
        for embedding in (self.tokens, self.places, *self.ngrams):
            nn.init.normal_(embedding.weight, std=0.02)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.layers))
        self.head = zero_linear(config.width, self.vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of each next token, shape (rows, tokens, vocabulary).

        Args:
            tokens: Shape (rows, tokens), at most `block` tokens.
        """
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        x = self.ngrams(x, tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(normalize(x))


# -- loss and text ---------------------------------------------------------------------------------


def loss(model: nn.Module, rows: Tensor) -> SumAndCount:
    """Return the loss of one block of each row; the block begins at a random token of the row."""
    block = rows.shape[1] // BLOCKS_PER_ROW
    last_start = (BLOCKS_PER_ROW - 1) * block
    start = torch.randint(last_start, (len(rows), 1), device=rows.device)
    offsets = torch.arange(block + 1, device=rows.device)
    return sum_token_losses(model, rows.gather(1, start + offsets))


def sum_token_losses(model: nn.Module, rows: Tensor) -> SumAndCount:
    """Return the sum of the losses of all tokens but the first of each row, and their number."""
    inputs = rows[:, :-1].long().clamp(min=0)
    targets = rows[:, 1:].long()
    logits = model(inputs).flatten(0, 1).float()
    total = F.cross_entropy(logits, targets.flatten(), ignore_index=PADDING, reduction="sum")
    return total, (targets != PADDING).sum()


@torch.no_grad()
def generate(model: GPT, prompt: Tensor, count: int, temperature: float) -> Tensor:
    """Continue a prompt, one token after the other.

    Args:
        model: A trained model.
        prompt: Shape (tokens,).
        count: The number of tokens to add.
        temperature: 1 draws by the model's probabilities, 0 always takes the likeliest token.

    Returns:
        The prompt and the new tokens, shape (tokens + count,).
    """
    model.eval()
    tokens = prompt.long()
    for _ in range(count):
        logits = model(tokens[None, -model.block :])[0, -1].float()
        if temperature > 0:
            next_token = torch.multinomial((logits / temperature).softmax(0), 1)
        else:
            next_token = logits.argmax(0, keepdim=True)
        tokens = torch.cat([tokens, next_token])
    return tokens
