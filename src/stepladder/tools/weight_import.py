"""`stepladder import`: make a run directory whose run starts from weights of another program.

No code of the other program runs: safetensors hold none, and `dcp` calls nothing that a checkpoint
of torch.distributed.checkpoint names.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor

from stepladder.core import durable, typed_file
from stepladder.core.errors import InputError, to_one_line
from stepladder.core.settings import TrainRequest
from stepladder.core.world import World
from stepladder.storage.run_files import SNAPSHOTS_FOLDER
from stepladder.storage.snapshot import MODEL_FILE, write_snapshot_files
from stepladder.storage.snapshot_store import Snapshots
from stepladder.storage.staging import split_tied_tensors
from stepladder.tools import dcp
from stepladder.tools.weight_export import SAFETENSORS_INDEX, open_safetensors, validate_new_path
from stepladder.train.job_runner import load_job

READ_ERRORS = (OSError, SafetensorError, ValueError, KeyError)
MAX_SAFETENSORS_INDEX_BYTES = 2**30
MAX_NAMES_SHOWN = 4
CHECKPOINT_MODEL_PREFIX = "model."  # before the model's names if a checkpoint holds more than it
FORMATS_HINT = (
    "a folder that stepladder export, Hugging Face's save_pretrained or"
    f" torch.distributed.checkpoint has written; a file of safetensors is called {MODEL_FILE}"
)


class _WeightFolder(NamedTuple):
    """The weights in a folder.

    Args:
        shapes: The shape of each tensor.
        read: Copies the tensor of a name into a target of its shape.
    """

    shapes: dict[str, list[int]]
    read: Callable[[str, Tensor], None]


def import_weights(folder: Path, request: TrainRequest) -> str:
    """Build the job, copy the weights of the folder into its model, and make its run directory.

    Returns a sentence for the user. Raises InputError if the folder holds no weights, names or
    shapes differ, or the run directory exists already or cannot be written.
    """
    run_dir = request.settings.run_dir
    validate_new_path(run_dir, "another --run-dir")
    weights = _open_weights(folder)
    build, recipe = load_job(request, World())
    model = build().model
    targets = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    stored_names = _match_names(folder, targets, weights.shapes)
    try:
        for name, target in targets.items():
            if name in stored_names:
                weights.read(stored_names[name], target)
    except (*READ_ERRORS, RuntimeError) as error:
        raise InputError(f"{folder} is damaged: {to_one_line(error)}", "copy it anew") from error
    with durable.name_write_errors(
        run_dir, "another --run-dir, or free space and the right to write there"
    ):
        durable.make_folder(run_dir.absolute().parent)
        with durable.replace_folder(run_dir) as temporary:
            _write_first_snapshot(temporary, model)
    return (
        f"written: {run_dir}: {len(stored_names)} tensors,"
        f" which a run of {recipe.name} there begins with"
    )


def _write_first_snapshot(run_dir: Path, model: torch.nn.Module) -> None:
    """Write a snapshot of step 0 that holds the model and no other state."""
    tensors, aliases = split_tied_tensors(model.state_dict())
    manifest = {"step": 0, "aliases": aliases, "ledger": ""}
    with Snapshots(run_dir / SNAPSHOTS_FOLDER).create(0) as temporary:
        write_snapshot_files(temporary, {"model": tensors, "state": {}}, manifest, [])


def _open_weights(folder: Path) -> _WeightFolder:
    """Open a folder of any known format. Raises InputError if it has none, or is damaged."""
    if folder.is_file():
        hint = f"its folder: stepladder import {folder.parent}"
        if folder.name != MODEL_FILE and folder.suffix == Path(MODEL_FILE).suffix:
            copy = f"mkdir weights && cp {folder} weights/{MODEL_FILE}"
            hint = f"{copy} && stepladder import weights JOB --run-dir PATH"
        raise InputError(f"{folder} is a file", hint)
    try:
        if (folder / SAFETENSORS_INDEX).exists():
            return _open_safetensors_folder(folder, _read_safetensors_index(folder))
        if (folder / MODEL_FILE).exists():
            names = open_safetensors(folder / MODEL_FILE).keys()
            return _open_safetensors_folder(folder, dict.fromkeys(names, MODEL_FILE))
        if (folder / dcp.METADATA).exists():
            checkpoint = dcp.Checkpoint(folder)
            return _WeightFolder(checkpoint.shapes, checkpoint.read)
    except READ_ERRORS as error:
        raise InputError(f"{folder} cannot be read: {to_one_line(error)}", FORMATS_HINT) from error
    raise InputError(
        f"{folder} holds neither {MODEL_FILE} nor {SAFETENSORS_INDEX} nor {dcp.METADATA}",
        FORMATS_HINT,
    )


def _read_safetensors_index(folder: Path) -> dict[str, str]:
    """Return the file of each tensor."""
    text = typed_file.read_file(folder / SAFETENSORS_INDEX, MAX_SAFETENSORS_INDEX_BYTES)
    index: dict[str, Any] = typed_file.parse_json(text, dict)
    weight_map: dict[str, str] = typed_file.convert(
        index["weight_map"], dict[str, str], "weight_map"
    )
    return weight_map


def _open_safetensors_folder(folder: Path, file_of_tensor: dict[str, str]) -> _WeightFolder:
    for file in file_of_tensor.values():
        if Path(file).name != file:
            raise ValueError(f"{SAFETENSORS_INDEX} leads out of the folder, to {file}")
    names = sorted(set(file_of_tensor.values()))
    files = {name: open_safetensors(folder / name) for name in names}
    shapes = {
        name: files[file].get_slice(name).get_shape() for name, file in file_of_tensor.items()
    }

    def read(name: str, target: Tensor) -> None:
        target.copy_(files[file_of_tensor[name]].get_tensor(name))

    return _WeightFolder(shapes, read)


def _match_names(
    folder: Path, targets: dict[str, Tensor], shapes: dict[str, list[int]]
) -> dict[str, str]:
    """Return the folder's name of each of the model's tensors; of tied tensors one is enough.

    Raises InputError for the first tensor that only one side has, or whose shapes differ.
    """
    hint = "the job, with the flags, whose model these weights are of"
    stored_names = _strip_prefix(targets, shapes)
    stored_tensors = {
        targets[name].data_ptr()
        for name in stored_names.keys() & targets.keys()
        if targets[name].numel()
    }
    for name, target in targets.items():
        if name not in stored_names and target.data_ptr() not in stored_tensors:
            others = [stored for key, stored in stored_names.items() if key not in targets]
            problem = f"{folder} has no {name}, which the model has"
            if others:
                problem += f", but {', '.join(others[:MAX_NAMES_SHOWN])}, which it has not"
                hint += "; or model.load_state_dict() in build, with the names changed"
            raise InputError(problem, hint)
    for name, stored_name in stored_names.items():
        if name not in targets:
            raise InputError(f"{folder} has {stored_name}, which the model has not", hint)
        stored_shape = shapes[stored_name]
        shape = list(targets[name].shape)
        if stored_shape != shape:
            raise InputError(
                f"{stored_name} has shape {stored_shape} in {folder}, {shape} in the model", hint
            )
    return stored_names


def _strip_prefix(targets: dict[str, Tensor], shapes: dict[str, list[int]]) -> dict[str, str]:
    """Return the folder's names by the model's names.

    If no name is one of the model's, a prefix of all names is left out, such as "module.", which
    DistributedDataParallel adds. After the prefix "model." only the names with it count: the
    checkpoint also holds an optimizer, say.
    """
    if targets.keys() & shapes.keys():
        return {name: name for name in shapes}
    first = next(iter(shapes), "")
    prefixes = accumulate(f"{part}." for part in first.split(".")[:-1])
    for prefix in (CHECKPOINT_MODEL_PREFIX, *prefixes):
        names = {name.removeprefix(prefix): name for name in shapes if name.startswith(prefix)}
        is_complete = prefix == CHECKPOINT_MODEL_PREFIX or len(names) == len(shapes)
        if is_complete and targets.keys() & names.keys():
            return names
    return {name: name for name in shapes}
