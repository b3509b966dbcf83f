"""Kinds of benchmarks/adversary_kinds.py: one hash in five ways, or refused by name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = [pytest.mark.ranks, pytest.mark.every_case]

QUICK = ["float64", "weight written through numpy"]
SLOW = [
    "mixup by numpy",
    "random numbers for some microbatches",
    "batch norm that some microbatches skip",
    "sparse gradients",
    "teacher that moves in the forward pass",
    "counter in a global variable",
    "generator that a dataset owns",
    "gradient penalty",
    "layer made in the first pass",
    "random tensor in a cache",
    "directional derivative by jvp",
    "scripted model",
    "weights frozen after a step",
    "dataset that reads the number of its worker",
    "rate of the time",
    "langevin dynamics",
    "gradient noise of a hook s own generator",
    "metric over all batches so far",
    "copy that shares the memory of a weight",
    "inputs normalized by the first batch",
    "augmented samples in a cache",
    "area under the curve of collected scores",
    "judge outside of the job with batch norm",
    "optimizer around another one",
    "batch norm whose momentum falls",
    "clipping by a history of norms",
    "gradients clipped in a module s backward hook",
    "noise by whether gradients are taken",
    "critic trained within the loss",
    "targets of the model in inference mode",
    "loss by the state of the optimizer",
    "mean over ranks within the loss",
    "teacher outside of the job for metrics",
    "features of a frozen part in a cache by sample",
    "reversed gradients by the number of calls",
    "noise of generators without a seed",
    "weights seeded by the process number",
    "teacher of fixed weights after the student",
]


@pytest.fixture(scope="module")
def adversary() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
        import adversary

        yield adversary


@pytest.fixture(scope="module")
def ranks(adversary: ModuleType) -> Iterator[dict[int, Any]]:
    with adversary.rank_pool() as pool:
        yield pool


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_a_kind_of_job_gives_one_hash_in_five_ways_or_is_refused(
    adversary: ModuleType, ranks: dict[int, Any], name: str
) -> None:
    _, problems = adversary.run_kind(name, ranks)
    assert problems == []


def test_another_hash_or_a_refusal_or_a_failure_is_a_problem(adversary: ModuleType) -> None:
    outcome = adversary.Outcome
    find_problems = adversary.find_problems
    assert find_problems("float64", {"1": outcome("a"), "3": outcome("a")}) == []
    assert find_problems("float64", {"1": outcome("a"), "3": outcome("b")}) != []
    assert find_problems("float64", {"1": outcome(refused="a buffer")}) != []
    assert find_problems("lbfgs", {"1": outcome(refused="wants a closure")}) == []
    assert find_problems("lbfgs", {"1": outcome(refused="no such file")}) != []
    assert find_problems("lbfgs", {"1": outcome("a")}) != []
    assert find_problems("lbfgs", {"1": outcome(failed="RuntimeError")}) != []
    assert "adversary_kinds" in sys.modules
