"""Slices of sharded tensors in the part files of a snapshot, one file per rank.

    part-00000.safetensors   slices of weights, `model/NAME`, and of state, `state/KEY/KEY/...`

The entry `slices` of the manifest has for each tensor its shape and which rows are in which part,
or which elements if it is `flat`. A reader can therefore load any rows, one tensor at a time,
whatever the number of ranks that wrote them.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from stepladder.core import typed_file
from stepladder.storage.safetensors_file import write_tensors

JsonObject = dict[str, Any]
PART_PREFIX = "part-"
MODEL_PREFIX = "model/"
STATE_PREFIX = "state/"
AVERAGE_PREFIX = "average/"
OPTIMIZER_PREFIX = "optimizer/state/"
SLICED_NAME = re.compile(
    rf"{MODEL_PREFIX}.+|{STATE_PREFIX}({OPTIMIZER_PREFIX}\d+/[^/]+|{AVERAGE_PREFIX}[^/]+)"
)


class DamagedSnapshot(Exception):
    """A snapshot on disk differs from what was written; the text names the file and the damage."""


class TensorSlice(NamedTuple):
    """Consecutive rows of a tensor, or consecutive elements if it is flat.

    Args:
        values: The rows, or a vector of elements.
        first: Index of the first row or element.
        shape: Shape of the whole tensor.
        flat: Whether `values` are elements.
    """

    values: Tensor
    first: int
    shape: list[int]
    flat: bool = False


def get_local_slice(tensor: Tensor) -> TensorSlice:
    """Return this rank's rows of a DTensor sharded along its first dimension, or a whole tensor."""
    if not hasattr(tensor, "to_local"):
        return TensorSlice(tensor, 0, list(tensor.shape))
    mesh = tensor.device_mesh  # type: ignore[attr-defined]
    num_rows = tensor.shape[0]
    rows_per_rank = -(-num_rows // mesh.size())
    values = tensor.detach().to_local()  # type: ignore[attr-defined]
    first = min(rows_per_rank * mesh.get_local_rank(), num_rows)
    return TensorSlice(values, first, list(tensor.shape))


def write_part(folder: Path, number: int, slices: Mapping[str, TensorSlice]) -> JsonObject:
    """Write part `number`; empty slices are left out.

    Returns:
        The entry of `merge_parts` for this part: its name, size, SHA-256 and rows.
    """
    name = f"{PART_PREFIX}{number:05d}.safetensors"
    values = {}
    rows = {}
    for key, part in slices.items():
        if part.values.numel():
            end = part.first + len(part.values)
            values[key] = part.values
            rows[key] = [part.first, end, part.shape, part.flat]
    written = write_tensors(folder / name, values)
    return {"name": name, **written, "rows": rows}


def merge_parts(parts: Iterable[JsonObject]) -> tuple[JsonObject, JsonObject]:
    """Return the manifest's `files` and `slices` for parts as `write_part` returned them."""
    files: JsonObject = {}
    slices: JsonObject = {}
    for part in parts:
        file = part["name"]
        files[file] = {"bytes": part["bytes"], "sha256": part["sha256"]}
        for name, (lo, hi, shape, flat) in part["rows"].items():
            entry = slices.setdefault(name, {"shape": shape, "pieces": []})
            if flat:
                entry["flat"] = True
            entry["pieces"].append([file, lo, hi])
    return files, slices


def read_verified(path: Path, expected: JsonObject, is_kept: bool = True) -> bytes:
    """Return the bytes of a file, whose size and SHA-256 must be the manifest's.

    Args:
        path: The file.
        expected: Its entry of the manifest.
        is_kept: Whether to return the bytes; if not, the file is not loaded into memory.

    Raises:
        DamagedSnapshot: The size or the SHA-256 differs.
        OSError: The file cannot be read.
        ValueError: It is no regular file.
    """
    with typed_file.open_to_read(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size != expected["bytes"]:  # a file of another size may be a terabyte
            raise DamagedSnapshot(f"{path.name}: {size} bytes instead of {expected['bytes']}")
        data = file.read() if is_kept else b""
        digest = hashlib.sha256(data)
        if not is_kept:
            digest = hashlib.file_digest(file, "sha256")  # type: ignore[arg-type]
    if digest.hexdigest() != expected["sha256"]:
        raise DamagedSnapshot(f"{path.name}: SHA-256 differs")
    return data


def verify_slices(manifest: JsonObject) -> None:
    """Verify that the manifest's `slices` cover each row once, and name only its own parts.

    Raises:
        DamagedSnapshot: If they do not.
    """
    parts = {file for file in manifest["files"] if file.startswith(PART_PREFIX)}
    try:
        for name, entry in manifest.get("slices", {}).items():
            if not (_is_covered(entry, parts) and SLICED_NAME.fullmatch(name)):
                raise DamagedSnapshot(f"manifest.json: its slices do not go together ({name})")
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise DamagedSnapshot(f"manifest.json: its slices do not go together ({error})") from error


def _is_covered(entry: JsonObject, parts: set[str]) -> bool:
    """Return whether the pieces of a manifest entry, all of these parts, cover each row once."""
    end = 0
    for file, lo, hi in _sort_pieces(entry):
        is_next = file in parts and lo == end < hi
        end = hi if is_next else -1
    shape = entry["shape"]
    return end == int(math.prod(shape) if entry.get("flat") else shape[0])


def _sort_pieces(entry: JsonObject) -> list[Any]:
    """Return the pieces (file, lo, hi) of a manifest entry in the order of their rows."""
    return sorted(entry["pieces"], key=lambda piece: piece[1])


class SliceReader:
    """Reads rows of sharded tensors from the parts of a snapshot.

    Args:
        folder: The snapshot.
        slices: The manifest's entry `slices`.
    """

    def __init__(self, folder: Path, slices: JsonObject) -> None:
        self.folder = folder
        self.slices = slices
        self.parts: JsonObject = {}  # opened files by name

    def names(self, prefix: str) -> list[str]:
        """Return the names that begin with MODEL_PREFIX or STATE_PREFIX, without the prefix."""
        return [name.removeprefix(prefix) for name in self.slices if name.startswith(prefix)]

    def shape(self, name: str) -> list[int]:
        """Return the shape of the whole tensor."""
        return list(self.slices[name]["shape"])

    def read_rows(self, name: str, lo: int, hi: int) -> Tensor:
        """Return rows [lo, hi) of a tensor."""
        _, *row_shape = self.shape(name)
        width = math.prod(row_shape)
        return self.read_elements(name, lo * width, hi * width).view(hi - lo, *row_shape)

    def read_elements(self, name: str, lo: int, hi: int) -> Tensor:
        """Return elements [lo, hi) of a tensor, as a vector."""
        width = 1  # elements of what the parts count, which are rows unless it is flat
        if not self.slices[name].get("flat"):
            width = math.prod(self.shape(name)[1:])
        first = lo // width
        elements = self._read(name, first, -(-hi // width)).reshape(-1)
        return elements[lo - first * width : hi - first * width]

    def read_tensor(self, name: str) -> Tensor:
        """Return a whole tensor."""
        shape = self.shape(name)
        return self.read_elements(name, 0, math.prod(shape)).view(shape)

    def read_tensors(self, prefix: str) -> dict[str, Tensor]:
        """Return all whole tensors with this prefix, which the keys do not have."""
        return {name: self.read_tensor(prefix + name) for name in self.names(prefix)}

    def fill_state(self, state: Any, skip_prefix: str | None = None) -> None:
        """Put the tensors of the state into a nested dictionary.

        Args:
            state: The dictionary.
            skip_prefix: Leave out tensors whose names begin so, except scalars: their ranks read
                their own slices.
        """
        for name in self.names(STATE_PREFIX):
            full_name = STATE_PREFIX + name
            is_skipped = skip_prefix is not None and full_name.startswith(skip_prefix)
            if not is_skipped or not self.shape(full_name):
                _set_nested(state, name, self.read_tensor(full_name))

    def _read(self, name: str, lo: int, hi: int) -> Tensor:
        """Return [lo, hi) of the rows or elements, from all parts that have some of them."""
        pieces = _sort_pieces(self.slices[name])
        tensors: list[Tensor] = []
        for file, first, end in pieces:
            if first < hi and lo < end:
                start = max(lo, first) - first
                stop = min(hi, end) - first
                tensors.append(self._open_part(file).get_slice(name)[start:stop])
        if not tensors:  # an empty slice, of the right dtype
            file, _, _ = pieces[0]
            tensors = [self._open_part(file).get_slice(name)[:0]]
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

    def _open_part(self, file: str) -> Any:
        if file not in self.parts:
            self.parts[file] = safe_open(self.folder / file, framework="pt")
        return self.parts[file]


def read_rows(reader: SliceReader, name: str, local: TensorSlice) -> Tensor:
    """Return the rows of a snapshot's tensor that a rank holds."""
    return reader.read_rows(name, local.first, local.first + len(local.values))


@dataclass(frozen=True)
class StoredModel:
    """The weights of a snapshot, whole and sharded.

    Args:
        tensors: The whole tensors.
        reader: The reader of the sharded ones.
        aliases: Names of tied tensors: {name: name under which it is stored}.
    """

    tensors: dict[str, Tensor]
    reader: SliceReader
    aliases: dict[str, str]

    def find_differences(self, model: torch.nn.Module) -> list[str]:
        """Return a sentence for each name or shape in which a model differs."""
        shapes = {name: list(tensor.shape) for name, tensor in self.tensors.items()}
        for name in self.reader.names(MODEL_PREFIX):
            shapes[name] = self.reader.shape(MODEL_PREFIX + name)
        for alias, name in self.aliases.items():
            shapes[alias] = shapes[name]
        differences = []
        for name, target in model.state_dict().items():
            shape = get_local_slice(target).shape
            stored_shape = shapes.pop(name, None)
            if stored_shape is None:
                differences.append(f"{name} {shape} is in the model only")
            elif shape != stored_shape:
                differences.append(
                    f"{name} is {shape} in the model and {stored_shape} in the snapshot"
                )
        for name in sorted(shapes):
            differences.append(f"{name} {shapes[name]} is in the snapshot only")
        return differences

    @torch.no_grad()
    def copy_to(self, model: torch.nn.Module) -> None:
        """Copy into each tensor of a model the rows that this rank holds of it.

        `find_differences` must have returned none.
        """
        for name, target in model.state_dict().items():
            name = self.aliases.get(name, name)
            local = get_local_slice(target)
            if name not in self.tensors:
                values = read_rows(self.reader, MODEL_PREFIX + name, local)
            else:
                values = self.tensors[name]
                if local.shape:  # a scalar has no rows, and is never sharded
                    values = values[local.first : local.first + len(local.values)]
            local.values.copy_(values)


def _set_nested(state: Any, name: str, tensor: Tensor) -> None:
    """Set an entry of a nested dictionary.

    Args:
        state: The dictionary; inner ones are created if need be.
        name: The keys, separated by "/"; keys of digits are integers.
        tensor: The value.
    """
    keys = [int(key) if key.isdigit() else key for key in name.split("/")]
    for key in keys[:-1]:
        state = state.setdefault(key, {})
    state[keys[-1]] = tensor
