"""Layers and samples whose values differ by rank: their calls are counted, or have no effect.

These are dropout, batch statistics and random augmentation. A neutral run passes dropout on, uses
the running statistics of batch norm, and draws for each sample numbers of its own.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data._utils import fetch

from stepladder.tools.check.probe.patching import NestingDepth, get_argument, wrap

DROPOUTS = (
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "alpha_dropout",
    "feature_alpha_dropout",
)
RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
SEEDS_OF_NUMPY = 1 << 32

CountCall = Callable[[str], None]


def ignore_call(_: str) -> None:
    """Count no call."""


def attach(count_call: CountCall = ignore_call, is_neutral: bool = True) -> None:
    """Wrap the functions whose results differ by rank.

    Args:
        count_call: Called with "dropout" or "norm" at each call of such a layer.
        is_neutral: Whether they have no effect.
    """
    if is_neutral:
        wrap(fetch._MapDatasetFetcher, "fetch", fetch_with_own_seeds)
    around_dropout = make_dropout_wrapper(count_call, is_neutral)
    for name in DROPOUTS:
        wrap(functional, name, around_dropout)
    around_recurrent = make_recurrent_wrapper(count_call, is_neutral)
    for name in RECURRENT:
        wrap(torch._VF, name, around_recurrent)
    around_attention = make_attention_wrapper(count_call, is_neutral)
    around_batch_norm = make_batch_norm_wrapper(count_call, is_neutral)
    wrap(functional, "scaled_dot_product_attention", around_attention)
    wrap(functional, "batch_norm", around_batch_norm)
    wrap(nn.SyncBatchNorm, "forward", call_synchronized)


def make_dropout_wrapper(count_call: CountCall, is_neutral: bool) -> Any:
    def around(original: Any, *args: Any, **kwargs: Any) -> Any:
        probability = get_argument(args, kwargs, 1, "p")
        training = get_argument(args, kwargs, 2, "training")
        if training is False or probability == 0:
            return original(*args, **kwargs)
        count_call("dropout")
        if is_neutral:
            return get_argument(args, kwargs, 0, "input")
        return original(*args, **kwargs)

    return around


def make_attention_wrapper(count_call: CountCall, is_neutral: bool) -> Any:
    def around(original: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = list(args)
        probability = get_argument(args, kwargs, 1, "dropout_p") or 0.0
        if probability > 0:
            count_call("dropout")
        if probability > 0 and is_neutral:
            if len(arguments) > 1:
                arguments[1] = 0.0
            else:
                kwargs["dropout_p"] = 0.0
        return original(query, key, value, *arguments, **kwargs)

    return around


def make_recurrent_wrapper(count_call: CountCall, is_neutral: bool) -> Any:
    """Return the wrapper of recurrent layers, of whose arguments dropout is the only float."""

    def around(original: Any, *args: Any) -> Any:
        arguments = list(args)
        index = next((n for n, value in enumerate(args) if isinstance(value, float)), -1)
        training = index >= 0 and args[index] > 0 and args[index + 1]
        if training:
            count_call("dropout")
        if training and is_neutral:
            arguments[index] = 0.0
        return original(*arguments)

    return around


running_synchronized = NestingDepth()


def call_synchronized(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a SyncBatchNorm, which is the same on any number of ranks."""
    with running_synchronized:
        return original(*args, **kwargs)


def make_batch_norm_wrapper(count_call: CountCall, is_neutral: bool) -> Any:
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
            count_call("norm")
            if is_neutral and mean is not None:
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
