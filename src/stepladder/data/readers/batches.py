"""Batches made of samples: columns of numbers become arrays, all else stays a list."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch.utils.data import default_collate

from stepladder.core.errors import InputError, as_input_error, to_one_line

Decode = Callable[[dict[str, Any]], Any]
Sample = dict[str, Any]
INT64 = np.dtype(np.int64)
FLOAT32 = np.dtype(np.float32)
NUMBER_TYPES = {bool: np.dtype(np.bool_), int: INT64, float: FLOAT32}
DECODE_HINT = "decode=FUNCTION, which makes numbers or tensors of one shape of a sample"
MAX_BYTE = 255
WIDE_VALUES = re.compile(r";16[BLN]")
COLUMN_HINT = f"columns= without it, or {DECODE_HINT}"
NO_NUMBER = "no number"  # what is not stacked


def collate_decoded(samples: list[Sample], decode: Decode) -> Any:
    """Return the batch of what the user's function makes of each sample.

    Raises:
        InputError: The results do not make a batch.
    """
    decoded = [decode(sample) for sample in samples]
    try:
        return default_collate(decoded)
    except (TypeError, RuntimeError, LookupError) as error:
        raise InputError(
            f"what decode returns makes no batch ({to_one_line(error)})", DECODE_HINT
        ) from error


def find_kind(values: Sequence[Any]) -> type:
    """Return bool, int or float if that is the type of all values, else object.

    Whole numbers among fractions are float.
    """
    kinds = set(map(type, values))
    if kinds == {int, float}:
        return float
    return kinds.pop() if len(kinds) == 1 and kinds <= NUMBER_TYPES.keys() else object


def round_numbers(numbers: Sequence[Any], dtype: np.dtype[Any]) -> np.ndarray:
    """Return numbers as an array. Raises OverflowError if one of them does not fit its type."""
    if dtype.kind == "b" and not {0, 1}.issuperset(numbers):
        raise OverflowError(f"too large for {dtype}")
    if dtype.kind != "f":
        return np.asarray(numbers, dtype)
    with np.errstate(over="raise"):
        try:
            return np.asarray(numbers, np.float64).astype(dtype)
        except FloatingPointError as error:
            raise OverflowError(f"too large for {dtype}") from error


def stack_values(name: str, values: list[Any], first: Any) -> Any:
    """Return the values of one column as an array, or as the list that they are.

    Args:
        name: The column.
        values: The values.
        first: The value of the first record, whose type all have.

    Raises:
        InputError: They have another type, are arrays of several shapes, or one has more than 64
            bits.
    """
    validate_type(name, values, first)
    if isinstance(first, np.ndarray):
        shapes = {value.shape for value in values}
        if len(shapes) > 1:
            problem = f"column {name} has arrays of shapes {sorted(shapes)[:2]}"
            raise InputError(problem, DECODE_HINT)
        return np.stack(values)
    dtype = _name_type(first)
    if dtype == NO_NUMBER:
        return values
    with as_input_error(f"column {name}", COLUMN_HINT, (OverflowError,)):
        return round_numbers(values, np.dtype(dtype))


def validate_type(name: str, values: list[Any], first: Any) -> None:
    """Validate that values have the type of the first of their column; 2 may stand for 2.0.

    Raises:
        InputError: One has another type.
    """
    expected = _name_type(first)
    for found in dict.fromkeys(map(_name_type, values)):
        if found != expected and (found, expected) != ("int64", "float32"):
            problem = f"column {name} is {found}, and {expected} in the first record"
            raise InputError(problem, COLUMN_HINT)


def _name_type(value: Any) -> str:
    """Return the name of the type of a number or of an array, NO_NUMBER for all else."""
    if isinstance(value, (np.ndarray, np.generic)):
        return str(value.dtype)
    return str(NUMBER_TYPES.get(type(value), NO_NUMBER))


def decode_image(data: bytes) -> np.ndarray:
    """Return an image as an array (height, width, 3) of uint8.

    Args:
        data: The bytes of an image file, such as a JPEG or a PNG.

    Raises:
        InputError: Pillow is not installed.
        ValueError: They are no image, or a damaged one.
    """
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise InputError("images need Pillow", "pip install pillow; or decode=FUNCTION") from error
    try:
        with Image.open(io.BytesIO(data)) as image:
            # Of more than 8 bits, Pillow says it in the mode, or only in what it decodes.
            if image.mode[0] in "IF" or any(map(_is_wide, image.tile)):
                raise ValueError(f"values of more than 8 bits, in mode {image.mode}, would be cut")
            pages = getattr(image, "n_frames", 1)
            size = image.size
            for page in range(1, pages):
                image.seek(page)
                # A photo may have smaller copies and maps of itself.
                if image.format != "MPO" or image.size == size:
                    raise ValueError(f"it has {pages} pages, of which one would be read")
            if pages > 1:
                image.seek(0)
            return np.asarray(image.convert("RGB"))
    except (UnidentifiedImageError, OSError, Image.DecompressionBombError, SyntaxError) as error:
        reason = to_one_line(error).partition(" <")[0]  # which is an address in memory
        raise ValueError(f"no image in {len(data):,} bytes ({reason})") from error


def _is_wide(tile: tuple[Any, ...]) -> bool:
    """Return whether a part of an image, as Pillow decodes it, has values of more than 8 bits."""
    codec, _, _, settings = tile
    is_wide_ppm = codec.startswith("ppm") and settings[1] > MAX_BYTE
    return is_wide_ppm or WIDE_VALUES.search(str(settings)) is not None
