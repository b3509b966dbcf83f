"""One snapshot: a folder that is complete or absent, with a manifest of checksums.

The folder `step_00000120` of step 120 contains:

    model.safetensors        the model's parameters and persistent buffers
    state.pt                 optimizer, schedule, precision state, position; no per-rank state
    part-00000.safetensors   with --shard: a rank's slices of weights and state (snapshot_slices.py)
    manifest.json            a SHA-256 of each file, and of itself

They are written to a temporary folder, fsynced and renamed (core/durable.py). Training waits only
for the copy into host memory; a thread does the writing. The state is read with
`weights_only=True`, so loading a snapshot cannot run code.
"""

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from safetensors.torch import load as load_safetensors

from stepladder.core import typed_file
from stepladder.core.errors import TRANSIENT_ERRNOS, InputError, StorageFault, to_one_line
from stepladder.core.safe_open import create_file
from stepladder.storage import snapshot_slices
from stepladder.storage.run_files import (
    CONFIG_FILE,
    MANIFEST_FILE,
    SNAPSHOTS_FOLDER,
    list_snapshots,
    suggest_run_dirs,
)
from stepladder.storage.safetensors_file import get_bytes, write_tensors
from stepladder.storage.snapshot_slices import (
    MODEL_PREFIX,
    PART_PREFIX,
    DamagedSnapshot,
    JsonObject,
    SliceReader,
    StoredModel,
)

SNAPSHOT_FORMAT = 1
MAX_NAMED_DIFFERENCES = 3  # between two models, in one message
MODEL_FILE = "model.safetensors"
STATE_FILE = "state.pt"


