"""Loaders of fewer batches: the first ones, and the last one, which may be smaller."""

from __future__ import annotations

from itertools import islice
from typing import Any

from torch.utils.data import DataLoader

from stepladder.tools.check.probe.patching import WrappedCall, default_on_error, wrap

MAX_WORKERS = 2
MAX_DRAWN = 2_000_000
LENGTH_ATTRIBUTE = "_stepladder_length"  # of a sampler: how many samples it gives


@default_on_error(lambda: None)
def shorten(loader: DataLoader[Any], batches: int) -> None:
    """Let the sampler of a loader give what makes a number of batches, the last one among them.

    The number is odd, so that one of two processes evaluates more than the other. All that the
    loader knows of its length is of the batches that are left. The data set is whole. Few batches
    are read by few workers, of which all processes of several starts together have many.
    """
    loader.num_workers = min(loader.num_workers, MAX_WORKERS)
    sampler, size = loader.sampler, loader.batch_size
    is_made_of_shorter = any(map(_is_shorter, vars(sampler).values()))
    if size is None or is_made_of_shorter:
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


def _is_shorter(value: object) -> bool:
    return LENGTH_ATTRIBUTE in getattr(value, "__dict__", {})


def _first_samples(call: WrappedCall) -> Any:
    """Return the samples of a sampler, or as many as make the batches that are left.

    They are the first ones of the data set, so that another order has the same ones. A sampler that
    draws one twice, or that is endless, gives those that it draws first.
    """
    sampler = call.args[0]
    length = vars(sampler).get(LENGTH_ATTRIBUTE)
    if length is None:
        return call.run()
    drawn = list(islice(call.run(), MAX_DRAWN))
    kept = set(sorted(drawn)[:length])
    if len(drawn) == MAX_DRAWN or len(kept) < length:
        return iter(drawn[:length])
    return (sample for sample in drawn if sample in kept)


def _length(call: WrappedCall) -> Any:
    return vars(call.args[0]).get(LENGTH_ATTRIBUTE) or call.run()
