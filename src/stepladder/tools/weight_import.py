"""`stepladder import`: weights that another program has written become the start of a run.

Nothing that comes from outside is unpickled: safetensors hold no code, and `dcp` reads the
checkpoints of torch.distributed.checkpoint by rules of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError

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

UNREADABLE = (OSError, SafetensorError, ValueError, KeyError)
MOST_BYTES = 2**30  # of an index
PREFIX = "model."  # of names where a checkpoint holds more than the model
HINT = "a folder that stepladder export, Hugging Face's save_pretrained or torch.distributed.checkpoint has written"


class Foreign(NamedTuple):
    """What a folder holds. shapes: of its tensors.  fill: copies one into a tensor of its shape."""

    shapes: dict[str, list[int]]
    fill: Callable[[str, torch.Tensor], None]


def import_weights(folder: Path, request: TrainRequest) -> str:
    """Build the job, copy the weights of `folder` into its model one after the other, and begin a
    run with them.

    Returns what to say of it. Raises InputError where the folder holds none, names or shapes
    differ, or the run directory is there already or cannot be written."""
    run_dir = request.settings.run_dir
    validate_new_path(run_dir, "another --run-dir")
    foreign = found_in(folder)
    build, recipe = load_job(request, World())
    model = build().model
    targets = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    names = matched(folder, targets, foreign.shapes)
    try:
        for name, target in targets.items():
            if name in names:
                foreign.fill(names[name], target)
    except (*UNREADABLE, RuntimeError) as error:
        raise InputError(f"{folder} is damaged: {to_one_line(error)}", "copy it anew") from error
    with durable.name_write_errors(run_dir, "free space there, or choose another --run-dir"):
        durable.make_folder(run_dir.absolute().parent)
        with durable.replace_folder(run_dir) as aside:
            begin(aside, model)
    return (
        f"written: {run_dir}: {len(names)} tensors, which a run of {recipe.name} there begins with"
    )


def begin(run_dir: Path, model: torch.nn.Module) -> None:
    """A run directory whose first snapshot, before any step, has these weights and nothing else."""
    tensors, aliases = split_tied_tensors(model.state_dict())
    about = {"step": 0, "aliases": aliases, "ledger": ""}
    with Snapshots(run_dir / SNAPSHOTS_FOLDER).create(0) as aside:
        write_snapshot_files(aside, {"model": tensors, "state": {}}, about, [])


def found_in(folder: Path) -> Foreign:
    """Raises InputError where it is none of the layouts, or damaged."""
    try:
        if (folder / SAFETENSORS_INDEX).exists():
            places = typed_file.parse_json(
                typed_file.read_file(folder / SAFETENSORS_INDEX, MOST_BYTES), dict
            )["weight_map"]
            return of_safetensors(folder, typed_file.convert(places, dict[str, str], "weight_map"))
        if (folder / MODEL_FILE).exists():
            return of_safetensors(
                folder, dict.fromkeys(open_safetensors(folder / MODEL_FILE).keys(), MODEL_FILE)
            )
        if (folder / dcp.METADATA).exists():
            checkpoint = dcp.Checkpoint(folder)
            return Foreign(checkpoint.shapes, checkpoint.read)
    except UNREADABLE as error:
        raise InputError(f"{folder} cannot be read: {to_one_line(error)}", HINT) from error
    raise InputError(
        f"{folder} holds neither {MODEL_FILE} nor {SAFETENSORS_INDEX} nor {dcp.METADATA}", HINT
    )


def of_safetensors(folder: Path, places: dict[str, str]) -> Foreign:
    """places: the file of each tensor."""
    for file in places.values():
        if Path(file).name != file:
            raise ValueError(f"{SAFETENSORS_INDEX} leads out of the folder, to {file}")
    files = {file: open_safetensors(folder / file) for file in sorted({*places.values()})}

    def fill(name: str, target: torch.Tensor) -> None:
        target.copy_(files[places[name]].get_tensor(name))

    return Foreign(
        {name: files[file].get_slice(name).get_shape() for name, file in places.items()}, fill
    )


def matched(
    folder: Path, targets: dict[str, torch.Tensor], shapes: dict[str, list[int]]
) -> dict[str, str]:
    """The folder's name of each of the model's tensors; of tied ones one is enough.

    Raises InputError for the first that is on one side only, or has another shape.
    """
    within = {name.removeprefix(PREFIX): name for name in shapes if name.startswith(PREFIX)}
    prefixed = not targets.keys() & shapes.keys() and targets.keys() & within.keys()
    names = within if prefixed else {name: name for name in shapes}
    hint = "the job, with the flags, whose model these weights are of"
    there = {
        targets[name].data_ptr() for name in names.keys() & targets.keys() if targets[name].numel()
    }
    for name, target in targets.items():
        if name not in names and target.data_ptr() not in there:
            raise InputError(f"{folder} has no {name}, which the model has", hint)
    for name in names:
        if name not in targets:
            raise InputError(f"{folder} has {names[name]}, which the model has not", hint)
        if shapes[names[name]] != list(targets[name].shape):
            shape = list(targets[name].shape)
            raise InputError(
                f"{names[name]} has shape {shapes[names[name]]} in {folder}, {shape} in the model",
                hint,
            )
    return names
