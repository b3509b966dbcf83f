"""Read checkpoints of torch.distributed.checkpoint (DCP) without running code that is in them.

`.metadata` is a pickle that describes the tensors; `dcp_pickle` reads it, and calls nothing that
it names. The tensors are read by `torch.load(weights_only=True)`, which has its own allow-list.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.utils import _create_file_view

from stepladder.core import typed_file
from stepladder.core.errors import get_reason
from stepladder.tools.dcp_pickle import (
    CHUNK_CLASS,
    INDEX_CLASS,
    METADATA_CLASS,
    STORAGE_CLASS,
    TENSOR_CLASS,
    PickledObject,
    is_shape,
    read_description,
)

Kind = TypeVar("Kind")
METADATA = ".metadata"
MAX_METADATA_BYTES = 2**30

ChunkKey = tuple[str, tuple[int, ...]]  # the tensor's name, and the chunk's offsets in it


class _StoredChunk(NamedTuple):
    """The bytes of a file that `torch.save` wrote for one chunk of a tensor."""

    file: str
    start: int
    length: int


class Checkpoint:
    """A folder that torch.distributed.checkpoint has written.

    Args:
        folder: The folder.

    Raises:
        OSError: A file cannot be read.
        ValueError: The folder holds no checkpoint of tensors.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        pickled = typed_file.read_file(folder / METADATA, MAX_METADATA_BYTES)
        metadata = _get_fields(read_description(pickled), METADATA_CLASS)
        records = _check_type(metadata.get("state_dict_metadata"), dict, "state_dict_metadata")
        # The metadata of each tensor. Other values of the checkpoint are pickles, which are not
        # read.
        self.tensors = {
            _check_type(name, str, "a tensor's name"): _get_fields(record, TENSOR_CLASS)
            for name, record in records.items()
            if type(record) is not PickledObject or record.kind == TENSOR_CLASS
        }
        # The shape of each tensor.
        self.shapes = {
            name: list(get_shape(fields, "size")) for name, fields in self.tensors.items()
        }
        storage = _check_type(metadata.get("storage_data"), dict, "storage_data")
        # The stored bytes of each chunk, by the tensor's name and the chunk's offsets.
        self.chunks = self._read_storage(storage)

    def _read_storage(self, storage: dict[Any, Any]) -> dict[ChunkKey, _StoredChunk]:
        chunks: dict[ChunkKey, _StoredChunk] = {}
        checked_files: set[str] = set()
        for index, info in storage.items():
            fields = _get_fields(index, INDEX_CLASS)
            if fields.get("offset") is None:  # it describes a value that is no tensor
                continue
            name = _check_type(fields.get("fqn"), str, "a tensor's name")
            offsets = get_shape(fields, "offset")
            chunks[name, offsets] = self._make_chunk(
                _get_fields(info, STORAGE_CLASS), checked_files
            )
        return chunks

    def _make_chunk(self, fields: Mapping[str, Any], checked_files: set[str]) -> _StoredChunk:
        """Raise ValueError if the chunk's file is outside of the folder."""
        file = _check_type(fields.get("relative_path"), str, "relative_path")
        if file not in checked_files:
            self._check_file(file)
            checked_files.add(file)
        if fields.get("transform_descriptors"):
            raise ValueError(
                f"{file} is compressed or encrypted by an extension of torch,"
                " which is not read here"
            )
        start = _check_type(fields.get("offset"), int, "offset")
        length = _check_type(fields.get("length"), int, "length")
        if start < 0 or length < 0:
            raise ValueError(f"{METADATA} gives {file} a section before its begin")
        return _StoredChunk(file, start, length)

    def _check_file(self, file: str) -> None:
        """Raise ValueError if the name has a folder, or is a link that leads out of the folder."""
        has_folder = Path(file).name != file
        if has_folder or (self.folder / file).resolve().parent != self.folder.resolve():
            raise ValueError(f"{METADATA} leads out of the folder, to {file}")

    def read(self, name: str, target: Tensor) -> None:
        """Copy a tensor into a target of the same shape, chunk by chunk.

        Raises OSError or ValueError if a chunk is missing, damaged, or is no tensor.
        """
        records = _check_type(self.tensors[name].get("chunks"), list, "chunks")
        chunks = [_get_fields(record, CHUNK_CLASS) for record in records]
        sizes_by_offsets = {
            get_shape(chunk, "offsets"): get_shape(chunk, "sizes") for chunk in chunks
        }
        if sum(map(math.prod, sizes_by_offsets.values())) != target.numel():
            raise ValueError(f"the pieces of {name} do not make up the whole tensor")
        for offsets, sizes in sizes_by_offsets.items():
            self._read_chunk(name, offsets, sizes, target)

    def _read_chunk(
        self, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...], target: Tensor
    ) -> None:
        if (name, offsets) not in self.chunks or len(offsets) != target.ndim:
            raise ValueError(
                f"{METADATA} does not say where the piece of {name} at {list(offsets)} is stored"
            )
        tensor = _load_chunk(self.folder, self.chunks[name, offsets])
        bounds = zip(offsets, sizes, strict=True)
        slices = [slice(start, start + size) for start, size in bounds]
        section = target[tuple(slices)]
        if tensor.shape != section.shape or section.shape != sizes:
            raise ValueError(
                f"the piece of {name} at {list(offsets)} has another shape than {METADATA} says"
            )
        section.copy_(tensor)


def _get_fields(value: Any, kind: str) -> dict[str, Any]:
    """Return the fields of an object of the class `kind`. Raises ValueError for anything else."""
    if type(value) is not PickledObject or value.kind != kind:
        raise ValueError(f"{METADATA} describes no checkpoint")
    return value.fields or {}


def _check_type(value: Any, kind: type[Kind], label: str) -> Kind:
    """Return the value if its type is exactly `kind`. Raises ValueError otherwise."""
    if not isinstance(value, kind) or type(value) is not kind:
        raise ValueError(f"{METADATA} describes no checkpoint: {label} is {type(value).__name__}")
    return value


def get_shape(fields: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """Return the field if it is a shape or an offset. Raises ValueError otherwise."""
    value = fields.get(name)
    if not is_shape(value):
        raise ValueError(f"{METADATA} describes no checkpoint: {name} is no shape")
    return _check_type(value, tuple, name)


def _load_chunk(folder: Path, chunk: _StoredChunk) -> Tensor:
    """Return the tensor of a chunk. Raises OSError, or ValueError if it holds no tensor."""
    try:
        with typed_file.open_to_read(folder / chunk.file) as file:
            if chunk.start + chunk.length > os.fstat(file.fileno()).st_size:
                raise ValueError("it is cut")
            section: Any = _create_file_view(file, chunk.start, chunk.length)  # type: ignore[arg-type]
            tensor = torch.load(section, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # the bytes are not trusted: torch raises errors of any type
        raise ValueError(f"{chunk.file}: {get_reason(error)}") from error
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
        raise ValueError(f"{chunk.file} holds what is no tensor")
    return tensor
