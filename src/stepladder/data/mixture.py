"""`Mixture`: several sources as one, each read a given number of times in an epoch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from numbers import Integral
from typing import Any

import numpy as np
import torch

from stepladder.core.errors import InputError, as_input_error
from stepladder.core.order import IndexArray
from stepladder.data.source import Source, get_contents, is_source, make_chunks
from stepladder.data.table import Ragged, join_lists, split_lists

MIN_PART = 1e-15  # of a source of all samples: its weight would be lost in the sum of all
WEIGHT_TOLERANCE = 0.01  # by which the part of a source may differ from its weight
MAX_PASSES = 100_000  # of a source in an epoch: each has its own chunks in memory
PASSES_HINT = "a source or more, and a whole number of passes of 1 or more for each"
ROWS_PER_CHUNK = 1024  # of a source without chunks, beside others that have some


class Mixture:
    """A source of the samples of several sources, of which an epoch reads each `passes` times.

    The plan shuffles all of them together, so a step has samples of each source in proportion to
    its length times its passes. Whatever the number of ranks, an epoch has every sample of a source
    exactly as often as the source has passes.

    Args:
        sources: The sources. Their batches have the same form: tensors or arrays, or lists or
            dicts of them.
        passes: How often an epoch reads each source, 1 or more. To give a small source the weight
            of one that is ten times as long, read it ten times.
        weights: In place of passes, the part of each source of all samples that are read. The
            passes are the smallest with which no part differs from its weight by more than 1 %.

    Raises:
        InputError: There is no source, one of them is none or empty, or a number of passes or a
            weight is missing.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        passes: Sequence[int] | None = None,
        *,
        weights: Sequence[float] | None = None,
    ) -> None:
        with as_input_error("the sources of a Mixture", "Mixture([a, b])", (TypeError,)):
            self._sources = list(sources)
        for source in self._sources:
            if not is_source(source):
                raise InputError(
                    f"a Mixture's source is a {type(source).__name__}",
                    "objects with __len__, chunk_edges and read(indices)",
                )
            if not len(source):
                raise InputError("a source of the Mixture has no samples", "sources with some")
        if weights is not None:
            _validate_weights(weights, passes, len(self._sources))
            counts = find_passes([len(source) for source in self._sources], weights)
        else:
            with as_input_error(f"passes={passes!r:.60}", PASSES_HINT, (TypeError,)):
                counts = [1] * len(self._sources) if passes is None else list(passes)
        self.passes = counts
        """How often an epoch reads each source."""
        are_counts = all(isinstance(count, Integral) and count > 0 for count in counts)
        if not self._sources or len(counts) != len(self._sources) or not are_counts:
            raise InputError(
                f"a Mixture of {len(self._sources)} sources with passes={counts}", PASSES_HINT
            )
        if max(counts) > MAX_PASSES:
            raise InputError(
                f"a Mixture reads a source {max(counts):,} times in an epoch",
                f"{MAX_PASSES:,} times at most: weights nearer to the sources' own lengths",
            )
        lengths = [len(source) for source in self._sources]
        self._source_of_pass = np.repeat(np.arange(len(lengths)), counts)
        self._pass_edges = np.cumsum([0, *np.repeat(lengths, counts)])

    def __len__(self) -> int:
        """Return the number of samples of an epoch, over all passes."""
        return int(self._pass_edges[-1])

    @property
    def contents(self) -> list[list[str]]:
        """The name and a hash of each file of the sources."""
        return [file for source in self._sources for file in get_contents(source) or ()]

    @property
    def chunk_edges(self) -> IndexArray | None:
        """The chunks of each pass, one after the other; None if no source has any."""
        chunks = [make_chunks(source) for source in self._sources]
        if not any(chunks):
            return None
        parts = []
        for number, first in zip(self._source_of_pass, self._pass_edges, strict=False):
            of_source = chunks[number]
            if of_source is None:
                starts = np.arange(0, len(self._sources[number]), ROWS_PER_CHUNK)
            else:
                starts = of_source.edges[:-1]
            parts.append(starts + first)
        return np.concatenate([*parts, self._pass_edges[-1:]])

    def read(self, indices: IndexArray) -> Any:
        """Return the batch of these samples, in this order."""
        passes = np.searchsorted(self._pass_edges, indices, "right") - 1
        sources = self._source_of_pass[passes]
        rows = indices - self._pass_edges[passes]
        places = [np.flatnonzero(sources == number) for number in range(len(self._sources))]
        batches = [
            source.read(rows[positions])
            for source, positions in zip(self._sources, places, strict=True)
            if len(positions)
        ]
        if len(batches) == 1:
            return batches[0]
        with as_input_error(
            "the sources of a Mixture give batches of several forms",
            "Mapped(source, FUNCTION), which makes the batches of each alike",
            (TypeError, LookupError, ValueError),
        ):
            return _select_rows(batches, np.argsort(np.concatenate(places)))


def _validate_weights(
    weights: Sequence[float], passes: Sequence[int] | None, num_sources: int
) -> None:
    """Raise InputError for weights that are no part of each source, or that passes contradict."""
    is_usable = False
    with suppress(TypeError, ValueError):
        values = np.asarray(weights, np.float64)
        is_given = values.shape == (num_sources,) and num_sources > 0
        least = MIN_PART * sum(values.tolist())
        is_usable = is_given and bool(values.min() > least)
    if not is_usable or passes is not None:
        raise InputError(
            f"a Mixture of {num_sources} sources with weights={weights!r:.200}, passes={passes}",
            "a weight above 0 for each source, such as weights=[0.7, 0.3], and no passes",
        )


def find_passes(lengths: Sequence[int], weights: Sequence[float]) -> list[int]:
    """Return the smallest numbers of passes that give each source its part of the samples.

    Args:
        lengths: The samples of each source.
        weights: The part of each source; their sum is taken for 1.
    """
    counts = np.asarray(lengths, np.float64)
    parts = np.asarray(weights, np.float64) / sum(weights)
    rates = parts / counts
    passes = np.ones(len(counts))
    # Rounding changes a part by less than one in `fewest`, the passes of the source with fewest.
    for fewest in range(1, 1 + math.ceil(1 / WEIGHT_TOLERANCE)):
        passes = np.rint(rates / rates.min() * fewest)
        samples = passes * counts
        if (abs(samples / samples.sum() / parts - 1) <= WEIGHT_TOLERANCE).all():
            break
    return [int(number) for number in passes]


def _select_rows(batches: list[Any], order: IndexArray) -> Any:
    """Return the rows of batches of one form as one batch.

    Args:
        batches: The batches.
        order: The rows of the result, counted over all batches.
    """
    first = batches[0]
    if isinstance(first, Ragged):
        lists = [values for batch in batches for values in split_lists(batch)]
        return join_lists([np.asarray(lists[row]) for row in order.tolist()])
    if isinstance(first, dict):
        return {name: _select_rows([batch[name] for batch in batches], order) for name in first}
    if isinstance(first, (list, tuple)):
        return [_select_rows(list(columns), order) for columns in zip(*batches, strict=True)]
    if isinstance(first, torch.Tensor):  # of a type that NumPy may not have
        tensors = [torch.as_tensor(batch) for batch in batches]
        rows = torch.from_numpy(order)
        return torch.cat(tensors)[rows]
    return np.concatenate([np.asarray(batch) for batch in batches])[order]
