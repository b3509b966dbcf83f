"""The global generators: seeded for each pass, those of Python and NumPy only if a pass uses them."""

from __future__ import annotations

import random
from collections.abc import Callable
from multiprocessing import get_context

import numpy as np
import pytest
import torch

from stepladder.core.host_generators import seed_host
from stepladder.train.generators import PassGenerators

CPU = torch.device("cpu")
DRAWS: dict[str, Callable[[], object]] = {
    "random": random.random,
    "gauss": lambda: random.gauss(0, 1),
    "shuffle": lambda: random.shuffle([1, 2]),
    "numpy": np.random.rand,
    "beta": lambda: np.random.beta(0.4, 0.4),
    "a generator without a seed": lambda: np.random.default_rng().random(),
    "all words of NumPy's generator": lambda: np.random.rand(312),
    "all words of Python's generator": lambda: [random.random() for _ in range(312)],
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_pass_that_draws_is_noticed(name: str) -> None:
    generators = PassGenerators(CPU)
    generators.begin_pass(1)
    generators.end_pass()
    assert not generators.was_drawn
    generators.begin_pass(2)
    DRAWS[name]()
    generators.end_pass()
    assert generators.was_drawn


def test_a_gaussian_number_that_is_left_over_is_not_drawn_unnoticed() -> None:
    random.gauss(0, 1)
    np.random.randn()
    generators = PassGenerators(CPU)
    generators.begin_pass(1)
    np.random.randn()
    generators.end_pass()
    assert generators.was_drawn


def draw_all() -> list[float]:
    return [random.random(), random.gauss(0, 1), np.random.randn(), torch.rand(()).item()]


def test_numbers_depend_on_the_seed_alone_once_generators_are_in_use() -> None:
    generators = PassGenerators(CPU)
    generators.seed_host_generators()
    draws = []
    for seed in (2**62, 7, 2**62):
        generators.begin_pass(seed)
        draws.append(draw_all())
        generators.end_pass()
    assert draws[0] == draws[2] != draws[1]


def test_a_pass_after_draws_of_something_else_has_its_own_seed() -> None:
    generators = PassGenerators(CPU)
    draws = []
    for _ in range(2):
        np.random.rand(3)  # such as a Dataset
        generators.begin_pass(5)
        draws.append(draw_all())
        generators.end_pass()
    assert draws[0] == draws[1]


def test_a_generator_without_a_seed_follows_the_global_one_but_not_in_a_fork() -> None:
    draws = []
    for seed in (5, 5, 6):
        seed_host(seed)
        draws.append((np.random.default_rng().random(), np.random.RandomState().random_sample()))
    assert draws[0] == draws[1] != draws[2]
    seed_host(5)
    with get_context("fork").Pool(1) as pool:
        forked = pool.apply(_draw)
        assert forked != draws[0][0]
        assert pool.apply(_draw, (5,)) == draws[0][0]


def _draw(seed: int | None = None) -> float:
    if seed is not None:
        seed_host(seed)
    return np.random.default_rng().random()
