"""Tensors whose slices lie in several files of a snapshot, each written by the process that held
them.

    part-00000.safetensors   slices of the weights, `model/NAME`, and of the state, `state/KEY/KEY/...`

The manifest's `slices` says of each tensor its shape, and which rows are in which part, or which
elements where it is `flat`. So a reader takes what it needs, one tensor at a time, whatever the
number of processes that wrote them."""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

from stepladder.core import typed_file
from stepladder.storage.tensor_file import write_tensors

PART = "part-"
OF_MODEL, OF_STATE, OF_AVERAGE, OF_OPTIMIZER = "model/", "state/", "average/", "optimizer/state/"
NAMED = re.compile(rf"{OF_MODEL}.+|{OF_STATE}({OF_OPTIMIZER}\d+/[^/]+|{OF_AVERAGE}[^/]+)")


class Damaged(Exception):
    """A snapshot on disk is not what was written. The text names the file and what is wrong with
    it.
    """


class Rows(NamedTuple):
    """Rows from `first` on of a tensor of `shape`. flat: elements instead."""

    values: torch.Tensor
    first: int
    shape: list[int]
    flat: bool = False


def rows_of(tensor: torch.Tensor) -> Rows:
    """What this process holds: of torch's DTensor cut along the first dimension its rows, else all."""
    if not hasattr(tensor, "to_local"):
        return Rows(tensor, 0, list(tensor.shape))
    mesh = tensor.device_mesh  # type: ignore[attr-defined]
    step = -(-tensor.shape[0] // mesh.size())
    values = tensor.detach().to_local()  # type: ignore[attr-defined]
    return Rows(values, min(step * mesh.get_local_rank(), tensor.shape[0]), list(tensor.shape))


def write_part(folder: Path, number: int, slices: dict[str, Rows]) -> dict[str, Any]:
    """Write these rows. Returns what the manifest says of the part. Raises OSError."""
    name = f"{PART}{number:05d}.safetensors"
    held = {name: rows for name, rows in slices.items() if rows.values.numel()}
    written = write_tensors(folder / name, {name: rows.values for name, rows in held.items()})
    rows = {
        name: [one.first, one.first + len(one.values), one.shape, one.flat]
        for name, one in held.items()
    }
    return {"name": name, **written, "rows": rows}


def joined(parts: Iterable[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of what `write_part` has returned: the manifest's `files` and `slices`."""
    files: dict[str, Any] = {}
    slices: dict[str, Any] = {}
    for part in parts:
        files[part["name"]] = {"bytes": part["bytes"], "sha256": part["sha256"]}
        for name, (lo, hi, shape, flat) in part["rows"].items():
            one = slices.setdefault(
                name, {"shape": shape, "pieces": []} | ({"flat": True} if flat else {})
            )
            one["pieces"].append([part["name"], lo, hi])
    return files, slices


def refuse_damage(name: str, size: int, digest: str, expected: dict[str, Any]) -> None:
    if size != expected["bytes"]:
        raise Damaged(f"{name}: {size} bytes instead of {expected['bytes']}")
    if digest != expected["sha256"]:
        raise Damaged(f"{name}: SHA-256 differs")


def verify_part(path: Path, expected: dict[str, Any]) -> None:
    """Read a part once, without keeping it. Raises Damaged, OSError, ValueError."""
    with typed_file.open_to_read(path) as file:
        size, digest = os.fstat(file.fileno()).st_size, ""
        if size == expected["bytes"]:  # else it may be a terabyte
            digest = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
        refuse_damage(path.name, size, digest, expected)


def refuse_senseless(manifest: dict[str, Any]) -> None:
    """Raises Damaged where its `slices` do not give each row once, or lead elsewhere than to its
    parts.
    """
    parts = {file for file in manifest["files"] if file.startswith(PART)}
    try:
        for name, one in manifest.get("slices", {}).items():
            end = 0
            for file, lo, hi in sorted(one["pieces"], key=lambda piece: piece[1]):
                end = hi if file in parts and lo == end < hi else -1
            if end != length_of(one) or not NAMED.fullmatch(name):
                raise ValueError(name)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise Damaged(f"manifest.json: its slices do not go together ({error})") from error


def length_of(one: dict[str, Any]) -> int:
    """Elements of one of the manifest's `slices` where it is flat, else rows."""
    return int(math.prod(one["shape"]) if one.get("flat") else one["shape"][0])


class SliceReader:
    """Reads rows of a snapshot's tensors. slices: the manifest's."""

    def __init__(self, folder: Path, slices: dict[str, Any]) -> None:
        self.folder, self.slices = folder, slices
        self.parts: dict[str, Any] = {}

    def names(self, kind: str) -> list[str]:
        """Of all that are OF_MODEL, or OF_STATE, without that."""
        return [name.removeprefix(kind) for name in self.slices if name.startswith(kind)]

    def shape(self, name: str) -> list[int]:
        return list(self.slices[name]["shape"])

    def rows(self, name: str, lo: int, hi: int) -> torch.Tensor:
        """Rows [lo, hi) of a tensor."""
        if not self.slices[name].get("flat"):
            return self._read(name, lo, hi)
        _, *row = self.shape(name)
        width = math.prod(row)
        return self._read(name, lo * width, hi * width).view(hi - lo, *row)

    def elements(self, name: str, lo: int, hi: int) -> torch.Tensor:
        """Elements [lo, hi) of a tensor, flat."""
        if self.slices[name].get("flat"):
            return self._read(name, lo, hi)
        width = math.prod(self.shape(name)[1:])
        first, last = lo // width, -(-hi // width)
        return self._read(name, first, last).reshape(-1)[lo - first * width : hi - first * width]

    def tensor(self, name: str) -> torch.Tensor:
        """All of it."""
        return self._read(name, 0, length_of(self.slices[name])).view(self.shape(name))

    def whole(self, kind: str) -> dict[str, torch.Tensor]:
        """All of these tensors."""
        return {name: self.tensor(kind + name) for name in self.names(kind)}

    def fill(self, state: Any, left: str | None = None) -> None:
        """Put all that is OF_STATE into the nested state. left: what begins so stays where it is,
        but for single numbers."""
        for name in self.names(OF_STATE):
            whole = OF_STATE + name
            if left is None or not whole.startswith(left) or not self.shape(whole):
                put(state, name, self.tensor(whole))

    def _read(self, name: str, lo: int, hi: int) -> torch.Tensor:
        found: list[torch.Tensor] = [
            self._part(file).get_slice(name)[max(lo, first) - first : min(hi, last) - first]
            for file, first, last in sorted(self.slices[name]["pieces"], key=lambda piece: piece[1])
            if first < hi and lo < last
        ]
        if not found:
            file, _, _ = self.slices[name]["pieces"][0]
            found = [self._part(file).get_slice(name)[:0]]
        return found[0] if len(found) == 1 else torch.cat(found)

    def _part(self, file: str) -> Any:
        if file not in self.parts:
            self.parts[file] = safe_open(self.folder / file, framework="pt")
        return self.parts[file]


def differences(
    model: torch.nn.Module,
    whole: dict[str, torch.Tensor],
    reader: SliceReader,
    aliases: dict[str, str],
) -> list[str]:
    """Return each name and shape in which a model differs from the whole tensors and slices of a
    snapshot.
    """
    targets = model.state_dict()
    stored_names = {*whole, *reader.names(OF_MODEL), *aliases}
    found = []
    for name in [*targets, *sorted(stored_names - targets.keys())]:
        if name not in targets:
            found.append(
                f"{name} {stored_shape(name, whole, reader, aliases)} is in the snapshot only"
            )
            continue
        shape = rows_of(targets[name]).shape
        if name not in stored_names:
            found.append(f"{name} {shape} is in the model only")
        elif shape != (stored_as := stored_shape(name, whole, reader, aliases)):
            found.append(f"{name} is {shape} in the model and {stored_as} in the snapshot")
    return found


def stored_shape(
    name: str, whole: dict[str, torch.Tensor], reader: SliceReader, aliases: dict[str, str]
) -> list[int]:
    name = aliases.get(name, name)
    return list(whole[name].shape) if name in whole else reader.shape(OF_MODEL + name)


@torch.no_grad()
def restore_rows(
    model: torch.nn.Module,
    whole: dict[str, torch.Tensor],
    reader: SliceReader,
    aliases: dict[str, str],
) -> None:
    """Copy what each tensor of a model holds here out of whole tensors, or of slices.

    Names and shapes must be equal: `differences` finds none.
    """
    for name, target in model.state_dict().items():
        name = aliases.get(name, name)
        mine = rows_of(target)
        if name not in whole:
            mine.values.copy_(
                reader.rows(OF_MODEL + name, mine.first, mine.first + len(mine.values))
            )
        elif mine.shape:
            mine.values.copy_(whole[name][mine.first : mine.first + len(mine.values)])
        else:
            mine.values.copy_(whole[name])


def put(state: Any, name: str, tensor: torch.Tensor) -> None:
    """Into a nested state, where the keys of `name` lead; those in digits are numbers."""
    *way, last = (int(key) if key.isdigit() else key for key in name.split("/"))
    for key in way:
        state = state.setdefault(key, {})
    state[last] = tensor
