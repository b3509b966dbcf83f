"""Snapshots: a directory that is whole or absent, with a manifest; the newest good one is found
again.

    step_00000120/model.safetensors   the model's parameters and persistent buffers
    step_00000120/state.pt            optimizer, schedule, precision state, position; no per-rank state
    step_00000120/part-00000.safetensors   with --shard: a rank's slices of weights and state, see slices.py
    step_00000120/manifest.json       a SHA-256 per file, and of itself

Written aside, fsynced, renamed (core/durable.py). Training waits only for the copy into host
memory; the rest happens in a thread. Read with `weights_only=True`, so a snapshot cannot run code.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_safetensors

from stepladder.core import durable, typed_file
from stepladder.core.errors import (
    TRANSIENT_ERRNOS,
    InputError,
    StorageFault,
    as_input_error,
    to_one_line,
)
from stepladder.storage import slices
from stepladder.storage.parts import Background, GivenUp, gathered
from stepladder.storage.rundir import MANIFEST, SNAPSHOTS, snapshot_paths
from stepladder.storage.slices import Damaged, SliceReader
from stepladder.storage.staging import HostCopies, without_ties
from stepladder.storage.tensor_file import bytes_of, write_tensors

FORMAT = 1
MOST_DIFFERENCES = 3  # between two models, that are named
MODEL, STATE = "model.safetensors", "state.pt"
HINT = "free space there, or choose another --run-dir; the last good snapshot is kept"


def listed(differences: list[str]) -> str:
    """Return the first differences, and how many more there are."""
    more = len(differences) - MOST_DIFFERENCES
    return "; ".join(differences[:MOST_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")


@dataclass(frozen=True)
class Snapshot:
    """A verified snapshot in memory: its manifest, and raw bytes of its files; parts stay in
    `folder`.
    """

    name: str
    manifest: dict[str, Any]
    files: dict[str, bytes] = field(repr=False)
    folder: str = ""

    @property
    def step(self) -> int:
        """Optimizer steps that were done when it was taken."""
        return int(self.manifest["step"])

    def restore_model(
        self,
        model: torch.nn.Module,
        hint: str = "--fresh, or the model that the run was started with",
    ) -> None:
        """Copy the weights into a built model, in place, so its memory format and ties stay.

        Raises InputError with `hint` where names or shapes differ.
        """
        tensors = load_safetensors(self.files[MODEL])
        aliases: dict[str, str] = self.manifest["aliases"]
        differences = slices.differences(model, tensors, self.reader, aliases)
        if self.reader.slices or any(hasattr(tensor, "to_local") for tensor in model.parameters()):
            if differences:
                raise InputError(
                    f"snapshot {self.name} is of another model: {listed(differences)}", hint
                )
            slices.restore_rows(model, tensors, self.reader, aliases)
            return
        for alias, name in aliases.items():
            tensors[alias] = tensors[name]
        try:
            model.load_state_dict(tensors)  # a hook of the model's own may take other names
        except RuntimeError as error:
            found = listed(differences or [to_one_line(error)])
            raise InputError(f"snapshot {self.name} is of another model: {found}", hint) from error

    def tensors(self) -> dict[str, torch.Tensor]:
        """All of the model's, whole, but for tied names."""
        return {**load_safetensors(self.files[MODEL]), **self.reader.whole(slices.OF_MODEL)}

    @cached_property
    def reader(self) -> SliceReader:
        """Of what lies in parts; there may be none."""
        return SliceReader(Path(self.folder), self.manifest.get("slices", {}))

    def state(self, left: str | None = None) -> dict[str, Any]:
        """Everything beside the model, on the CPU. left: as in `SliceReader.fill`."""
        state: dict[str, Any] = torch.load(
            io.BytesIO(self.files[STATE]), map_location="cpu", weights_only=True
        )
        self.reader.fill(state, left)
        return state