@dataclass(frozen=True)
class Snapshot:
    """A verified snapshot: its manifest, and the bytes of its files; parts are read on demand."""

    name: str
    manifest: JsonObject
    files: dict[str, bytes] = field(repr=False)
    folder: str = ""

    @property
    def step(self) -> int:
        """The number of optimizer steps that were done when it was taken."""
        return int(self.manifest["step"])

    def restore_model(
        self,
        model: torch.nn.Module,
        hint: str = "--fresh, or the model that the run was started with",
    ) -> None:
        """Copy the weights into a model, in place, so that memory format and tied weights remain.

        Args:
            model: The model.
            hint: What to do if names or shapes differ, for the InputError.
        """
        tensors = load_safetensors(self.files[MODEL_FILE])
        aliases: dict[str, str] = self.manifest["aliases"]
        stored = StoredModel(tensors, self.reader, aliases)
        differences = stored.find_differences(model)
        is_model_sharded = any(hasattr(tensor, "to_local") for tensor in model.parameters())
        if self.reader.slices or is_model_sharded:
            if differences:
                raise self._make_other_model_error(differences, hint)
            stored.copy_to(model)
            return
        for alias, name in aliases.items():
            tensors[alias] = tensors[name]
        # Frozen weights that its state_dict leaves out are as `build` makes them.
        saved = set(map(id, model.state_dict(keep_vars=True).values()))
        params = model.named_parameters()
        tensors = {name: param for name, param in params if id(param) not in saved} | tensors
        try:
            # Also if the names differ: the model may have a hook that renames them.
            model.load_state_dict(tensors)
        except RuntimeError as error:
            differences = differences or [to_one_line(error)]
            raise self._make_other_model_error(differences, hint) from error

    def _make_other_model_error(self, differences: list[str], hint: str) -> InputError:
        text = _format_differences(differences)
        return InputError(f"snapshot {self.name} is of another model: {text}", hint)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors of the model, sharded ones whole, tied ones by one name each."""
        unsharded = load_safetensors(self.files[MODEL_FILE])
        return {**unsharded, **self.reader.read_tensors(MODEL_PREFIX)}

    @cached_property
    def reader(self) -> SliceReader:
        """The reader of sharded tensors; there may be none."""
        return SliceReader(Path(self.folder), self.manifest.get("slices", {}))

    def state(self, skip_prefix: str | None = None) -> JsonObject:
        """Return everything except the model, on the CPU.

        Args:
            skip_prefix: Sharded tensors to leave out, see `SliceReader.fill_state`.
        """
        state: JsonObject = torch.load(
            io.BytesIO(self.files[STATE_FILE]), map_location="cpu", weights_only=True
        )
        self.reader.fill_state(state, skip_prefix)
        return state


def _format_differences(differences: list[str]) -> str:
    """Return the first differences, and how many more there are."""
    text = "; ".join(differences[:MAX_NAMED_DIFFERENCES])
    num_more = len(differences) - MAX_NAMED_DIFFERENCES
    return f"{text}; and {num_more} more" if num_more > 0 else text


def read_snapshot(path: Path, with_model: bool = True) -> Snapshot:
    """Read and verify one snapshot.

    Args:
        path: Its folder.
        with_model: Whether to load the model's weights; they are verified in any case.

    Returns:
        The snapshot.

    Raises:
        DamagedSnapshot: If a file is damaged or missing.
        InputError: If another version of the format wrote it.
    """
    manifest = _read_manifest(path)
    if manifest["format"] != SNAPSHOT_FORMAT:
        raise InputError(
            f"snapshot {path} has format {manifest['format']}",
            f"a stepladder that writes format {SNAPSHOT_FORMAT}",
        )
    snapshot_slices.verify_slices(manifest)
    files = {}
    for name, expected in manifest["files"].items():
        try:
            is_kept = not name.startswith(PART_PREFIX) and (with_model or name != MODEL_FILE)
            data = snapshot_slices.read_verified(path / name, expected, is_kept)
            if is_kept:
                files[name] = data
        except OSError as error:
            _raise_if_transient(path / name, error)
            raise DamagedSnapshot(f"{name}: {error.strerror}") from error
        except ValueError as error:
            raise DamagedSnapshot(f"{name}: {error}") from error
    return Snapshot(path.name, manifest, files, str(path))


def _read_manifest(path: Path) -> JsonObject:
    file = path / MANIFEST_FILE
    try:
        manifest: JsonObject = typed_file.parse_json(typed_file.read_file(file), dict)
        seal = manifest.pop("seal")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        _raise_if_transient(file, error)
        raise DamagedSnapshot(f"{MANIFEST_FILE}: {type(error).__name__}") from error
    if seal != _hash_manifest(manifest):
        raise DamagedSnapshot(f"{MANIFEST_FILE}: SHA-256 differs")
    return manifest


def _raise_if_transient(path: Path, error: Exception) -> None:
    """Raise StorageFault if a file could not be read for now: it need not be damaged."""
    if isinstance(error, OSError) and error.errno in TRANSIENT_ERRNOS:
        raise StorageFault(f"{path} cannot be read: {error.strerror}") from error


def write_snapshot_files(
    folder: Path, copies: JsonObject, entries: JsonObject, parts: list[JsonObject]
) -> None:
    """Write the model, the state and the manifest; the ranks have written the parts.

    Args:
        folder: The folder to write to.
        copies: "model" with its unsharded tensors, and "state".
        entries: Entries of the manifest.
        parts: The entries of the parts, as `write_part` returned them.
    """
    files, slices = snapshot_slices.merge_parts(parts)
    buffer = io.BytesIO()
    torch.save(copies["state"], buffer)
    state = buffer.getvalue()
    with create_file(folder / STATE_FILE) as file:
        file.write(state)
    files[MODEL_FILE] = write_tensors(folder / MODEL_FILE, copies["model"])
    digest = hashlib.sha256(state).hexdigest()
    files[STATE_FILE] = {"bytes": len(state), "sha256": digest}
    manifest = {"format": SNAPSHOT_FORMAT, **entries, "files": files}
    if parts:
        manifest["slices"] = slices
    with create_file(folder / MANIFEST_FILE) as file:
        file.write(_seal_manifest(manifest))


def read_newest_snapshot(run_dir: Path, with_model: bool = True) -> Snapshot:
    """Return the newest undamaged snapshot of a run, which may still be training.

    Nothing is renamed or deleted.

    Args:
        run_dir: The run directory, or one snapshot.
        with_model: Whether to load the model's weights.

    Returns:
        The snapshot.

    Raises:
        InputError: If there is none.
    """
    damage = "there is none"
    if (run_dir / MANIFEST_FILE).exists():
        paths = [run_dir]
    else:
        paths = list_snapshots(run_dir / SNAPSHOTS_FOLDER)
    for path in reversed(paths):
        try:
            return read_snapshot(path, with_model)
        except DamagedSnapshot as error:
            damage = f"{path.name} is damaged: {error}"
    raise InputError(
        f"{run_dir} has no good snapshot ({damage})",
        f"{suggest_run_dirs(run_dir, CONFIG_FILE)}; a run that has saved one",
    )


def hash_weights(model: torch.nn.Module) -> str:
    """Return a SHA-256 of all parameters and persistent buffers.

    It covers, in the order of the keys, each tensor's key, dtype, shape and contiguous
    little-endian bytes. For a sharded model this is a collective, which gathers one tensor at a
    time.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        gathered = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        digest.update(f"{name} {gathered.dtype} {list(gathered.shape)}\n".encode())
        digest.update(get_bytes(gathered))
    return digest.hexdigest()


def _hash_manifest(manifest: JsonObject) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _seal_manifest(manifest: JsonObject) -> bytes:
    return json.dumps({**manifest, "seal": _hash_manifest(manifest)}, indent=1).encode()
