"""Loaders of fewer batches: the first ones, and the last one, which may be smaller."""

from __future__ import annotations

from itertools import islice
from typing import Any

from torch.utils.data import DataLoader

from stepladder.tools.check.probe.patching import WrappedCall, default_on_error, wrap

LENGTH_ATTRIBUTE = "_stepladder_length"  # of a sampler: how many samples it gives


@default_on_error(lambda: None)
def shorten(loader: DataLoader[Any], batches: int) -> None:
    """Let the sampler of a loader give what makes a number of batches, the last one among them.

    The number is odd, so that one of two processes evaluates more than the other. All that the
    loader knows of its length is of the batches that are left. The data set is whole.
    """
    sampler, size = loader.sampler, loader.batch_size
    if size is None:
        return
    whole, rest = divmod(len(sampler), size)  # type: ignore[arg-type]
    count = min(batches, whole + bool(rest))
    count -= count > 2 and count % 2 == 0  # of two batches both are needed
    length = count * size - (rest and size - rest)
    if len(sampler) > length:  # type: ignore[arg-type]
        vars(sampler)[LENGTH_ATTRIBUTE] = length
        for name, replacement in (("__iter__", _first_samples), ("__len__", _length)):
            if not hasattr(getattr(type(sampler), name), "__wrapped__"):
                wrap(type(sampler), name, replacement)


def _first_samples(call: WrappedCall) -> Any:
    return islice(call.run(), vars(call.args[0]).get(LENGTH_ATTRIBUTE))


def _length(call: WrappedCall) -> Any:
    return vars(call.args[0]).get(LENGTH_ATTRIBUTE) or call.run()
