"""Frozen weights: each optimizer step computes, and then the weights are put back.

What a script shows, and the mean of its gradients, are then functions of the data alone: the batch
size of a rank, the learning rate and the order of training do not matter. Two runs can be compared
though they make other steps.
"""

from __future__ import annotations

import atexit
import os
import time
import zlib
from collections import defaultdict
from multiprocessing import parent_process
from multiprocessing.util import Finalize
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import optimizer as optimizers
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

from stepladder.tools.check.events import MeanGradient
from stepladder.tools.check.probe import digests
from stepladder.tools.check.probe.hooks_data import CheckIsDone
from stepladder.tools.check.probe.hooks_model import called_models
from stepladder.tools.check.probe.hooks_train import (
    is_inner_step,
    named_parameters_of,
    parameters_of,
    training_tracker,
)
from stepladder.tools.check.probe.noise import SEEDS_OF_NUMPY, seed_generators
from stepladder.tools.check.probe.patching import WrappedCall, default_on_error, wrap
from stepladder.tools.check.probe.probe_log import current_log

MAX_ELEMENTS = 64  # of a gradient
MAX_STEPS = 2000
OTHER_SEED = 7919
CLOCK_RATE = 2.5  # of the shuffled run: numbers that are made of time differ clearly
WEIGHT_CHANGE = 0.3  # of the reweighted run, relative


class GradientSum:
    """The gradients of one optimizer, added up with the rows of their steps."""

    def __init__(self) -> None:
        self.steps = 0
        self.rows = 0.0
        self.squares = 0.0
        self.sums: dict[str, Tensor] = {}

    def add(self, rows: float, gradients: dict[str, Tensor]) -> None:
        self.steps += 1
        self.rows += rows
        for name, gradient in gradients.items():
            elements = digests.sample_elements(digests.flatten(gradient), MAX_ELEMENTS).cpu()
            self.squares += rows * float(elements.square().sum())
            self.sums[name] = self.sums.get(name, 0.0) + rows * elements


class FrozenWeights:
    """Puts weights back after each step, and adds up the gradients."""

    def __init__(self) -> None:
        self.gradients: defaultdict[int, GradientSum] = defaultdict(GradientSum)
        self.weights: list[Tensor] = []
        self.last_rows = 0
        self.steps = 0

    def before_step(self, optimizer: Any) -> None:
        if is_inner_step():
            return
        self.add_gradients(optimizer)
        self.weights = [parameter.detach().clone() for parameter in parameters_of(optimizer)]

    @default_on_error(lambda: None)
    def add_gradients(self, optimizer: Any) -> None:
        named = named_parameters_of(optimizer)
        gradients = {name: p.grad for name, p in named.items() if p.grad is not None}
        # Two optimizers may step after the same calls.
        rows = called_models.take_rows() or self.last_rows or 1
        self.gradients[training_tracker.number_of(optimizer)].add(rows, gradients)
        self.last_rows = rows

    def after_step(self, optimizer: Any) -> None:
        if is_inner_step():
            return
        with torch.no_grad():
            for parameter, value in zip(parameters_of(optimizer), self.weights, strict=True):
                parameter.copy_(value)
        self.steps += 1
        if self.steps >= MAX_STEPS:  # a loop that ends when the loss falls
            raise CheckIsDone(0)

    def write(self) -> None:
        for number, total in self.gradients.items():
            sums = {name: values.tolist() for name, values in total.sums.items()}
            current_log().write(
                MeanGradient(
                    optimizer=number,
                    steps=total.steps,
                    rows=total.rows,
                    sums=sums,
                    squares=total.squares,
                )
            )


frozen_weights = FrozenWeights()
reseeded_owners: set[int] = set()  # ids of loaders, samplers and generators


