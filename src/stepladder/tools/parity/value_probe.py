"""The probe of parity, in the ranks: it records values of tensors, in addition to check's probe.

In a perturbed run it changes each activation and gradient by one unit in the last place, at random,
as another order of sums does. In a neutral run, what may differ by rank has no effect: dropout,
batch statistics and random augmentation.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import optimizer as optimizers
from torch.utils.data._utils import fetch

from stepladder.tools.check.probe import digests
from stepladder.tools.check.probe.hooks_train import (
    is_inner_step,
    is_recorded_fully,
    named_parameters_of,
    training_tracker,
)
from stepladder.tools.check.probe.patching import NestingDepth, default_on_error, get_argument, wrap
from stepladder.tools.check.probe.probe_log import current_log
from stepladder.tools.parity.events import StepValues, ValueSettings

FULLY_RECORDED_STEPS = 200  # of later steps only some are recorded
MAX_VALUES_PER_STEP = 2048
MIN_VALUES_PER_TENSOR = 8
MAX_VALUES_PER_TENSOR = 128
DROPOUTS = (
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "alpha_dropout",
    "feature_alpha_dropout",
)
RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
PERTURBATION_SEED = 1
SEEDS_OF_NUMPY = 1 << 32


class ValueRecorder:
    """Records the values around each optimizer step of this process."""

    def __init__(self, settings: ValueSettings) -> None:
        self.settings = settings
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
        if self.settings.perturbed:
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

    def count_call(self, layer: str) -> None:
        """Count a call of dropout or of batch norm."""
        if torch.is_grad_enabled():
            self.calls[layer] += 1

    def note_precision(self, tensor: Tensor) -> None:
        self.epsilon = max(self.epsilon, torch.finfo(tensor.dtype).eps)


def attach() -> None:
    settings = ValueSettings.from_environment()
    recorder = ValueRecorder(settings)
    optimizers.register_optimizer_step_pre_hook(lambda opt, *_: recorder.before_step(opt))
    optimizers.register_optimizer_step_post_hook(lambda opt, *_: recorder.after_step(opt))
    nn.modules.module.register_module_forward_hook(make_forward_hook(recorder))
    attach_to_layers(recorder)
    if settings.neutral:
        wrap(fetch._MapDatasetFetcher, "fetch", fetch_with_own_seeds)


def attach_to_layers(recorder: ValueRecorder) -> None:
    """Wrap the functions whose results differ by rank."""
    around_dropout = make_dropout_wrapper(recorder)
    for name in DROPOUTS:
        wrap(functional, name, around_dropout)
    around_recurrent = make_recurrent_wrapper(recorder)
    for name in RECURRENT:
        wrap(torch._VF, name, around_recurrent)
    around_attention = make_attention_wrapper(recorder)
    around_batch_norm = make_batch_norm_wrapper(recorder)
    wrap(functional, "scaled_dot_product_attention", around_attention)
    wrap(functional, "batch_norm", around_batch_norm)
    wrap(nn.SyncBatchNorm, "forward", call_synchronized)


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
        if not recorder.settings.perturbed:
            return None
        perturbed = output - make_perturbation(output)
        perturbed.register_hook(perturb_gradient)
        return perturbed

    return observe_output


def make_dropout_wrapper(recorder: ValueRecorder) -> Any:
    def around(original: Any, *args: Any, **kwargs: Any) -> Any:
        probability = get_argument(args, kwargs, 1, "p")
        training = get_argument(args, kwargs, 2, "training")
        if training is False or probability == 0:
            return original(*args, **kwargs)
        recorder.count_call("dropout")
        if recorder.settings.neutral:
            return get_argument(args, kwargs, 0, "input")
        return original(*args, **kwargs)

    return around


def make_attention_wrapper(recorder: ValueRecorder) -> Any:
    def around(original: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = list(args)
        probability = get_argument(args, kwargs, 1, "dropout_p") or 0.0
        if probability > 0:
            recorder.count_call("dropout")
        if probability > 0 and recorder.settings.neutral:
            if len(arguments) > 1:
                arguments[1] = 0.0
            else:
                kwargs["dropout_p"] = 0.0
        return original(query, key, value, *arguments, **kwargs)

    return around


def make_recurrent_wrapper(recorder: ValueRecorder) -> Any:
    """Return the wrapper of recurrent layers, of whose arguments dropout is the only float."""

    def around(original: Any, *args: Any) -> Any:
        arguments = list(args)
        index = next((n for n, value in enumerate(args) if isinstance(value, float)), -1)
        training = index >= 0 and args[index] > 0 and args[index + 1]
        if training:
            recorder.count_call("dropout")
        if training and recorder.settings.neutral:
            arguments[index] = 0.0
        return original(*arguments)

    return around


running_synchronized = NestingDepth()


def call_synchronized(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a SyncBatchNorm, which is the same on any number of ranks."""
    with running_synchronized:
        return original(*args, **kwargs)


def make_batch_norm_wrapper(recorder: ValueRecorder) -> Any:
    def around(
        original: Any,
        tensor: Any,
        mean: Any,
        variance: Any,
        weight: Any = None,
        bias: Any = None,
        training: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if training and not running_synchronized.depth:
            recorder.count_call("norm")
            if recorder.settings.neutral and mean is not None:
                training = False
        return original(tensor, mean, variance, weight, bias, training, *args, **kwargs)

    return around


def fetch_with_own_seeds(original: Any, fetcher: Any, indices: Any) -> Any:
    """Fetch each sample with random numbers of its own, whichever rank fetches it."""
    if not isinstance(indices, (list, tuple)):
        return original(fetcher, indices)
    with restored_random_states():
        items = []
        for index in indices:
            seed_generators(hash(index) % SEEDS_OF_NUMPY)
            items.append(fetcher.dataset[index])
    return fetcher.collate_fn(items)


def seed_generators(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


@contextmanager
def restored_random_states() -> Iterator[None]:
    """Restore the states of the global random generators after the block."""
    torch_state = torch.get_rng_state()
    python_state = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy else None
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        if numpy:
            numpy.random.set_state(numpy_state)
