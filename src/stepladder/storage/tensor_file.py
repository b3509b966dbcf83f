"""Files of the safetensors format, written one tensor at a time: a model is never twice in memory.

Eight bytes with the header's length, the header as JSON, then the tensors' bytes, little-endian,
one after the other: https://github.com/huggingface/safetensors. The library's own writer tells a
full disk by an error of its own, without the operating system's number."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

LETTERS = {"float": "F", "bfloat": "BF", "int": "I", "uint": "U", "complex": "C"}
OTHERS = {"bool": "BOOL", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}


def write_tensors(
    path: Path,
    forms: Mapping[str, torch.Tensor],
    read: Callable[[str], torch.Tensor] | None = None,
    about: dict[str, str] | None = None,
) -> dict[str, Any]:
    """A new file of these tensors. Returns its `bytes` and `sha256`, as a manifest has them.

    read: gives the values of one, where `forms` have shapes and types only.  about: the header's
    `__metadata__`. Raises OSError, and TypeError for a type that the format does not know."""
    names = sorted(
        forms, key=lambda name: (-forms[name].element_size(), name)
    )  # so each begins where its type may
    header: dict[str, Any] = {} if about is None else {"__metadata__": about}
    at = 0
    for name in names:
        form, end = forms[name], at + forms[name].numel() * forms[name].element_size()
        header[name] = {
            "dtype": type_in_file(form.dtype),
            "shape": list(form.shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for data in (len(text).to_bytes(8, "little"), text):
            file.write(data)
            digest.update(data)
        for name in names:
            values = bytes_of(forms[name] if read is None else read(name))
            file.write(values)
            digest.update(values)
    return {"bytes": 8 + len(text) + at, "sha256": digest.hexdigest()}


def bytes_of(tensor: torch.Tensor) -> Any:
    """What is in it, as numpy's bytes; on the CPU without a copy, where it lies in one piece."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def type_in_file(dtype: torch.dtype) -> str:
    """The format's name of a type. Raises TypeError."""
    name = str(dtype).removeprefix("torch.")
    found = re.fullmatch(r"([a-z]+)(\d+)", name)
    if name in OTHERS:
        return OTHERS[name]
    if found is None or found[1] not in LETTERS or name == "complex32":
        raise TypeError(f"tensors of {name} cannot be written")
    return LETTERS[found[1]] + found[2]
