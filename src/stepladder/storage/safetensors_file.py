"""Writing safetensors files one tensor at a time, so that a model is never in memory twice.

The format: eight bytes with the length of the header, the header as JSON, then the bytes of the
tensors, little-endian, one after the other (https://github.com/huggingface/safetensors). The
library's own writer reports a full disk by an error without the operating system's error number.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stepladder.core.safe_open import create_file

DTYPE_PREFIXES = {"float": "F", "bfloat": "BF", "int": "I", "uint": "U", "complex": "C"}
DTYPE_NAMES = {"bool": "BOOL", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    load: Callable[[str], Tensor] | None = None,
    metadata: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Write a new file.

    Raises OSError, and TypeError for a dtype that the format does not have.

    Args:
        path: The file.
        tensors: The tensors; only their shapes and dtypes are used if `load` is given.
        load: Returns the values of a tensor by its name.
        metadata: The header's `__metadata__`.

    Returns:
        The file's `bytes` and `sha256`, as a manifest has them.
    """
    # Largest element size first, so that each tensor begins at a multiple of its element size.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    offset = 0
    for name in names:
        tensor = tensors[name]
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _format_dtype(tensor.dtype),
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with create_file(path) as file:
        for data in (len(text).to_bytes(8, "little"), text):
            file.write(data)
            digest.update(data)
        for name in names:
            values = get_bytes(tensors[name] if load is None else load(name))
            file.write(values)
            digest.update(values)
    return {"bytes": 8 + len(text) + offset, "sha256": digest.hexdigest()}


def get_bytes(tensor: Tensor) -> Any:
    """Return the values as a NumPy array of bytes, without a copy if contiguous and on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy()


def _format_dtype(dtype: torch.dtype) -> str:
    """Return the format's name of a dtype.

    Raises:
        TypeError: If the format has none.
    """
    name = str(dtype).removeprefix("torch.")
    if name in DTYPE_NAMES:
        return DTYPE_NAMES[name]
    match = re.fullmatch(r"([a-z]+)(\d+)", name)
    if match is None or match[1] not in DTYPE_PREFIXES or name == "complex32":
        raise TypeError(f"tensors of {name} cannot be written")
    return DTYPE_PREFIXES[match[1]] + match[2]
