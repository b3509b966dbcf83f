"""Loaders of fewer batches: some whole ones, and the last one, which may be smaller."""

from __future__ import annotations

from itertools import islice
from typing import Any

from torch.utils.data import DataLoader

from stepladder.tools.check.probe.patching import WrappedCall, default_on_error, wrap

LENGTH_ATTRIBUTE = "_stepladder_length"  # of a sampler: how many samples it gives


@default_on_error(lambda: None)
def shorten(loader: DataLoader[Any], batches: int) -> None:
    """Let the sampler of a loader give what makes some whole batches, and the last one.

    All that the loader knows of its length is of the batches that are left. The data set is whole.
    """
    sampler, size = loader.sampler, loader.batch_size
    if size is None:
        return
    whole, rest = divmod(len(sampler), size)  # type: ignore[arg-type]
    if whole > batches:
        vars(sampler)[LENGTH_ATTRIBUTE] = batches * size + rest
        for name, replacement in (("__iter__", _first_samples), ("__len__", _length)):
            if not hasattr(getattr(type(sampler), name), "__wrapped__"):
                wrap(type(sampler), name, replacement)


def _first_samples(call: WrappedCall) -> Any:
    return islice(call.run(), vars(call.args[0]).get(LENGTH_ATTRIBUTE))


def _length(call: WrappedCall) -> Any:
    return vars(call.args[0]).get(LENGTH_ATTRIBUTE) or call.run()
