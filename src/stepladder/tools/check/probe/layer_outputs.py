"""The outputs of layers until the next backward pass, to name the first that is not finite."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stepladder.tools.check.probe import digests
from stepladder.tools.check.probe.patching import default_on_error
from stepladder.tools.check.probe_settings import WEIGHT_HAS_IT

MAX_KEPT_OUTPUTS = 4000
LOSS_ALONE = "inputs, weights and the outputs of all layers are finite: it comes from the loss"


class LayerOutputs:
    """What went into the model that was called last, and what its layers returned.

    The tensors are those of the graph, which lives until the backward pass anyway.
    """

    def __init__(self) -> None:
        self.model: Any = None
        self.inputs: list[Tensor] = []
        self.outputs: list[tuple[Any, Tensor]] = []
        self.is_reported = False

    def begin(self, model: Any, inputs: Any) -> None:
        """Forget an earlier call, and keep the inputs of this one."""
        self.forget()
        if torch.is_grad_enabled() and not self.is_reported:
            self.model = model
            self.inputs = list(floating_tensors(inputs))

    def add(self, layer: Any, output: Any) -> None:
        """Keep what a layer without layers inside has returned."""
        if self.model is None or layer._modules or len(self.outputs) >= MAX_KEPT_OUTPUTS:
            return
        self.outputs += [(layer, tensor) for tensor in floating_tensors(output)]

    def forget(self) -> None:
        self.model = None
        self.inputs = []
        self.outputs = []

    def mark_reported(self) -> None:
        self.forget()
        self.is_reported = True

    @default_on_error(str)
    def find_origin(self, value: str) -> str:
        """Return in words where the first value comes from that is not finite."""
        if self.model is None:
            return "which layer it comes from is not known"
        if any(map(is_not_finite, self.inputs)):
            return "it is in the batch that goes into the model"
        for name, parameter in self.model.named_parameters():
            if is_not_finite(parameter):
                bare_name = name.removeprefix("module.")
                return f"the weight {bare_name} {WEIGHT_HAS_IT}"
        names = {id(layer): name for name, layer in self.model.named_modules()}
        is_like = is_nan if value == "nan" else is_not_finite
        for is_first in (is_like, is_not_finite):
            for layer, output in self.outputs:
                if is_first(output):
                    name = names.get(id(layer), "").removeprefix("module.")
                    return f"the first layer that returns it is {name} ({type(layer).__name__})"
        return LOSS_ALONE


@default_on_error(list)
def floating_tensors(values: Any) -> list[Tensor]:
    leaves = digests.leaves(values)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return [tensor.detach() for tensor in tensors if tensor.is_floating_point()]


def is_nan(tensor: Tensor) -> bool:
    return bool(torch.isnan(tensor.detach()).any())


def is_not_finite(tensor: Tensor) -> bool:
    return not bool(torch.isfinite(tensor.detach()).all())


def name_of_value(number: float) -> str:
    """Return nan, inf or -inf; an empty text of a finite number."""
    text = str(float(number))
    return text if text in ("nan", "inf", "-inf") else ""


layer_outputs = LayerOutputs()
