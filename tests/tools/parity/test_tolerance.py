"""Tensors of three runs: what is rounding, and what is more."""

from __future__ import annotations

import math

import pytest

from stepladder.tools.parity.tolerance import SINGLE_EPSILON, Deviation, NoiseHistory, TensorTriple

WEIGHT = [5.0, 3.0, 4.0]  # the norm, and the elements


def beyond(
    reference: list[float],
    compared: list[float],
    perturbed: list[float],
    others: dict[str, list[float]] | None = None,
    epsilon: float = SINGLE_EPSILON,
) -> bool:
    others = others or {}
    tensors = ({"w": one, **others} for one in (reference, compared, perturbed))
    deviations = TensorTriple(*tensors, epsilon).deviations()
    return next(one for one in deviations if one.name == "w").is_beyond_rounding


def scaled(tensor: list[float], factor: float) -> list[float]:
    return [value * factor for value in tensor]


@pytest.mark.parametrize(
    ("factor", "noise", "expected"),
    [
        (1 + 1e-7, 1.0, False),
        (1 + 1e-4, 1.0, True),
        (1 + 1e-4, 1 + 1e-4, False),  # as much as a perturbation changes it
        (1 + 1e-1, 1 + 1e-4, True),
        (2.0, 1.0, True),
        (math.nan, 1.0, True),
    ],
)
def test_a_difference_is_rounding_up_to_what_a_perturbation_changes(
    factor: float, noise: float, expected: bool
) -> None:
    assert beyond(WEIGHT, scaled(WEIGHT, factor), scaled(WEIGHT, noise)) is expected


def test_what_is_no_number_in_both_runs_is_no_difference() -> None:
    broken = [math.nan, 3.0, math.nan]
    assert not beyond(broken, broken, broken)
    assert beyond(broken, WEIGHT, broken)
    assert beyond(WEIGHT, [math.nan, 3.0, 4.0], WEIGHT)  # in an element that is not recorded


def test_half_precision_is_coarser() -> None:
    compared = scaled(WEIGHT, 1 + 2**-8)
    assert beyond(WEIGHT, compared, WEIGHT)
    assert not beyond(WEIGHT, compared, WEIGHT, epsilon=2**-7)


def test_a_tensor_that_is_nothing_but_rounding_is_compared_with_the_others() -> None:
    """Such as the gradient of a bias before batch norm."""
    others = {"v": WEIGHT}
    assert not beyond([1e-9, 1e-9], [2e-9, -2e-9], [1e-9, 1e-9], others)
    assert beyond([1e-9, 1e-9], [1e-2, 1e-2], [1e-9, 1e-9], others)


def test_a_gradient_that_one_run_does_not_have_is_a_difference() -> None:
    triple = TensorTriple({"w": WEIGHT}, {}, {"w": WEIGHT}, SINGLE_EPSILON)
    assert triple.deviations()[0].is_beyond_rounding
    other = TensorTriple({}, {"w": WEIGHT}, {}, SINGLE_EPSILON)
    assert other.deviations()[0].is_beyond_rounding
    zero = TensorTriple({}, {"w": [0.0, 0.0]}, {}, SINGLE_EPSILON)
    assert not zero.deviations()[0].is_beyond_rounding


def test_rounding_that_a_tensor_has_had_is_allowed_later_too() -> None:
    history = NoiseHistory()
    for noise, relative, expected in ((1e-4, 1e-3, False), (1e-6, 1e-3, False), (1e-6, 1e-2, True)):
        deviation = Deviation("w", relative, noise, SINGLE_EPSILON)
        assert history.raise_noise([deviation])[0].is_beyond_rounding is expected
