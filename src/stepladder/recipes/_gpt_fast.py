"""Parts that make the model of gpt.py learn faster; none of them is needed for it to work.

On a CPU each step is expensive, so the model uses what reaches a loss in fewer steps:

- `normalize` of queries and keys before the attention (Henry et al., 2020),
- `SquaredReLU` as activation (So et al., 2021),
- `zero_linear`: the last linear layer of each sum starts as zero, so each layer starts as identity,
- `HashedNgrams`: embeddings of each token together with the tokens before it (Huang et al., 2025).
  They are most of the weights, and a token reads a few rows of them.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

# A prime: with a power of the vocabulary's size, n-grams that begin with the same tokens would
# share a row, whatever their other tokens are.


MAX_NGRAM_ROWS = 8191


def normalize(x: Tensor) -> Tensor:
    """Normalize the last dimension, without trained weights."""
    return F.layer_norm(x, x.shape[-1:])


class SquaredReLU(nn.Module):
    """The square of ReLU, an activation."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x).square()


def zero_linear(in_features: int, out_features: int) -> nn.Linear:
    """Make a linear layer without bias whose weights are zero."""
    linear = nn.Linear(in_features, out_features, bias=False)
    nn.init.zeros_(linear.weight)
    return linear


class HashedNgrams(nn.ModuleList):
    """Embeddings of runs of 2, 3, ... `longest` tokens, each in a table of limited size.

    A run of tokens is a number in base `vocabulary`. Its row is the remainder by the table's size.
    """

    def __init__(self, vocabulary: int, longest: int, width: int) -> None:
        lengths = range(2, longest + 1)
        sizes = [min(MAX_NGRAM_ROWS, vocabulary**length) for length in lengths]
        super().__init__(nn.Embedding(size, width) for size in sizes)
        self.vocabulary = vocabulary
        self.sizes = sizes

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        """Return x plus the embeddings of the run that ends at each token.

        Args:
            x: Shape (rows, tokens, width).
            tokens: Shape (rows, tokens).
        """
        ngram = tokens
        previous = tokens
        for table, size in zip(self, self.sizes, strict=True):
            previous = F.pad(previous, (1, 0))[:, :-1]  # as if token 0 preceded the first token

            ngram = ngram * self.vocabulary + previous
            x = x + table(ngram % size)
        return x
