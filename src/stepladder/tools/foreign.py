"""`stepladder import`: weights that another program has written become the start of a run.

Nothing that comes from outside is unpickled but `.metadata` of torch.distributed.checkpoint, by a reader that
knows the few classes which describe tensors, and refuses all others.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from enum import Enum, EnumMeta
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from stepladder.core import durable, stored
from stepladder.core.errors import InputError, one_line
from stepladder.core.settings import TrainRequest
from stepladder.core.world import World
from stepladder.storage.rundir import SNAPSHOTS
from stepladder.storage.snapshot import MODEL, Snapshots, write_files
from stepladder.storage.staging import without_ties
from stepladder.tools.export import INDEX, opened, refuse_existing, torchs_errors
from stepladder.train.run import configured

UNREADABLE = (
    OSError, SafetensorError, pickle.UnpicklingError, ValueError, KeyError, TypeError, AttributeError, EOFError,
    IndexError,
)  # fmt: skip
METADATA = ".metadata"
MOST_BYTES = 2**30  # of an index or .metadata
PREFIX = "model."  # of names where a checkpoint holds more than the model
HINT = (
    "a folder that stepladder export, Hugging Face's save_pretrained or torch.distributed.checkpoint has written"
)
OF_CHECKPOINT = "torch.distributed.checkpoint."
KNOWN = {
    (OF_CHECKPOINT + "metadata", name)
    for name in (
        "Metadata", "TensorStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING", "ChunkStorageMetadata",
        "BytesStorageMetadata", "MetadataIndex", "StorageMeta",
    )
} | {
    (OF_CHECKPOINT + "filesystem", "_StorageInfo"), ("torch.serialization", "_get_layout"), ("torch", "Size"),
    ("pathlib", "PosixPath"), ("collections", "OrderedDict"),
}  # fmt: skip


class Foreign(NamedTuple):
    """What a folder holds. shapes: of its tensors.  fill: copies one into a tensor of its shape."""

    shapes: dict[str, list[int]]
    fill: Callable[[str, torch.Tensor], None]


class TensorsOnly(pickle.Unpickler):
    """Takes what describes tensors. Raises UnpicklingError for all other classes and functions."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in KNOWN:
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if (module, name) == ("builtins", "getattr"):
            return member_of
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which describes no tensor")


def member_of(kind: Any, name: Any) -> Enum:
    """In place of `getattr`, by which the first Pythons 3.11 pickle a member of an enumeration."""
    if not (isinstance(kind, EnumMeta) and isinstance(name, str)):
        raise pickle.UnpicklingError("it asks for builtins.getattr, which describes no tensor")
    return kind.__members__[name]