def attach(variant: str) -> None:
    seed_alike()
    optimizers.register_optimizer_step_pre_hook(lambda opt, *_: frozen_weights.before_step(opt))
    optimizers.register_optimizer_step_post_hook(lambda opt, *_: frozen_weights.after_step(opt))
    atexit.register(frozen_weights.write)
    # A process that multiprocessing has made ends without the functions of atexit.
    os.register_at_fork(after_in_child=write_at_end_of_process)
    write_at_end_of_process()
    if variant == "shuffled":
        shuffle_from_first_pass()
        accelerate_clock()
    if variant == "reweighted":
        change_weights_at_first_call()


def write_at_end_of_process() -> None:
    if parent_process() is not None:
        Finalize(None, frozen_weights.write, exitpriority=0)


def seed_alike() -> None:
    """Start the global generators of an unseeded script alike in all runs with frozen weights."""
    seed_generators(zlib.crc32(f"frozen {max(current_log().rank, 0)}".encode()))


def shuffle_from_first_pass() -> None:
    """Draw other random numbers from the first pass over a loader on, when weights are made."""
    is_begun = False

    def begin() -> None:
        nonlocal is_begun
        if is_begun:
            return
        is_begun = True
        seed_generators((torch.initial_seed() + OTHER_SEED) % SEEDS_OF_NUMPY)
        wrap(torch, "manual_seed", seed_otherwise)
        ReseededGenerators().__enter__()  # type: ignore[no-untyped-call]

    def iterate(call: WrappedCall) -> Any:
        begin()
        loader = call.args[0]
        for owner in (loader, loader.sampler, loader.batch_sampler):
            reseed(owner)
        return call.run()

    wrap(DataLoader, "__iter__", iterate)
    wrap_first_call(lambda _: begin())


def seed_otherwise(call: WrappedCall) -> Any:
    """Seed torch with another number than the script's."""
    return call.with_argument(0, "seed", int(call.argument(0, "seed")) + OTHER_SEED).run()


class ReseededGenerators(TorchFunctionMode):
    """Gives each generator that the script passes to a function of torch other numbers, once."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        reseed_generator(kwargs.get("generator"))
        return func(*args, **kwargs)


def reseed_generator(generator: object) -> None:
    if isinstance(generator, torch.Generator) and id(generator) not in reseeded_owners:
        reseeded_owners.add(id(generator))
        generator.manual_seed(generator.initial_seed() + OTHER_SEED)


@default_on_error(lambda: None)
def reseed(owner: Any) -> None:
    """Give a loader or a sampler another order, once."""
    if owner is None or id(owner) in reseeded_owners:
        return
    reseeded_owners.add(id(owner))
    reseed_generator(getattr(owner, "generator", None))
    if isinstance(getattr(owner, "seed", None), int):
        owner.seed += OTHER_SEED


def accelerate_clock() -> None:
    for name in ("time", "perf_counter", "monotonic"):
        original = getattr(time, name)
        start = original()

        def fast(original: Any = original, start: float = start) -> float:
            return float(start + (original() - start) * CLOCK_RATE)

        setattr(time, name, fast)


def change_weights_at_first_call() -> None:
    generator = torch.Generator()
    changed: set[int] = set()

    def change(model: nn.Module) -> None:
        for parameter in model.parameters():
            if id(parameter) in changed or not parameter.is_floating_point():
                continue
            changed.add(id(parameter))
            generator.manual_seed(parameter.numel())
            own = parameter
            if hasattr(parameter, "to_local"):
                own = parameter.to_local()
            noise = torch.randn(own.shape, generator=generator).to(own)
            with torch.no_grad():
                own.mul_(1.0 + WEIGHT_CHANGE * noise)

    wrap_first_call(change)


def wrap_first_call(on_first_call: Any) -> None:
    """Call a function with each model before its first call, but for those that are traced.

    torch.jit compares the calls of a trace with each other.
    """
    seen: set[int] = set()

    def before_call(module: nn.Module, args: Any) -> None:
        is_traced = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        if id(module) not in seen and not is_traced:
            seen.add(id(module))
            on_first_call(module)

    nn.modules.module.register_module_forward_pre_hook(before_call)