class Snapshots:
    """The snapshots of one run: `save` in the background, `latest` good one, old ones pruned.

    keep: how many of the newest stay; the best by its manifest's `score` stays besides.
    guard: called before anything is written; it raises if this process may no longer write here.
    """

    def __init__(
        self, folder: Path, keep: int = 3, guard: Callable[[], None] = lambda: None
    ) -> None:
        self.folder, self.keep, self.guard = folder, max(1, keep), guard
        self._copies, self._background, self._given_up = (
            HostCopies(),
            Background(),
            threading.Event(),
        )
        self._aside: AbstractContextManager[Path]  # of `begin`, which has opened it in `_begun`

    def save(
        self,
        step: int,
        model: torch.nn.Module,
        state: dict[str, Any],
        manifest: dict[str, Any] | None = None,
        parts: int = 0,
    ) -> None:
        """Copy everything now, write it in the background. Waits for the previous write first.

        step: optimizer steps done.  state: tensors, numbers, strings, and lists, tuples and dicts
        of them. parts: that ranks write into the folder of `begin`: the snapshot counts when all of
        them are on disk. Raises the previous write's error."""
        if not parts:
            self.wait()
            self._begun, self._aside = ExitStack(), self.place(step)
        tensors, aliases = without_ties(model.state_dict())
        copies = self._copies.copy({"model": tensors, "state": state})
        about = {"step": step, "aliases": aliases, **(manifest or {})}
        self._background.start(partial(self._write, self._begun, self._aside, copies, about, parts))

    def begin(self, step: int) -> str:
        """A folder for all ranks' parts of a snapshot. Raises the previous write's error."""
        self.wait()
        self._given_up, self._begun = threading.Event(), ExitStack()
        with as_input_error(f"snapshot in {self.folder} could not be written", HINT):
            aside = self._begun.enter_context(self.place(step))
        self._aside = nullcontext(aside)
        return str(aside)

    def give_up(self) -> None:
        """Wait no more for parts of a lost rank."""
        self._given_up.set()

    def end(self, patience: float) -> None:
        """The last thing, whatever came before. patience: seconds for parts of ranks that may be
        lost.
        """
        self._background.join(patience)
        self.give_up()
        with suppress(Exception):  # raised by `wait` already, or another error is the cause
            self.wait()

    @contextmanager
    def place(self, step: int) -> Iterator[Path]:
        """A folder aside, which becomes the snapshot at the block's end, or nothing."""
        self.guard()
        durable.make_folder(self.folder)
        with durable.replace_folder(self.folder / f"step_{step:08d}", check=self.guard) as aside:
            yield aside
        self.guard()
        self._prune()

    def wait(self) -> None:
        """Until the snapshot under way is on disk.

        Raises InputError if it could not be written, and any other error of the writing thread as
        it is."""
        with (
            suppress(GivenUp),
            as_input_error(f"snapshot in {self.folder} could not be written", HINT),
        ):
            self._background.wait()

    def latest(self, report: Callable[[str], None] = print) -> Snapshot | None:
        """The newest snapshot that verifies. Damaged newer ones are reported by name and set aside.

        Raises InputError if there are snapshots and none of them is good; they stay as they are, so
        that the next start says so again instead of beginning anew."""
        durable.remove_unfinished(self.folder, "step_")
        damaged: dict[Path, str] = {}
        for path in reversed(self.paths()):
            try:
                snapshot = read_snapshot(path)
            except Damaged as error:
                damaged[path] = f"snapshot {path.name} is damaged ({error})"
                continue
            for bad, said in damaged.items():
                report(f"{said}; set aside, the one before it is taken")
                aside = bad.with_suffix(".damaged")
                durable.remove(aside)
                bad.rename(aside)
            return snapshot
        if damaged:
            raise InputError(
                f"all {len(damaged)} snapshots in {self.folder} are damaged: {next(iter(damaged.values()))}",
                "--fresh to begin again beside them",
            )
        return None

    def paths(self) -> list[Path]:
        """Complete snapshots, oldest first."""
        return snapshot_paths(self.folder)

    def _write(
        self,
        begun: ExitStack,
        place: AbstractContextManager[Path],
        copies: dict[str, Any],
        about: dict[str, Any],
        parts: int,
    ) -> None:
        with begun:
            aside = begun.enter_context(place)
            write_files(aside, copies, about, gathered(aside, parts, self._given_up))

    def _prune(self) -> None:
        """Runs only after a newer snapshot is whole on disk, so the last good one is never removed."""
        paths = self.paths()
        scored = [(score, path) for path in paths if (score := _score(path)) is not None]
        best = max(scored)[1] if scored else None
        for path in paths[: -self.keep]:
            if path != best:
                unfinished = path.with_suffix(
                    durable.UNFINISHED_SUFFIX
                )  # killed half-way, it must not look like one
                path.rename(unfinished)
                durable.remove(unfinished)


