"""The values of JSON records: columns of numbers become arrays of one type for the whole file."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from stepladder.data.readers.batches import Sample, stack_values
from stepladder.data.table import Ragged

DecodeJson = Callable[[bytes | str], Any]

decode_fast: DecodeJson = json.loads
try:
    import msgspec
except ImportError:
    pass
else:
    decode_fast = msgspec.json.decode  # takes a third of the time


def parse_object(data: bytes) -> Sample:
    """Return a JSON object, or raise ValueError."""
    try:
        value = decode_fast(data)
    except (ValueError, RecursionError):
        value = parse_carefully(data)
    if not isinstance(value, dict):
        raise ValueError("it is no JSON object")
    return value


def parse_carefully(data: bytes) -> Any:
    """Return what Python's module reads: it also takes NaN, and its errors name the place."""
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("its lists are nested too deeply") from error


def parse_numbers(texts: list[str], kind: Callable[[str], Any]) -> list[Any]:
    """Return the numbers that texts are: whole ones for int, any for float.

    Raises:
        ValueError: A text is no such number.
    """
    allowed = {int} if kind is int else {int, float}
    with suppress(ValueError):  # JSON has no " 1_000" and no ".5", which int and float take
        numbers: list[Any] = decode_fast(f"[{','.join(texts)}]")
        if len(numbers) == len(texts) and allowed.issuperset(map(type, numbers)):
            return numbers
    return [kind(text) for text in texts]


@dataclass(frozen=True)
class ValueType:
    """What the values of a column of JSON have in common.

    Attributes:
        kind: bool, int or float; list for lists of numbers; object for all else.
        dtype: Of the numbers in lists.
        shape: Of lists of one length.
        is_ragged: Whether lists differ in length.
    """

    kind: type
    dtype: Any = None
    shape: tuple[int, ...] = ()
    is_ragged: bool = False

    def make_column(
        self,
        name: str,
        values: list[Any],
    ) -> Any:
        """Return values as an array, as Ragged, or as the list that they are.

        Raises:
            ValueError: One of them has another type.
        """
        if self.kind is object:
            return stack_values(name, values)
        try:
            if self.kind is list:
                return self._join_lists(values) if self.is_ragged else self._stack_lists(values)
            return self._stack_numbers(values)
        except OverflowError as error:
            raise ValueError(f"{name} has a number of more than 64 bits") from error
        except ValueError as error:
            raise ValueError(f"{name} has another type than in the first records") from error

    def _stack_numbers(self, values: list[Any]) -> np.ndarray:
        allowed = {float, int} if self.kind is float else {self.kind}
        if not allowed.issuperset(map(type, values)):
            raise ValueError(f"no {self.kind.__name__}")
        dtypes = {float: np.float32, int: np.int64, bool: np.bool_}
        return np.asarray(values, dtypes[self.kind])

    def _stack_lists(self, values: list[Any]) -> np.ndarray:
        array = self._convert(np.asarray(values))
        if array.shape[1:] != self.shape:
            raise ValueError(f"lists of shape {array.shape[1:]}")
        return array

    def _join_lists(self, values: list[Any]) -> Ragged:
        if {list}.issuperset(map(type, values)):
            offsets = np.zeros(len(values) + 1, np.int64)
            np.cumsum([len(value) for value in values], out=offsets[1:])
            numbers = list(chain.from_iterable(values))
            array = self._convert(np.asarray(numbers)) if numbers else np.empty(0, self.dtype)
            if array.ndim == 1:
                return Ragged(array, offsets)
        raise ValueError("no list of numbers")

    def _convert(self, array: np.ndarray) -> np.ndarray:
        """Return numbers in the type of the column; each as if it stood alone.

        Raises:
            ValueError: They are no numbers, or fractions where others are whole.
        """
        if array.dtype.kind not in "bif" or not np.can_cast(array.dtype, self.dtype, "same_kind"):
            raise ValueError(f"numbers of type {array.dtype}")
        if self.dtype.kind == "f":
            # A whole number among fractions is float64 here: it must not round in another way.
            array = array.astype(np.float64)
        return array.astype(self.dtype)


def collect_names(samples: list[Sample]) -> list[str]:
    """Return the names of all columns of samples."""
    return list(dict.fromkeys(name for sample in samples for name in sample))


def find_value_type(samples: list[Sample], name: str) -> ValueType:
    """Return the type that a column has in all samples."""
    values = [sample[name] for sample in samples if name in sample]
    kinds = {type(value) for value in values}
    if kinds == {int, float}:
        return ValueType(float)
    if len(kinds) == 1 and kinds <= {bool, int, float}:
        return ValueType(kinds.pop())
    if kinds != {list}:
        return ValueType(object)
    try:
        arrays = [np.asarray(value) for value in values if value]
    except ValueError:  # lists of lists of several lengths
        return ValueType(object)
    if not arrays or any(array.dtype.kind not in "bif" for array in arrays):
        return ValueType(object)
    has_fractions = any(array.dtype.kind == "f" for array in arrays)
    dtype = np.dtype(np.float32 if has_fractions else np.int64)
    shapes = {array.shape for array in arrays}
    if len(shapes) == 1 and len(arrays) == len(values):
        return ValueType(list, dtype, shapes.pop())
    if all(array.ndim == 1 for array in arrays):
        return ValueType(list, dtype, is_ragged=True)
    return ValueType(object)
