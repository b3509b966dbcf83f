"""How far two tensors may differ by rounding alone, and whether they differ by more.

The reference was run twice, the second time with each activation and gradient changed in its last
place. What that has changed is what another order of sums may change, at the same step and in the
same tensor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from stepladder.tools.parity.steps import Tensors

# Another order of sums rounds many times, a perturbation once for each value.
ROUNDING_FACTOR = 30.0
# A difference that is smaller is rounding, in units in the last place of the coarsest value.
LEAST_UNITS = 16.0
SINGLE_EPSILON = 2.0**-23


@dataclass(frozen=True)
class Deviation:
    """The difference of a tensor, relative to its norm in the reference.

    Attributes:
        relative: The difference.
        allowed: The difference that rounding may make.
    """

    name: str
    relative: float
    allowed: float

    @property
    def is_beyond_rounding(self) -> bool:
        return not self.relative <= self.allowed  # a NaN is


@dataclass(frozen=True)
class TensorTriple:
    """The same tensors of three runs: the reference, the compared one, and the perturbed one.

    Each tensor is a list: its norm, and then some of its elements.
    """

    reference: Tensors
    compared: Tensors
    perturbed: Tensors
    epsilon: float

    def deviations(self) -> list[Deviation]:
        """Return the deviation of each tensor that all runs have."""
        names = [
            name for name in self.reference if name in self.compared and name in self.perturbed
        ]
        noises = [self.relative(name, self.perturbed) for name in names]
        typical = sum(noises) / max(1, len(noises))
        deviations = []
        for name, noise in zip(
            names,
            noises,
            strict=True,
        ):
            allowed = allowed_deviation(max(noise, typical), self.epsilon)
            deviations.append(
                Deviation(
                    name,
                    self.relative(name, self.compared),
                    allowed,
                )
            )
        return deviations

    def relative(
        self,
        name: str,
        tensors: Tensors,
    ) -> float:
        """Return how far a tensor is from the reference: its elements, or its norm if that is more.

        The size of a tensor that is nothing but rounding is that of the other tensors.
        """
        norm, *values = self.reference[name]
        other_norm, *other_values = tensors[name]
        size = max(distance(values, []), self.scale * math.sqrt(len(values))) or 1.0
        of_elements = distance(values, other_values) / size
        return max(of_elements, abs(norm - other_norm) / max(norm, size))

    @cached_property
    def scale(self) -> float:
        """The size of an element, over all tensors."""
        elements = [value for tensor in self.reference.values() for value in tensor[1:]]
        return distance(elements, []) / math.sqrt(max(1, len(elements)))


def allowed_deviation(noise: float, epsilon: float) -> float:
    """Return the relative deviation that rounding may make, where a perturbation makes `noise`."""
    return ROUNDING_FACTOR * noise + LEAST_UNITS * max(epsilon, SINGLE_EPSILON)


def distance(first: list[float], second: list[float]) -> float:
    """Return the norm of the difference; a missing element is 0."""
    padding = [0.0] * (len(first) - len(second))
    pairs = zip(
        first,
        [*second, *padding],
        strict=False,
    )
    return math.sqrt(sum((one - other) ** 2 for one, other in pairs))
