"""`stepladder export`: a run's weights as other programs read them, one tensor at a time.

safetensors   Hugging Face's layout: model.safetensors; of a large model several files of at most FILE_BYTES, and
              model.safetensors.index.json, which says where each tensor is
dcp           torch.distributed.checkpoint: .metadata, and a file for each tensor
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from stepladder.core import durable, typed_file
from stepladder.core.errors import InputError
from stepladder.storage.safetensors_file import write_tensors
from stepladder.storage.snapshot import MODEL_FILE, Snapshot, read_newest_snapshot
from stepladder.storage.snapshot_slices import MODEL_PREFIX

MAX_WEIGHTS_FILE_BYTES = 5 * 10**9
SAFETENSORS_INDEX = "model.safetensors.index.json"


def open_safetensors(path: Path) -> Any:
    """Return a safetensors file, of which each tensor is read when it is asked for.

    Raises ValueError where the path leads to a FIFO, which would wait for a writer, or to what is
    no file else."""
    try:
        typed_file.open_to_read(path).close()
    except ValueError as error:
        raise ValueError(f"{path.name} is no regular file") from error
    return safe_open(path, framework="pt")


class StoredWeights:
    """A snapshot's weights on its disk. forms: their shapes and types, without values.  aliases: of
    tied ones, the name that each is stored by."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.rows = snapshot.reader
        self.whole = open_safetensors(Path(snapshot.folder) / MODEL_FILE)
        self.aliases: dict[str, str] = snapshot.manifest["aliases"]
        self.forms: dict[str, torch.Tensor] = {}
        for name in self.whole.keys():  # noqa: SIM118 - it is no dict
            part = self.whole.get_slice(name)
            shape = part.get_shape()
            like = part[:0] if shape else self.whole.get_tensor(name)  # a single number has no rows
            self.forms[name] = torch.empty(shape, dtype=like.dtype, device="meta")
        for name in self.rows.names(MODEL_PREFIX):
            none = self.rows.read_rows(MODEL_PREFIX + name, 0, 0)
            self.forms[name] = torch.empty(
                self.rows.shape(MODEL_PREFIX + name), dtype=none.dtype, device="meta"
            )

    def read(self, name: str) -> torch.Tensor:
        """The values of one, also by a name that is tied to it."""
        name = self.aliases.get(name, name)
        if MODEL_PREFIX + name in self.rows.slices:
            return self.rows.read_tensor(MODEL_PREFIX + name)
        found: torch.Tensor = self.whole.get_tensor(name)
        return found


def export(run_dir: Path, to: str, target: Path) -> str:
    """Write the weights of a run's newest good snapshot into a new folder. Returns what to say of
    it.

    run_dir: or one of its snapshots.  to: "safetensors" or "dcp".
    Raises InputError where there is no snapshot, `target` is there already, or cannot be written.
    """
    validate_new_path(target, "export RUN_DIR --to FORMAT DIR, with a DIR that is not there yet")
    snapshot = read_newest_snapshot(run_dir, with_model=False)
    weights = StoredWeights(snapshot)
    with durable.name_write_errors(target, "free space there, or choose another DIR"):
        durable.make_folder(target.absolute().parent)
        with durable.replace_folder(target) as aside:
            (write_safetensors if to == "safetensors" else write_dcp)(aside, weights)
    size = sum(form.nbytes for form in weights.forms.values())
    return (
        f"written: {target}: {len(weights.forms)} tensors, {size / 1e6:,.1f} MB, of {snapshot.name}"
    )


def validate_new_path(target: Path, hint: str) -> None:
    """Raises InputError where something is at the path: nothing is written over."""
    if target.exists() or target.is_symlink():
        raise InputError(f"{target} is there already", hint)


def write_safetensors(folder: Path, weights: StoredWeights) -> None:
    """Tied weights once, as the library asks."""
    files: list[dict[str, torch.Tensor]] = [{}]
    for name, form in weights.forms.items():
        if (
            files[-1]
            and sum(one.nbytes for one in files[-1].values()) + form.nbytes > MAX_WEIGHTS_FILE_BYTES
        ):
            files.append({})
        files[-1][name] = form
    stem, _, suffix = MODEL_FILE.partition(".")
    names = [
        f"{stem}-{number:05d}-of-{len(files):05d}.{suffix}" for number in range(1, len(files) + 1)
    ]
    places: dict[str, str] = {}
    for file, forms in zip([MODEL_FILE] if len(files) == 1 else names, files, strict=True):
        write_tensors(folder / file, forms, weights.read, {"format": "pt"})
        places |= dict.fromkeys(forms, file)
    if len(files) > 1:
        total = sum(form.nbytes for form in weights.forms.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        (folder / SAFETENSORS_INDEX).write_text(
            json.dumps(index, indent=2) + "\n", encoding="utf-8"
        )


def write_dcp(folder: Path, weights: StoredWeights) -> None:
    """By all names, as a model's state_dict has them."""
    forms = weights.forms | {alias: weights.forms[name] for alias, name in weights.aliases.items()}
    writer = NamelessWriter(
        folder, single_file_per_rank=False
    )  # one file for all would keep all in memory
    with (
        torchs_errors(),
        warnings.catch_warnings(action="ignore", category=UserWarning),
    ):  # there is one process
        save(forms, storage_writer=writer, planner=OneByOne(weights), no_dist=True)


class OneByOne(DefaultSavePlanner):
    """Reads a tensor when it is to be written."""

    def __init__(self, weights: StoredWeights) -> None:
        super().__init__()
        self.weights = weights

    def lookup_object(self, index: Any) -> torch.Tensor:
        return self.weights.read(index.fqn)


class NamelessWriter(FileSystemWriter):
    """Does not say in `.metadata` where it has written."""

    def storage_meta(self) -> None:
        return None


@contextmanager
def torchs_errors() -> Iterator[None]:
    """The first error that torch.distributed.checkpoint has met, in place of its own that holds all
    ranks'.
    """
    try:
        yield
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from error
