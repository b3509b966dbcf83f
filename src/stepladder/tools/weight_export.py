"""`stepladder export`: write a run's weights in a format of other programs, tensor by tensor.

safetensors is Hugging Face's layout: model.safetensors, or several files of at most
MAX_WEIGHTS_FILE_BYTES with model.safetensors.index.json, which has the file of each tensor.

dcp is the layout of torch.distributed.checkpoint: .metadata, and a file for each tensor.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor
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
    """Open a safetensors file; each tensor is read when it is used.

    Raises ValueError if the path is no regular file: opening a FIFO would wait for a writer.
    """
    try:
        typed_file.open_to_read(path).close()
    except ValueError as error:
        raise ValueError(f"{path.name} is no regular file") from error
    return safe_open(path, framework="pt")


class StoredWeights:
    """The weights of a snapshot on its disk."""

    def __init__(self, snapshot: Snapshot) -> None:
        # The stored name of each tied weight.
        self.aliases: dict[str, str] = snapshot.manifest["aliases"]
        # A tensor on the meta device for each weight: its shape and type.
        self.meta_tensors: dict[str, Tensor] = {}
        self._slices = snapshot.reader
        self._model_file = open_safetensors(Path(snapshot.folder) / MODEL_FILE)
        for name in self._model_file.keys():  # noqa: SIM118 - it is no dict
            tensor_slice = self._model_file.get_slice(name)
            shape = tensor_slice.get_shape()
            # The type is that of an empty slice; a tensor without dimensions has no slices.
            sample = tensor_slice[:0] if shape else self._model_file.get_tensor(name)
            self.meta_tensors[name] = sample.new_empty(shape, device="meta")
        for name in self._slices.names(MODEL_PREFIX):
            sample = self._slices.read_rows(MODEL_PREFIX + name, 0, 0)
            shape = self._slices.shape(MODEL_PREFIX + name)
            self.meta_tensors[name] = sample.new_empty(shape, device="meta")

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.meta_tensors.values())

    def read(self, name: str) -> Tensor:
        """Return the values of a weight; a tied weight has several names."""
        name = self.aliases.get(name, name)
        if MODEL_PREFIX + name in self._slices.slices:
            return self._slices.read_tensor(MODEL_PREFIX + name)
        tensor: Tensor = self._model_file.get_tensor(name)
        return tensor


def export(run_dir: Path, to: str, target: Path) -> str:
    """Write the weights of a run's newest good snapshot into a new folder.

    The run directory may also be a snapshot. The format is "safetensors" or "dcp". Returns a
    sentence for the user. Raises InputError if there is no snapshot, or the target exists already
    or cannot be written.
    """
    validate_new_path(
        target, "stepladder export RUN_DIR --to FORMAT DIR, with a DIR that is not there yet"
    )
    snapshot = read_newest_snapshot(run_dir, with_model=False)
    weights = StoredWeights(snapshot)
    with durable.name_write_errors(
        target, "another DIR, or free space and the right to write there"
    ):
        durable.make_folder(target.absolute().parent)
        with durable.replace_folder(target) as temporary:
            if to == "safetensors":
                _write_safetensors(temporary, weights)
            else:
                _write_dcp(temporary, weights)
    num_tensors = len(weights.meta_tensors)
    megabytes = weights.num_bytes / 1e6
    return f"written: {target}: {num_tensors} tensors, {megabytes:,.1f} MB, of {snapshot.name}"


def validate_new_path(target: Path, hint: str) -> None:
    """Raise InputError if the path exists: nothing is overwritten."""
    if target.exists() or target.is_symlink():
        raise InputError(f"{target} is there already", hint)


def _write_safetensors(folder: Path, weights: StoredWeights) -> None:
    """Write each weight once: the format has no tied weights."""
    files = _split_into_files(weights.meta_tensors)
    if len(files) == 1:
        write_tensors(folder / MODEL_FILE, files[0], weights.read, {"format": "pt"})
        return
    stem, _, suffix = MODEL_FILE.partition(".")
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(files, start=1):
        file = f"{stem}-{number:05d}-of-{len(files):05d}.{suffix}"
        write_tensors(folder / file, tensors, weights.read, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    index = {
        "metadata": {"total_size": weights.num_bytes},
        "weight_map": dict(sorted(weight_map.items())),
    }
    text = json.dumps(index, indent=2) + "\n"
    (folder / SAFETENSORS_INDEX).write_text(text, encoding="utf-8")


def _split_into_files(tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Split into files of at most MAX_WEIGHTS_FILE_BYTES; a larger tensor has its own file."""
    files: list[dict[str, Tensor]] = [{}]
    file_bytes = 0
    for name, tensor in tensors.items():
        if files[-1] and file_bytes + tensor.nbytes > MAX_WEIGHTS_FILE_BYTES:
            files.append({})
            file_bytes = 0
        files[-1][name] = tensor
        file_bytes += tensor.nbytes
    return files


def _write_dcp(folder: Path, weights: StoredWeights) -> None:
    """Write each weight by all of its names, as a model's state_dict has them."""
    tensors = dict(weights.meta_tensors)
    for alias, name in weights.aliases.items():
        tensors[alias] = weights.meta_tensors[name]
    # A single file would keep all tensors in memory.
    writer = _AnonymousWriter(folder, single_file_per_rank=False)
    planner = _LazySavePlanner(weights)
    with _raise_first_failure(), warnings.catch_warnings():
        # torch warns that there is only one process.
        warnings.simplefilter("ignore", UserWarning)
        save(tensors, storage_writer=writer, planner=planner, no_dist=True)


class _LazySavePlanner(DefaultSavePlanner):
    """Reads a tensor only when it is to be written."""

    def __init__(self, weights: StoredWeights) -> None:
        super().__init__()
        self.weights = weights

    def lookup_object(self, index: Any) -> Tensor:
        return self.weights.read(index.fqn)


class _AnonymousWriter(FileSystemWriter):
    """Writes no path of this machine into `.metadata`."""

    def storage_meta(self) -> None:
        return None


@contextmanager
def _raise_first_failure() -> Iterator[None]:
    """Raise a rank's first failure in place of torch's CheckpointException, which holds all."""
    try:
        yield
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from error
