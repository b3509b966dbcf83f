"""Batches made of samples: columns of numbers become arrays, all else stays a list."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
from torch.utils.data import default_collate

from stepladder.core.errors import InputError, to_one_line
from stepladder.data.table import Ragged

Decode = Callable[[dict[str, Any]], Any]
Sample = dict[str, Any]
DECODE_HINT = "decode=FUNCTION, which makes numbers or tensors of one shape of a sample"


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


def stack_values(name: str, values: list[Any]) -> Any:
    """Return the values of one column as an array, as Ragged, or as the list that they are.

    Raises:
        InputError: They are arrays of several shapes, numbers and something else, or some are
            missing.
    """
    first = values[0]
    if isinstance(first, (bool, int, float, np.generic)):
        hint = f"columns= without it, or {DECODE_HINT}"
        if any(value is None for value in values):
            raise InputError(f"column {name} has an empty value", hint)
        kinds = {type(value) for value in values}
        if len(kinds) > 1 and kinds != {int, float}:
            names = ", ".join(sorted(kind.__name__ for kind in kinds))
            raise InputError(f"column {name} has values of several types: {names}", hint)
        dtype = np.float32 if float in kinds else None  # of a text; others say their type
        return np.asarray(values, dtype)
    if not isinstance(first, np.ndarray):
        return values
    shapes = {value.shape for value in values}
    if len(shapes) > 1:
        raise InputError(f"column {name} has arrays of shapes {sorted(shapes)[:2]}", DECODE_HINT)
    return np.stack(values)


def join_lists(lists: list[np.ndarray]) -> Ragged:
    """Return lists of numbers as one Ragged."""
    offsets = np.zeros(len(lists) + 1, np.int64)
    np.cumsum([len(values) for values in lists], out=offsets[1:])
    return Ragged(np.concatenate(lists), offsets)


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
            if image.mode[0] in "IF":
                raise ValueError(f"values of mode {image.mode} would be cut to 8 bits")
            pages = getattr(image, "n_frames", 1)
            if pages > 1 and image.format != "MPO":  # a photo with smaller copies of itself
                raise ValueError(f"it has {pages} pages, of which one would be read")
            return np.asarray(image.convert("RGB"))
    except (UnidentifiedImageError, OSError, Image.DecompressionBombError, SyntaxError) as error:
        raise ValueError(f"no image ({to_one_line(error)})") from error
