"""By what a loss was divided before its backward pass, read off its graph."""

from __future__ import annotations

from typing import Any

import torch

from stepladder.tools.check.probe.patching import careful


@careful(dict)
def scale_of(loss: Any) -> dict[str, Any]:
    """scale: the factor between a mean over samples and the loss. Nothing where the graph is of
    another shape.
    """
    node, scale = getattr(loss, "grad_fn", None), 1.0
    for _ in range(8):
        if node is None:
            return {}
        name = type(node).__name__
        if name in ("DivBackward0", "MulBackward0"):
            other = number_in(node, name)
            if other is None or other == 0:
                return {}
            scale = scale / other if name == "DivBackward0" else scale * other
        elif name == "MeanBackward0" or getattr(node, "_saved_reduction", None) == 1:
            return {"scale": scale}
        elif name not in ("AddBackward0", "SubBackward0", "ToCopyBackward0", "SqueezeBackward0"):
            return {}
        nexts = [following for following, _ in node.next_functions if following is not None]
        if not nexts:
            return {}
        node = nexts[0]
    return {}


LOSSES = {
    "NllLoss": "Softmax",
    "BinaryCrossEntropyWithLogits": "Sigmoid",
}  # and the activation that they include
SHAPES = (
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


@careful(str)
def activation_of(loss: Any) -> str:
    """An activation right before a loss that applies it again; nothing where there is none."""
    node, wanted = getattr(loss, "grad_fn", None), ""
    for _ in range(16):
        if node is None:
            return ""
        name = type(node).__name__.partition("Backward")[0]
        if wanted and name == wanted:
            return wanted.lower()
        if wanted and name not in SHAPES:
            return ""
        wanted = wanted or next((LOSSES[start] for start in LOSSES if name.startswith(start)), "")
        node = next(
            (following for following, _ in node.next_functions if following is not None), None
        )
    return ""


def number_in(node: Any, name: str) -> float | None:
    """The plain number of a product or a quotient; None where two results meet."""
    if sum(following is not None for following, _ in node.next_functions) != 1:
        return None
    for attribute in ("_saved_other", "_saved_self"):
        value = getattr(node, attribute, None)
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            return float(value)
        if isinstance(value, (int, float)):
            return float(value)
    return None
