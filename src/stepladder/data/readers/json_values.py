"""The values of JSON records: columns of numbers become arrays of one type for the whole file."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from stepladder.data.readers.batches import Sample, stack_values
from stepladder.data.table import Ragged

DecodeJson = Callable[[bytes | str], Any]
# Numbers as all programs write them: no leading zeros, no underscores, no digits of other scripts.
PLAIN_NUMBER = re.compile(
    r"\s*[-+]?(?:(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:e[-+]?[0-9]+)?|nan|inf|infinity)\s*",
    re.IGNORECASE,
)
INT64 = np.dtype(np.int64)
FLOAT32 = np.dtype(np.float32)
NUMBER_KINDS = "bif"  # NumPy's letters for the types of bool, int and float

decode_fast: DecodeJson = json.loads
try:
    import msgspec
except ImportError:
    pass
else:
    decode_fast = msgspec.json.Decoder().decode  # takes a third of the time of json.loads


def parse_object(data: bytes) -> Sample:
    """Return the JSON object that a record is. Raises ValueError if it is none."""
    try:
        value = decode_fast(data)
    except (ValueError, RecursionError):
        value = parse_carefully(data)
    if not isinstance(value, dict):
        raise ValueError("it is no JSON object")
    return value


def parse_unique(data: bytes) -> Sample:
    """Return the JSON object that a record is, as `parse_object` does.

    Args:
        data: The record.

    Raises:
        ValueError: It is no JSON object.
        LookupError: It has two values of one name, or an object in it has.
    """
    sample = parse_object(data)
    json.loads(data, object_pairs_hook=_validate_unique)
    return sample


def _validate_unique(pairs: list[tuple[str, Any]]) -> None:
    """Raise LookupError if two of the pairs have the same name."""
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        raise LookupError(f"two values have the same name, of {', '.join(names)}")


def _round_numbers(numbers: list[Any], dtype: np.dtype[Any]) -> np.ndarray:
    """Return numbers as an array. Raises OverflowError if one of them does not fit its type."""
    if dtype.kind != "f":
        return np.asarray(numbers, dtype)
    with np.errstate(over="raise"):
        try:
            return np.asarray(numbers, np.float64).astype(dtype)
        except FloatingPointError as error:
            raise OverflowError(f"too large for {dtype}") from error


def parse_carefully(data: bytes) -> Any:
    """Return a JSON value as Python's json reads it: NaN is valid, and errors name the position."""
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("its lists are nested too deeply") from error


def parse_numbers(texts: list[str], dtype: np.dtype[Any]) -> np.ndarray:
    """Return the number that each text stands for.

    Args:
        texts: The texts.
        dtype: The type of the numbers: of whole numbers only, or of any.

    Raises:
        OverflowError: A number does not fit the type.
        ValueError: A text is no such number, or would be another text when it is written again as
            one, such as 007, which may be a name.
    """
    numbers = _parse_plain(texts, is_float=dtype.kind == "f")
    rounded = _round_numbers(numbers, dtype)
    if dtype.kind == "f":
        for place in np.flatnonzero(np.isinf(rounded)).tolist():
            if "inf" not in texts[place].lower():  # such as 1e400
                raise OverflowError(f"too large for {dtype}")
    return rounded


def _parse_plain(texts: list[str], is_float: bool) -> list[Any]:
    """Return the number of Python's that each text stands for, as `parse_numbers` does."""
    allowed = {int, float} if is_float else {int}
    # All texts are parsed as one JSON list, which is quick, or else each text alone: JSON has no
    # " 1" and no ".5", and "1,5" makes two numbers of the list.
    with suppress(ValueError):
        numbers: list[Any] = decode_fast(f"[{','.join(texts)}]")
        if len(numbers) == len(texts) and allowed.issuperset(map(type, numbers)):
            return numbers
    numbers = []
    for text in texts:
        try:
            if not PLAIN_NUMBER.fullmatch(text):
                raise ValueError
            numbers.append(float(text) if is_float else int(text))
        except ValueError:
            kind = "number" if is_float else "whole number"
            raise ValueError(f"{text!r:.80} is no {kind}") from None
    return numbers


