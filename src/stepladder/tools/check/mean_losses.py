"""The losses of torch whose values a metric may be made of."""

from __future__ import annotations

# Functions of torch that return a mean over a batch, where nothing else is asked for.
MEAN_LOSSES = (
    "cross_entropy",
    "nll_loss",
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
)
