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

from stepladder.tools.check.probe.patching import NestingDepth, WrappedCall, wrap

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

RunLayer = Callable[[str, WrappedCall, WrappedCall], Any]

running_synchronized = NestingDepth()


class NoisyLayers:
    """Wrappers of the functions whose results differ by rank.

    Args:
        run: Called with "dropout" or "norm", a call of such a layer, and the call without the
            layer's effect. It runs one of them.
    """

    def __init__(self, run: RunLayer) -> None:
        self.run = run

    def run_dropout(self, call: WrappedCall) -> Any:
        if not call.argument(2, "training", True) or call.argument(1, "p") == 0:
            return call.run()
        return self.run("dropout", call, call.with_argument(2, "training", False))

    def run_attention(self, call: WrappedCall) -> Any:
        if not call.argument(4, "dropout_p"):
            return call.run()
        return self.run("dropout", call, call.with_argument(4, "dropout_p", 0.0))

    def run_recurrent(self, call: WrappedCall) -> Any:
        """Run a recurrent layer, of whose arguments dropout is the only float."""
        index = next((n for n, value in enumerate(call.args) if isinstance(value, float)), -1)
        if index < 0 or not call.args[index] or not call.args[index + 1]:
            return call.run()
        return self.run("dropout", call, call.with_argument(index, "dropout", 0.0))

    def run_batch_norm(self, call: WrappedCall) -> Any:
        if running_synchronized.depth or not call.argument(5, "training"):
            return call.run()
        has_statistics = call.argument(1, "running_mean") is not None
        neutral = call.with_argument(5, "training", False) if has_statistics else call
        return self.run("norm", call, neutral)


def attach() -> None:
    """Let layers and samples have no effect that differs by rank."""
    wrap(fetch._MapDatasetFetcher, "fetch", fetch_with_own_seeds)
    wrap_layers(lambda _, __, neutral: neutral.run())
    wrap(nn.SyncBatchNorm, "forward", normalize_by_running_statistics)


def wrap_layers(run: RunLayer) -> None:
    """Wrap the functions whose results differ by rank, as NoisyLayers says."""
    layers = NoisyLayers(run)
    for name in DROPOUTS:
        wrap(functional, name, layers.run_dropout)
    for name in RECURRENT:
        wrap(torch._VF, name, layers.run_recurrent)
    wrap(functional, "scaled_dot_product_attention", layers.run_attention)
    wrap(functional, "batch_norm", layers.run_batch_norm)
    wrap(nn.SyncBatchNorm, "forward", call_synchronized)


def call_synchronized(call: WrappedCall) -> Any:
    """Call a SyncBatchNorm, which is the same on any number of ranks."""
    with running_synchronized:
        return call.run()


def normalize_by_running_statistics(call: WrappedCall) -> Any:
    """Run a SyncBatchNorm as in evaluation: a global batch depends on the number of ranks."""
    layer, values = call.args
    if not layer.training or layer.running_mean is None:
        return call.run()
    statistics = layer.running_mean, layer.running_var
    return functional.batch_norm(values, *statistics, layer.weight, layer.bias, eps=layer.eps)


def fetch_with_own_seeds(call: WrappedCall) -> Any:
    """Fetch each sample with random numbers of its own, whichever rank fetches it."""
    fetcher, indices = call.args
    if not isinstance(indices, (list, tuple)):
        return call.run()
    with restored_random_states():
        items = []
        for index in indices:
            seed_generators(hash(index) % SEEDS_OF_NUMPY)
            items.append(fetcher.dataset[index])
    return fetcher.collate_fn(items)


def seed_generators(seed: int) -> None:
    """Seed the global random generators of torch's CPU, Python and, where it is loaded, NumPy."""
    torch.default_generator.manual_seed(seed)
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
