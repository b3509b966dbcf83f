"""Pickles by hand, instruction by instruction: what `pickle.dumps` writes for no object."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

OF_METADATA = "torch.distributed.checkpoint.metadata"
PROTOCOL = b"\x80\x02"
MARK = b"("
STOP = b"."
POP = b"0"
REDUCE = b"R"
NEWOBJ = b"\x81"
NEWOBJ_EX = b"\x92"
BUILD = b"b"
OBJ = b"o"
EMPTY_TUPLE = b")"
EMPTY_DICT = b"}"
EMPTY_LIST = b"]"
NONE = b"N"
APPEND = b"a"
APPENDS = b"e"
SETITEM = b"s"
SETITEMS = b"u"
FROZENSET = b"\x91"
BINPERSID = b"Q"


def name(module: str, attribute: str) -> bytes:
    """GLOBAL: pushes what the module has by that name."""
    return f"c{module}\n{attribute}\n".encode()


def value(python: Any) -> bytes:
    """Pushes a value that pickle can write."""
    return pickle.dumps(python, protocol=2)[len(PROTOCOL) : -len(STOP)]


def dictionary(entries: Mapping[str, bytes]) -> bytes:
    """Pushes a dictionary whose values are made by instructions."""
    return (
        EMPTY_DICT + MARK + b"".join(value(key) + made for key, made in entries.items()) + SETITEMS
    )


def made(kind: str, fields: bytes) -> bytes:
    """Pushes an object of a class of the metadata, with the fields in the dictionary that `fields`
    pushes.
    """
    return name(OF_METADATA, kind) + EMPTY_TUPLE + NEWOBJ + fields + BUILD


def metadata(state_dict: bytes, storage: bytes, planner: bytes = NONE) -> bytes:
    """A whole `.metadata`, of what pushes each of its parts."""
    fields = {
        "state_dict_metadata": state_dict,
        "planner_data": planner,
        "storage_data": storage,
        "storage_meta": NONE,
        "version": NONE,
    }
    return PROTOCOL + made("Metadata", dictionary(fields)) + STOP


def descriptions(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorStorageMetadata]:
    """Of tensors that are each stored in one piece."""
    return {
        key: TensorStorageMetadata(
            TensorProperties(dtype=tensor.dtype),
            tensor.size(),
            [ChunkStorageMetadata(torch.Size([0] * tensor.ndim), tensor.size())],
        )
        for key, tensor in tensors.items()
    }


def storage_of(
    folder: Path, tensors: Mapping[str, torch.Tensor], **fields: Any
) -> dict[MetadataIndex, _StorageInfo]:
    """Each tensor in a file of its own, named as the tensor; fields: what all of them have instead."""
    results = {}
    for key, tensor in tensors.items():
        path = folder / f"{key}.distcp"
        known = {"relative_path": path.name, "offset": 0, "length": path.stat().st_size, **fields}
        results[MetadataIndex(key, [0] * tensor.ndim)] = _StorageInfo(**known)
    return results
