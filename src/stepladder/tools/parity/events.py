"""The events that parity adds to those of check's probe, and the variable that asks for them.

Imported before torch in each rank, and by the command, which reads the recordings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field

from stepladder.tools.probe.events import ProbeEvent

PARITY_VARIABLE = "STEPLADDER_PARITY"


class StepValues(ProbeEvent, kind="values"):
    """The values around an optimizer step: of each tensor its norm, and some of its elements."""

    optimizer: int  # the number of the optimizer
    step: int  # the number of the step
    grads: dict[str, list[float]] = field(default_factory=dict)  # by the parameter's name
    weights: dict[str, list[float]] = field(default_factory=dict)  # after the step
    initial: dict[str, list[float]] = field(default_factory=dict)  # before the first step
    settings: Sequence[dict[str, float]] = ()  # the numbers of each group of parameters
    dropouts: int = 0  # calls of dropout, in training mode, since the last step
    norms: int = 0  # the same of batch norm over the samples of one rank
    epsilon: float = 0.0  # the rounding unit of the coarsest activation or gradient
