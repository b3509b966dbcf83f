"""Tables of what a Python program makes: dicts of numbers, of arrays of one shape, or of lists of numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import numpy as np

from stepladder.core.errors import InputError
from stepladder.data.table import Block, Column, Ragged, Table, rows_per_block, skipping

BLOCK_SAMPLES = 64  # they may come slowly
Sample = Mapping[str, Any]


@dataclass(kw_only=True)
class SampleTable(Table):
    """samples: all of them; they can be read once."""

    samples: Iterator[Sample]

    def blocks(self, skip: int) -> Iterator[Block]:
        return skipping(self._blocks(), skip)

    def _blocks(self) -> Iterator[Block]:
        number, size = 0, min(BLOCK_SAMPLES, rows_per_block(self.columns))
        while held := list(islice(self.samples, size)):
            yield {name: sample_values(name, column, held, number) for name, column in self.columns.items()}
            number += len(held)


def from_samples(samples: Iterable[Sample]) -> SampleTable:
    """The columns are those of the first one. Lists may differ in length."""
    iterator = iter(samples)
    first = next(iterator, None)
    if first is None:
        raise InputError("there are no samples", "give an iterator with at least one dict")
    columns = {name: sample_column(name, value) for name, value in first.items()}
    return SampleTable("the samples", columns, {"kind": "samples"}, samples=chain([first], iterator))


def sample_column(name: str, value: Any) -> Column:
    array = np.asarray(value)
    if array.dtype.kind not in "biuf" or (isinstance(value, list) and array.ndim != 1):
        raise InputError(
            f"sample 0: {name} is a {type(value).__name__} of {array.dtype}",
            "give numbers, arrays of numbers, or flat lists of numbers",
        )
    if isinstance(value, list):
        return Column(np.dtype(np.float32 if value and array.dtype.kind == "f" else np.int64), (), True)
    return Column(np.dtype(np.float32) if isinstance(value, float) else array.dtype.newbyteorder("="), array.shape)


def sample_values(name: str, column: Column, samples: list[Sample], number: int) -> Any:
    """One column of these samples, the first of which is number `number`."""
    values = []
    for place, sample in enumerate(samples):
        value = np.asarray(sample.get(name))
        fits = value.ndim == 1 if column.is_list else value.shape == column.shape
        if not fits or not (value.size == 0 or np.can_cast(value.dtype, column.dtype, "same_kind")):
            raise InputError(
                f"sample {number + place}: {name} is {value.dtype} of shape {list(value.shape)}, and {column}"
                " in the first sample",
                "the same type and shape in every sample; a Python list where lengths differ",
            )
        values.append(value.astype(column.dtype, copy=False))
    if not column.is_list:
        return np.stack(values)
    return Ragged(np.concatenate(values), np.cumsum([0, *map(len, values)]))
