"""Facts about a loss that are read from its graph: its scale, and what it has as constants."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from stepladder.tools.check.probe.patching import default_on_error
from stepladder.tools.check.probe_settings import NO_LOGARITHM
from stepladder.tools.probe.events import CodeLine

MAX_SCALE_NODES = 8
MAX_SEARCHED_NODES = 64
MAX_ACTIVATION_NODES = 16
KEEPS_SCALE = ("AddBackward0", "SubBackward0", "ToCopyBackward0", "SqueezeBackward0")
# What takes scores, with the activations that must not stand before it: its own, and ReLU.
MISPLACED_ACTIVATIONS = {
    "LogSoftmax": ("Softmax", "Relu"),
    "BinaryCrossEntropyWithLogits": ("Sigmoid", "Relu"),
}
SUMS_LOSSES = {"Mean", "Sum", "Add", "Div", "Mul", "ToCopy", "Squeeze", "View"}
MAX_EXAMINED_ROWS = 4  # of a batch, which may hold images
MAX_SUM_OF_PROBABILITIES = 1.5  # of a row; it is 1, but for rounding
KEEPS_VALUES = (
    "View",
    "UnsafeView",
    "Squeeze",
    "Unsqueeze",
    "ToCopy",
    "Transpose",
    "Permute",
    "T",
    "Clone",
    "_DDPSink",  # of DDP that looks for unused parameters
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
    scale, node = split_off_scale(loss)
    is_mean = type(node).__name__ == "MeanBackward0" or getattr(node, "_saved_reduction", None) == 1
    return scale if is_mean else None


@default_on_error(lambda: None)
def target_weight_of(loss: Any) -> float | None:
    """Return the factor between the loss of one target and the loss.

    It is None where the graph has another form, and where targets have weights of their own.
    """
    scale, node = split_off_scale(loss)
    name = type(node).__name__
    if name.startswith("NllLoss") and node._saved_reduction == 1 and node._saved_weight is None:
        scale /= float(node._saved_total_weight)  # the number of targets that are not left out
    elif name == "MeanBackward0":
        scale /= node._saved_self_sym_numel
    elif name != "SumBackward0":
        return None
    return scale


def split_off_scale(loss: Any) -> tuple[float, Any]:
    """Return the numbers by which a loss is multiplied, and the node before that; or None."""
    scale = 1.0
    for node in graph_nodes(loss, MAX_SCALE_NODES):
        name = type(node).__name__
        if name in ("DivBackward0", "MulBackward0"):
            number = constant_operand(node)
            if not number:
                return scale, None
            scale = scale / number if name == "DivBackward0" else scale * number
        elif name not in KEEPS_SCALE or is_sum_of_losses(node):
            return scale, node
    return scale, None


def is_sum_of_losses(node: Any) -> bool:
    """Return whether a node adds computed values: half of two losses is their mean."""
    return sum(previous is not None for previous, _ in node.next_functions) > 1


@default_on_error(str)
def activation_of(loss: Any) -> str:
    """Return the activation right before a loss that must not have it; else an empty text.

    It is NO_LOGARITHM where `nll_loss` is given probabilities, or scores.
    """
    activations: tuple[str, ...] = ()
    passed: set[str] = set()
    for node in graph_nodes(loss, MAX_ACTIVATION_NODES):
        name = type(node).__name__.partition("Backward")[0].removesuffix("2D")
        if name in activations:
            return name.lower()
        if activations and name not in KEEPS_VALUES:
            return ""
        is_sum = passed <= SUMS_LOSSES  # of the losses of samples
        if name == "NllLoss" and is_sum and exceeds_probabilities(node._saved_self):
            return NO_LOGARITHM
        passed.add(name)
        # Without NllLoss it may be of features, which a smaller net is to have as well.
        if name != "LogSoftmax" or "NllLoss" in passed:
            activations = activations or MISPLACED_ACTIVATIONS.get(name, ())
    return ""


def exceeds_probabilities(logarithms: torch.Tensor) -> bool:
    """Return whether the exponentials of a row of values have a sum far above 1."""
    values = logarithms.detach()[:MAX_EXAMINED_ROWS].float()
    sums = values.logsumexp(min(values.dim() - 1, 1)).exp()
    return float(sums.median()) > MAX_SUM_OF_PROBABILITIES


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


class GatheredFeatures:
    """What all_gather has taken without its graph since the last backward pass."""

    def __init__(self) -> None:
        # Of each: its first row, and the line that gathers it.
        self.rows: list[tuple[torch.Tensor, CodeLine | None]] = []

    @default_on_error(lambda: None)
    def add(self, features: torch.Tensor, at: CodeLine | None) -> None:
        """Remember features of this rank, [samples, features], if they have a graph."""
        has_graph = features.requires_grad and torch.is_grad_enabled()
        if has_graph and features.dim() == 2 and features.shape[1] > 1 and len(features):
            self.rows.append((features[0].detach().clone(), at))

    @default_on_error(lambda: None)
    def find_constant(self, loss: Any) -> CodeLine | None:
        """Return the line that gathers features which a loss has as constants, and forget all.

        With the features' own graph among the gathered ones, the operand of the product has one.
        """
        rows = self.rows
        self.rows = []
        for node in nearest_nodes(loss) if rows else ():
            for name in ("_saved_self", "_saved_mat2"):
                operand = getattr(node, name, None)
                if not isinstance(operand, torch.Tensor) or operand.requires_grad:
                    continue
                for row, at in rows:
                    if holds_row(operand, row):
                        return at
        return None


def nearest_nodes(loss: Any) -> Iterator[Any]:
    """Yield nodes of a loss's graph, the nearest first."""
    nodes = [loss.grad_fn]
    for index in range(MAX_SEARCHED_NODES):
        if index == len(nodes):
            return
        yield nodes[index]
        inputs = [node for node, _ in nodes[index].next_functions]
        nodes += [node for node in inputs if node not in (None, *nodes)]


def holds_row(operand: torch.Tensor, row: torch.Tensor) -> bool:
    """Return whether a matrix has this row, or this column."""
    if operand.dim() != 2:
        return False
    for rows in (operand, operand.t()):
        has_length = rows.shape[1] == len(row)
        if has_length and bool((rows == row).all(1).any()):
            return True
    return False


gathered_features = GatheredFeatures()