def read_snapshot(path: Path, whole: bool = True) -> Snapshot:
    """Read and verify one snapshot. whole: with its model in memory. Raises Damaged, naming the
    file.
    """
    try:
        sealed: dict[str, Any] = typed_file.parse_json(typed_file.read_file(path / MANIFEST), dict)
        seal = sealed.pop("seal")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        _refuse_transient(path / MANIFEST, error)
        raise Damaged(f"{MANIFEST}: {type(error).__name__}") from error
    if seal != _seal(sealed):
        raise Damaged(f"{MANIFEST}: SHA-256 differs")
    if sealed["format"] != FORMAT:
        raise InputError(
            f"snapshot {path} has format {sealed['format']}",
            f"a stepladder that writes format {FORMAT}",
        )
    slices.refuse_senseless(sealed)
    files = {}
    for name, expected in sealed["files"].items():
        try:
            if name.startswith(slices.PART) or (name == MODEL and not whole):
                slices.verify_part(path / name, expected)
                continue
            with typed_file.open_to_read(path / name) as file:
                size = os.fstat(file.fileno()).st_size
                data = file.read() if size == expected["bytes"] else b""
        except OSError as error:
            _refuse_transient(path / name, error)
            raise Damaged(f"{name}: {error.strerror}") from error
        except ValueError as error:
            raise Damaged(f"{name}: {error}") from error
        slices.refuse_damage(name, size, hashlib.sha256(data).hexdigest(), expected)
        files[name] = data
    return Snapshot(path.name, sealed, files, str(path))


def _refuse_transient(path: Path, error: Exception) -> None:
    """Raise StorageFault where the file may be sound, and could not be read: the snapshot is not
    damaged.
    """
    if isinstance(error, OSError) and error.errno in TRANSIENT_ERRNOS:
        raise StorageFault(f"{path} cannot be read: {error.strerror}") from error


def write_files(
    aside: Path, copies: dict[str, Any], about: dict[str, Any], parts: list[dict[str, Any]]
) -> None:
    """All but the parts. copies: "model", its whole tensors, and "state".  parts: what `write_part`
    returned.
    """
    files, pieces = slices.joined(parts)
    torch.save(copies["state"], buffer := io.BytesIO())
    (aside / STATE).write_bytes(data := buffer.getvalue())
    files[MODEL] = write_tensors(aside / MODEL, copies["model"])
    files[STATE] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (aside / MANIFEST).write_bytes(
        _sealed({"format": FORMAT, **about, "files": files} | ({"slices": pieces} if parts else {}))
    )


def newest_snapshot(run_dir: Path, whole: bool = True) -> Snapshot:
    """The newest good one of a run, which may still go on, so nothing is tidied up; or `run_dir`,
    if it is one.

    whole: as of `read_snapshot`. Raises InputError where there is none.
    """
    damage = "there is none"
    paths = [run_dir] if (run_dir / MANIFEST).exists() else snapshot_paths(run_dir / SNAPSHOTS)
    for path in reversed(paths):
        try:
            return read_snapshot(path, whole)
        except Damaged as error:
            damage = f"{path.name} is damaged: {error}"
    raise InputError(
        f"{run_dir} has no good snapshot ({damage})", "ls runs; a run that has saved one"
    )


def weights_sha256(model: torch.nn.Module) -> str:
    """One hash of all parameters and persistent buffers.

    Keys sorted; per tensor its key, dtype, shape, then contiguous little-endian bytes. Where each
    rank has rows: a collective, of one tensor at a time."""
    total = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        whole = (
            tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        )  # rows of all ranks
        total.update(f"{name} {whole.dtype} {list(whole.shape)}\n".encode())
        total.update(bytes_of(whole))
    return total.hexdigest()


def _seal(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _sealed(manifest: dict[str, Any]) -> bytes:
    return json.dumps({**manifest, "seal": _seal(manifest)}, indent=1).encode()


def _score(path: Path) -> float | None:
    """None also for NaN, which would compare as the best."""
    try:
        score = float(typed_file.parse_json(typed_file.read_file(path / MANIFEST), dict)["score"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None
    return None if math.isnan(score) else score