class TensorsOnlyReader(FileSystemReader):
    """Of a folder whose metadata has been read."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self.metadata = metadata

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self.metadata


def import_weights(folder: Path, request: TrainRequest) -> str:
    """Build the job, copy the weights of `folder` into its model one after the other, and begin a run with them.

    Returns what to say of it. Raises InputError where the folder holds none, names or shapes differ, or the run
    directory is there already or cannot be written.
    """
    run_dir = request.settings.run_dir
    refuse_existing(run_dir, "another --run-dir")
    foreign = found_in(folder)
    build, recipe = configured(request, World())
    model = build().model
    targets = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    names = matched(folder, targets, foreign.shapes)
    try:
        for name, target in targets.items():
            if name in names:
                foreign.fill(names[name], target)
    except (
        OSError,
        SafetensorError,
        RuntimeError,
        ValueError,
        KeyError,
        EOFError,
        pickle.UnpicklingError,
    ) as error:
        raise InputError(f"{folder} is damaged: {one_line(error)}", "copy it anew") from error
    with durable.writing(run_dir, "free space there, or choose another --run-dir"):
        durable.make_folder(run_dir.absolute().parent)
        with durable.folder(run_dir) as aside:
            begin(aside, model)
    return f"written: {run_dir}: {len(names)} tensors, which a run of {recipe.name} there begins with"


def begin(run_dir: Path, model: torch.nn.Module) -> None:
    """A run directory whose first snapshot, before any step, has these weights and nothing else."""
    tensors, aliases = without_ties(model.state_dict())
    about = {"step": 0, "aliases": aliases, "ledger": ""}
    with Snapshots(run_dir / SNAPSHOTS).place(0) as aside:
        write_files(aside, {"model": tensors, "state": {}}, about, [])


def found_in(folder: Path) -> Foreign:
    """Raises InputError where it is none of the layouts, or damaged."""
    try:
        if (folder / INDEX).exists():
            places = stored.loads(stored.read(folder / INDEX, MOST_BYTES), dict)["weight_map"]
            return of_safetensors(folder, stored.fit(places, dict[str, str], "weight_map"))
        if (folder / MODEL).exists():
            return of_safetensors(folder, dict.fromkeys(opened(folder / MODEL).keys(), MODEL))
        if (folder / METADATA).exists():
            with stored.opened(folder / METADATA) as file:
                return of_dcp(folder, TensorsOnly(file).load())
    except UNREADABLE as error:
        raise InputError(f"{folder} cannot be read: {one_line(error)}", HINT) from error
    raise InputError(f"{folder} holds neither {MODEL} nor {INDEX} nor {METADATA}", HINT)


def of_safetensors(folder: Path, places: dict[str, str]) -> Foreign:
    """places: the file of each tensor."""
    for file in places.values():
        if Path(file).name != file:
            raise ValueError(f"{INDEX} leads out of the folder, to {file}")
    files = {file: opened(folder / file) for file in sorted({*places.values()})}

    def fill(name: str, target: torch.Tensor) -> None:
        target.copy_(files[places[name]].get_tensor(name))

    return Foreign({name: files[file].get_slice(name).get_shape() for name, file in places.items()}, fill)


def of_dcp(folder: Path, metadata: Any) -> Foreign:
    if not isinstance(metadata, Metadata):
        raise ValueError(f"{METADATA} describes no checkpoint")
    for place in metadata.storage_data.values():
        if Path(place.relative_path).name != place.relative_path:
            raise ValueError(f"{METADATA} leads out of the folder, to {place.relative_path}")
    tensors = {
        name: list(one.size)
        for name, one in metadata.state_dict_metadata.items()
        if isinstance(one, TensorStorageMetadata)  # all else is a pickle
    }

    def fill(name: str, target: torch.Tensor) -> None:
        with torchs_errors(), warnings.catch_warnings(action="ignore", category=UserWarning):
            load({name: target}, storage_reader=TensorsOnlyReader(folder, metadata), no_dist=True)

    return Foreign(tensors, fill)


def matched(folder: Path, targets: dict[str, torch.Tensor], shapes: dict[str, list[int]]) -> dict[str, str]:
    """The folder's name of each of the model's tensors; of tied ones one is enough.

    Raises InputError for the first that is on one side only, or has another shape.
    """
    within = {name.removeprefix(PREFIX): name for name in shapes if name.startswith(PREFIX)}
    prefixed = not targets.keys() & shapes.keys() and targets.keys() & within.keys()
    names = within if prefixed else {name: name for name in shapes}
    hint = "the job, with the flags, whose model these weights are of"
    there = {targets[name].data_ptr() for name in names.keys() & targets.keys() if targets[name].numel()}
    for name, target in targets.items():
        if name not in names and target.data_ptr() not in there:
            raise InputError(f"{folder} has no {name}, which the model has", hint)
    for name in names:
        if name not in targets:
            raise InputError(f"{folder} has {names[name]}, which the model has not", hint)
        if shapes[names[name]] != list(targets[name].shape):
            shape = list(targets[name].shape)
            raise InputError(
                f"{names[name]} has shape {shapes[names[name]]} in {folder}, {shape} in the model", hint
            )
    return names
