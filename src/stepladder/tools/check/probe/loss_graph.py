"""Facts about a loss that are read from its graph: its scale, and an activation before it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from stepladder.tools.check.events import NO_LOGARITHM
from stepladder.tools.check.probe.patching import default_on_error

MAX_SCALE_NODES = 8
MAX_ACTIVATION_NODES = 16
KEEPS_SCALE = ("AddBackward0", "SubBackward0", "ToCopyBackward0", "SqueezeBackward0")
# Losses, with the activation that each includes.
INCLUDED_ACTIVATIONS = {
    "NllLoss": "Softmax",
    "BinaryCrossEntropyWithLogits": "Sigmoid",
}
KEEPS_VALUES = (
    "LogSoftmax",
    "View",
    "UnsafeView",
    "Squeeze",
    "Unsqueeze",
    "ToCopy",
    "Transpose",
    "Permute",
    "T",
    "Clone",
)


def graph_nodes(loss: Any, max_nodes: int) -> Iterator[Any]:
    """Yield the node of a loss, and the nodes before it along the first inputs."""
    node = getattr(loss, "grad_fn", None)
    for _ in range(max_nodes):
        if node is None:
            return
        yield node
        inputs = (previous for previous, _ in node.next_functions if previous is not None)
        node = next(inputs, None)


@default_on_error(lambda: None)
def scale_of(loss: Any) -> float | None:
    """Return the factor between a mean over samples and the loss.

    It is None where the graph has another form.
    """
    scale = 1.0
    for node in graph_nodes(loss, MAX_SCALE_NODES):
        name = type(node).__name__
        if name in ("DivBackward0", "MulBackward0"):
            number = constant_operand(node)
            if not number:
                return None
            scale = scale / number if name == "DivBackward0" else scale * number
        elif name == "MeanBackward0" or getattr(node, "_saved_reduction", None) == 1:
            return scale
        elif name not in KEEPS_SCALE:
            return None
    return None


@default_on_error(str)
def activation_of(loss: Any) -> str:
    """Return the activation right before a loss that includes the same one; else an empty text.

    It is NO_LOGARITHM where `nll_loss` is given probabilities, or scores: of logarithms of
    probabilities no loss is negative.
    """
    activation = ""
    has_logarithm = False
    for node in graph_nodes(loss, MAX_ACTIVATION_NODES):
        name = type(node).__name__.partition("Backward")[0]
        has_logarithm |= name == "LogSoftmax"
        if not activation:
            activation = included_activation(name)
            is_whole_loss = node is loss.grad_fn and name.startswith("NllLoss")
            if is_whole_loss and float(loss.detach()) < 0:
                return NO_LOGARITHM
        elif name == activation:
            is_nll_loss = activation == "Softmax" and not has_logarithm
            return NO_LOGARITHM if is_nll_loss else activation.lower()
        elif name not in KEEPS_VALUES:
            return ""
    return ""


def included_activation(loss_name: str) -> str:
    for prefix, activation in INCLUDED_ACTIVATIONS.items():
        if loss_name.startswith(prefix):
            return activation
    return ""


def constant_operand(node: Any) -> float | None:
    """Return the number in a product or a quotient; None for two computed values."""
    computed = [previous for previous, _ in node.next_functions if previous is not None]
    if len(computed) != 1:
        return None
    for attribute in ("_saved_other", "_saved_self"):
        value = getattr(node, attribute, None)
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            return float(value)
        if isinstance(value, int | float):
            return float(value)
    return None