def is_value(text: str) -> bool:
    """Return whether Python takes a text for a number, so that it is no name of a column."""
    try:
        float(text)
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class ValueType:
    """What the values of a column of JSON have in common.

    Args:
        kind: bool, int or float; list for lists of numbers; object for all else.
        dtype: For lists: the type of their numbers.
        shape: For lists that all have one shape: that shape.
        is_ragged: For lists: whether they differ in length.
    """

    kind: type
    dtype: Any = None
    shape: tuple[int, ...] = ()
    is_ragged: bool = False

    def make_column(self, name: str, values: list[Any]) -> Any:
        """Return the values of the column as an array, as Ragged, or as the same list.

        Raises:
            ValueError: A value is of another type than the column.
        """
        if self.kind is object:
            return stack_values(name, values)
        try:
            if self.kind is not list:
                return self._stack_numbers(values)
            if self.is_ragged:
                return self._join_lists(values)
            return self._stack_lists(values)
        except OverflowError as error:
            raise ValueError(f"{name} has a number of more than 64 bits, or of float32") from error
        except ValueError as error:
            raise ValueError(f"{name} has another type than in the first records") from error

    def _stack_numbers(self, values: list[Any]) -> np.ndarray:
        allowed = {float, int} if self.kind is float else {self.kind}
        if not allowed.issuperset(map(type, values)):
            raise ValueError(f"no {self.kind.__name__}")
        if self.kind is float:
            return _round_numbers(values, FLOAT32)
        return np.asarray(values, np.int64 if self.kind is int else np.bool_)

    def _stack_lists(self, values: list[Any]) -> np.ndarray:
        lists = values
        for length in self.shape[:-1]:
            _validate_lists(lists, length)
            lists = list(chain.from_iterable(lists))
        _validate_lists(lists, self.shape[-1])
        return self._join_numbers(lists).reshape(len(values), *self.shape)

    def _join_lists(self, values: list[Any]) -> Ragged:
        _validate_lists(values)
        offsets = np.zeros(len(values) + 1, np.int64)
        np.cumsum([len(value) for value in values], out=offsets[1:])
        return Ragged(self._join_numbers(values), offsets)

    def _join_numbers(self, lists: list[list[Any]]) -> np.ndarray:
        """Return the numbers of lists in the type of the column, each rounded as it would be alone.

        Raises:
            ValueError: They are no numbers, or fractions in a column of whole numbers.
        """
        # An array of Python takes less time than one of NumPy, and no texts. Whole numbers among
        # fractions become float64 first, so that they round to the same bits.
        code = "d" if self.dtype.kind == "f" else "q"
        joined = array(code)
        try:
            for numbers in lists:
                joined.fromlist(numbers)
        except TypeError as error:
            raise ValueError(str(error)) from error
        return np.frombuffer(joined, code).astype(self.dtype)


def _validate_lists(values: list[Any], length: int | None = None) -> None:
    """Raise ValueError unless all values are lists, of this length if one is given."""
    if not {list}.issuperset(map(type, values)):
        raise ValueError("no list of numbers")
    if length is not None and not {length}.issuperset(map(len, values)):
        raise ValueError("lists of another length")


def collect_names(samples: list[Sample]) -> list[str]:
    """Return the names of all columns of samples, in the order in which they first appear."""
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
    if not arrays or any(array.dtype.kind not in NUMBER_KINDS for array in arrays):
        return ValueType(object)
    has_fractions = any(array.dtype.kind == "f" for array in arrays)
    dtype = FLOAT32 if has_fractions else INT64
    shapes = {array.shape for array in arrays}
    has_empty_list = len(arrays) < len(values)
    if len(shapes) == 1 and not has_empty_list:
        return ValueType(list, dtype, shapes.pop())
    if all(array.ndim == 1 for array in arrays):
        return ValueType(list, dtype, is_ragged=True)
    return ValueType(object)
