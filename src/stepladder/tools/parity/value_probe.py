"""The probe of parity, in the ranks: it records values of tensors, in addition to check's probe.

In a perturbed run it changes each activation and gradient by one unit in the last place, at random,
as another order of sums does. In a neutral run, what may differ by rank has no effect: dropout,
batch statistics and random augmentation.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import optimizer as optimizers

from stepladder.tools.check.probe import digests, noise
from stepladder.tools.check.probe.hooks_train import (
    is_inner_step,
    is_recorded_fully,
    named_parameters_of,
    training_tracker,
)
from stepladder.tools.check.probe.patching import WrappedCall, default_on_error
from stepladder.tools.check.probe.probe_log import current_log
from stepladder.tools.parity.events import StepValues

FULLY_RECORDED_STEPS = 200  # of later steps only some are recorded
MAX_VALUES_PER_STEP = 2048
MIN_VALUES_PER_TENSOR = 8
MAX_VALUES_PER_TENSOR = 128
PERTURBATION_SEED = 1


class ValueRecorder:
    """Records the values around each optimizer step of this process."""

    def __init__(self) -> None:
        self.perturbs = current_log().settings.perturbed
        self.calls: Counter[str] = Counter()  # of dropout and batch norm since the last step
        self.epsilon = 0.0
        self.grads: dict[str, list[float]] = {}
        self.initial: dict[str, list[float]] = {}
        self.stepped_optimizers: set[int] = set()  # by their number

    def before_step(self, optimizer: Any) -> None:
        if is_inner_step():
            return
        number = training_tracker.number_of(optimizer)
        named = named_parameters_of(optimizer)
        with_gradient = {name: p for name, p in named.items() if p.grad is not None}
        if self.perturbs:
            for parameter in with_gradient.values():
                perturb_in_place(parameter.grad)
        self.initial = {}
        if number not in self.stepped_optimizers:
            self.initial = sample_tensors(named)
            self.stepped_optimizers.add(number)
        self.grads = sample_tensors({name: p.grad for name, p in with_gradient.items()})

    def after_step(self, optimizer: Any) -> None:
        if is_inner_step():
            return
        number = training_tracker.number_of(optimizer)
        step = training_tracker.steps.get(number, 1)
        values: dict[str, Any] = {}
        if step <= FULLY_RECORDED_STEPS or is_recorded_fully(step):
            values["grads"] = self.grads
            values["weights"] = sample_tensors(named_parameters_of(optimizer))
        current_log().write(
            StepValues(
                optimizer=number,
                step=step,
                initial=self.initial,
                settings=[collect_settings(group) for group in optimizer.param_groups],
                dropouts=self.calls["dropout"],
                norms=self.calls["norm"],
                epsilon=self.epsilon,
                **values,
            )
        )
        self.calls.clear()

    def count_call(self, layer: str, call: WrappedCall, _: WrappedCall) -> Any:
        """Count a call of dropout or of batch norm, and run it."""
        if torch.is_grad_enabled():
            self.calls[layer] += 1
        return call.run()

    def note_precision(self, tensor: Tensor) -> None:
        self.epsilon = max(self.epsilon, torch.finfo(tensor.dtype).eps)


def attach() -> None:
    recorder = ValueRecorder()
    optimizers.register_optimizer_step_pre_hook(lambda opt, *_: recorder.before_step(opt))
    optimizers.register_optimizer_step_post_hook(lambda opt, *_: recorder.after_step(opt))
    nn.modules.module.register_module_forward_hook(make_forward_hook(recorder))
    noise.wrap_layers(recorder.count_call)


@default_on_error(dict)
def collect_settings(group: dict[str, Any]) -> dict[str, float]:
    """Return the numeric settings of a group of parameters, such as its learning rate."""
    return {
        name: float(value) for name, value in group.items() if isinstance(value, (bool, int, float))
    }


@default_on_error(dict)
def sample_tensors(tensors: dict[str, Any]) -> dict[str, list[float]]:
    """Return the norm of each tensor, and then elements at equal distances."""
    count = MAX_VALUES_PER_STEP // max(1, len(tensors))
    count = max(MIN_VALUES_PER_TENSOR, min(MAX_VALUES_PER_TENSOR, count))
    return {name: sample_tensor(tensor, count) for name, tensor in tensors.items()}


def sample_tensor(tensor: Any, count: int) -> list[float]:
    flat = digests.flatten(tensor)
    norm = float(torch.linalg.vector_norm(flat.float(), dtype=torch.float64))
    values: list[float] = digests.sample_elements(flat, count).tolist()
    return [norm, *values]


generator = torch.Generator()
generator.manual_seed(PERTURBATION_SEED)


def draw_bits(like: Tensor) -> Tensor:
    """Return zeros and ones in a tensor's shape. The script's own generators do not change."""
    bits = torch.empty(like.shape)
    bits.bernoulli_(0.5, generator=generator)
    return bits.to(like.dtype)


def make_perturbation(tensor: Tensor) -> Tensor:
    """Return what makes half of the elements smaller by one unit in the last place.

    No value grows: a probability stays below 1.
    """
    return tensor.detach() * torch.finfo(tensor.dtype).eps * draw_bits(tensor)


def perturb_gradient(gradient: Tensor) -> Tensor:
    return gradient - make_perturbation(gradient)


@default_on_error(lambda: None)
def perturb_in_place(gradient: Any) -> None:
    if isinstance(gradient, Tensor) and not gradient.is_sparse:
        gradient.sub_(make_perturbation(gradient))


def make_forward_hook(recorder: ValueRecorder) -> Any:
    """Return the hook of all modules, which notes and perturbs the outputs of the innermost."""

    def observe_output(module: Any, _: Any, output: Any) -> Any:
        is_innermost = next(module.children(), None) is None
        if not is_innermost or not isinstance(output, Tensor) or not output.requires_grad:
            return None
        is_traced = torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        if is_traced or not output.is_floating_point():
            return None
        recorder.note_precision(output)
        if not recorder.perturbs:
            return None
        perturbed = output - make_perturbation(output)
        perturbed.register_hook(perturb_gradient)
        return perturbed

    return observe_output
