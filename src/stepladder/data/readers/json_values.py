"""The values of JSON records: columns of numbers become arrays of one type for the whole file."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from stepladder.core.errors import InputError
from stepladder.core.typed_file import make_object
from stepladder.data.readers.batches import (
    COLUMN_HINT,
    NUMBER_TYPES,
    Sample,
    find_kind,
    round_numbers,
)
from stepladder.data.table import Ragged

# Numbers as all programs write them: no leading zeros, no underscores, no digits of other scripts.
PLAIN_NUMBER = re.compile(
    r"\s*[-+]?(?:(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:e[-+]?[0-9]+)?|nan|inf|infinity)\s*",
    re.IGNORECASE,
)
# What ends the name of a value; in a text it is an escaped quotation mark with a colon.
NAME_END = re.compile(rb'"\s*:')


def _parse_finite(text: str) -> float:
    """Return a fraction. Raises ValueError for one such as 1e400, which Python takes for inf."""
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text:.80} is too large")
    return number


def parse_carefully(data: bytes) -> Any:
    """Return a JSON value as Python's json reads it: NaN is valid, and errors name the position.

    Args:
        data: The text.

    Raises:
        ValueError: It is no JSON, or an object in it has two values of one name.
    """
    try:
        return json.loads(data, object_pairs_hook=make_object, parse_float=_parse_finite)
    except RecursionError as error:
        raise ValueError("its lists are nested too deeply") from error


# Returns a JSON value as `parse_carefully` does.
decode_json: Callable[[bytes], Any] = parse_carefully
try:
    import msgspec
except ImportError:
    pass
else:
    decode_fast = msgspec.json.Decoder().decode

    def decode_json(data: bytes) -> Any:
        """Return a JSON value as `parse_carefully` does, of most records in a third of the time."""
        try:
            value = decode_fast(data)
        except (ValueError, RecursionError):
            return parse_carefully(data)
        # Of two values of one name, msgspec takes one: there are more names than values then.
        num_names = len(value) if isinstance(value, dict) else 0
        if data.count(b":") == num_names or len(NAME_END.findall(data)) == num_names:
            return value
        return parse_carefully(data)


def parse_object(data: bytes) -> Sample:
    """Return the JSON object that a record is. Raises ValueError if it is none."""
    value = decode_json(data)
    if not isinstance(value, dict):
        raise ValueError("it is no JSON object")
    return value


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
    rounded = round_numbers(numbers, dtype)
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
        numbers: list[Any] = decode_json(f"[{','.join(texts)}]".encode())
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
        kind: bool, int or float, of numbers and of lists of them; object for all else.
        shape: The shape of a value; (None,) for lists that differ in length.
    """

    kind: type
    shape: tuple[int | None, ...] = ()

    def make_column(self, name: str, values: list[Any]) -> Any:
        """Return the values of the column as an array, as Ragged, or as the same list.

        Raises:
            ValueError: A value is of another type than the column.
        """
        try:
            if self.kind is object:
                _validate_no_numbers(values)
                return values
            numbers = self._join_numbers(values)
        except OverflowError as error:
            dtype = NUMBER_TYPES[self.kind]
            raise ValueError(f"{name} has a number that is too large for {dtype}") from error
        except ValueError as error:
            raise ValueError(f"{name} has another type than in the first records") from error
        if None not in self.shape:
            return numbers.reshape(len(values), *self.shape)
        offsets = np.zeros(len(values) + 1, np.int64)
        np.cumsum([len(value) for value in values], out=offsets[1:])
        return Ragged(numbers, offsets)

    def _join_numbers(self, values: list[Any]) -> np.ndarray:
        """Return all numbers of values, each in the type of the column as it would be alone.

        Raises:
            ValueError: A value is of another type or another shape than the column.
        """
        for length in self.shape:
            if not {list}.issuperset(map(type, values)):
                raise ValueError("no list of numbers")
            if length is not None and not {length}.issuperset(map(len, values)):
                raise ValueError("lists of another length")
            values = list(chain.from_iterable(values))
        allowed = {float, int} if self.kind is float else {self.kind}
        if not allowed.issuperset(map(type, values)):
            raise ValueError(f"no {self.kind.__name__}")
        return round_numbers(values, NUMBER_TYPES[self.kind])


def _validate_no_numbers(values: list[Any]) -> None:
    """Raise ValueError if a number is among values."""
    if not NUMBER_TYPES.keys().isdisjoint(map(type, values)):
        raise ValueError("a number")


def collect_names(samples: list[Sample]) -> list[str]:
    """Return the names of all columns of samples, in the order in which they first appear."""
    return list(dict.fromkeys(name for sample in samples for name in sample))


def find_value_type(label: str, values: list[Any]) -> ValueType:
    """Return the type that all values of a column have.

    Args:
        label: The column and its file, for messages.
        values: The values.

    Raises:
        InputError: There are numbers and others.
    """
    shape: list[int | None] = []
    while values and {list}.issuperset(map(type, values)):
        lengths = set(map(len, values))
        shape.append(lengths.pop() if len(lengths) == 1 else None)
        values = list(chain.from_iterable(values))
    if None in shape and len(shape) > 1:  # lists of lists of several lengths
        return ValueType(object)
    kind = find_kind(values)
    kinds = set(map(type, values))
    if kind is object and not shape and not kinds.isdisjoint(NUMBER_TYPES):
        problem = f"values of several types: {', '.join(sorted(kind.__name__ for kind in kinds))}"
        if None in values:
            problem = "an empty value"
        raise InputError(f"column {label} has {problem}", COLUMN_HINT)
    return ValueType(kind, tuple(shape))
