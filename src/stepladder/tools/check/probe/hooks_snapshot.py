"""Hooks that record what the script saves and loads, and which parts a snapshot has."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stepladder.tools.check.events import Load, Save
from stepladder.tools.check.isolation.guard import guard_path
from stepladder.tools.check.probe import digests, pause
from stepladder.tools.check.probe.hooks_files import absolute_path, path_in_copy
from stepladder.tools.check.probe.hooks_model import called_models
from stepladder.tools.check.probe.patching import (
    Fields,
    WrappedCall,
    default_on_error,
    record_user_calls,
    wrap,
)
from stepladder.tools.check.probe.probe_log import current_log, record
from stepladder.tools.check.probe.snapshot_files import holds_weights, pieces_of, snapshot_files

RANDOM_STATE_BYTES = (5056, 16)  # of torch on a CPU, and on a GPU
PYTHON_RANDOM_NUMBERS = 625
TORCH_FOLDER = str(Path(torch.__file__).parent)
MAX_RECORDED_KEYS = 20
MAX_RECORDED_CONTENTS = 1000
PARTS_OF_TRAINING = ("model", "optimizer", "schedule", "random", "position")

saved_pieces: dict[str, list[bytes]] = {}  # of the weights that were saved last to each path
last_integers: dict[tuple[str, ...], list[int]] = {}  # of what was saved last under these keys


def attach() -> None:
    wrap([torch.serialization, torch], "save", record_save)
    wrap([torch.serialization, torch], "load", record_load)
    record_user_calls(pickle, "dump", pickle_event)


def redirect_to_copy(file: Any) -> tuple[str, Any]:
    """Return the path of a file, and the file to use.

    A path in the user's own folder is replaced by that in its copy. The path is empty for a file in
    memory.
    """
    is_path = isinstance(file, str | os.PathLike)
    named = file if is_path else getattr(file, "name", "")
    path = path_in_copy(named)
    if is_path and path != absolute_path(named):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        return path, path
    return path, file


def record_save(call: WrappedCall) -> None:
    path, file = redirect_to_copy(call.argument(1, "f"))
    call = call.with_argument(1, "f", file)
    if not path:  # collectives of objects save into memory
        call.run()
        return
    guard_path(path)  # torch writes it in C++, which no audit hook sees
    log = current_log()
    saved = call.argument(0, "obj")
    existed = os.path.exists.__wrapped__(path)  # type: ignore[attr-defined]
    copied = existed and has_copy(path)
    log.write_with_line(Save(path=path, existed=existed, copied=copied, **parts_of(saved)))
    saved_pieces[path] = weight_pieces(saved)
    snapshot_files.watch_folder_of(path)
    call.run()
    pause.pause_within_save(path)


@default_on_error(list)
def weight_pieces(saved: Any) -> list[bytes]:
    """Return some bytes of the weights that are saved."""
    weights = [item for item in nested_items(saved) if is_weights(item)]
    return [piece for item in weights for piece in pieces_of(item.values(), None)]


@default_on_error(bool)
def has_copy(path: str) -> bool:
    """Return whether another file holds the weights that were saved last to a path."""
    pieces = saved_pieces[path]
    others = {other for saved in saved_pieces for other in Path(saved).parent.iterdir()}
    others.remove(Path(path))
    return any(holds_weights(str(other), [pieces], False) for other in others if pieces)


def pickle_event(call: WrappedCall) -> Save | None:
    parts = parts_of(call.argument(0, "obj"))
    if not parts["model"]:
        return None
    path = path_in_copy(getattr(call.argument(1, "file"), "name", ""))
    return Save(path=path, existed=True, opened=True, **parts)


def record_load(call: WrappedCall) -> Any:
    path, file = redirect_to_copy(call.argument(0, "f"))
    if path:
        weights_only = str(call.kwargs.get("weights_only", "default"))
        is_own = current_log().is_called_by_user(TORCH_FOLDER)
        record(Load(path=path, weights_only=weights_only if is_own else "default"))
    value = call.with_argument(0, "f", file).run()
    pause.pause_at("load")
    return value


def no_parts() -> Fields:
    parts: Fields = dict.fromkeys(PARTS_OF_TRAINING, False)
    return parts | {"bare": False, "numbered": False, "keys": [], "contents": {}}


@default_on_error(no_parts)
def parts_of(value: Any) -> Fields:
    """Return which parts of a training's state a saved value has."""
    parts = no_parts()
    parts["bare"] = is_weights(value)
    parts["contents"] = dict(islice(contents_of(value), MAX_RECORDED_CONTENTS))
    if isinstance(value, dict):
        parts["keys"] = sorted(map(str, value))[:MAX_RECORDED_KEYS]
    integers: list[int] = []
    for item in nested_items(value):
        part = part_of_training(item)
        if part:
            parts[part] = True
        elif is_integer(item):
            integers.append(int(item))
        if part == "optimizer":
            parts["numbered"] = any(isinstance(key, int) for key in item["state"])
    # An epoch or a step is another one each time, and a setting is not.
    keys = tuple(parts["keys"])
    parts["position"] = bool(integers) and integers != last_integers.get(keys)
    last_integers[keys] = integers
    return parts


def contents_of(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield the hash of each tensor, and each number, in nested dicts and lists, by its keys."""
    if isinstance(value, Tensor):
        yield name, f"#{digests.digest(value)}"
    elif isinstance(value, bool | int | float | str):
        yield name, str(value)
    elif isinstance(value, dict | list | tuple):
        if not isinstance(value, dict):
            value = dict(enumerate(value))
        for key, item in value.items():
            yield from contents_of(item, f"{name}.{key}".removeprefix("."))


def part_of_training(item: Any) -> str:
    """Return which part of PARTS_OF_TRAINING an item is; empty where it is none."""
    if is_weights(item) or isinstance(item, torch.nn.Module):
        return "model"
    if isinstance(item, dict):
        if "param_groups" in item and "state" in item:
            return "optimizer"
        if is_schedule(item):
            return "schedule"
    return "random" if is_random_state(item) else ""


def is_schedule(item: dict[Any, Any]) -> bool:
    is_of_plateau = "best" in item and "patience" in item
    return "last_epoch" in item or "_step_count" in item or is_of_plateau


def is_random_state(item: Any) -> bool:
    """Return whether an item is a state of torch's, NumPy's or Python's generator."""
    if isinstance(item, Tensor):
        return item.dtype == torch.uint8 and item.numel() in RANDOM_STATE_BYTES
    if isinstance(item, list | tuple) and len(item) > 1:
        is_of_python = isinstance(item[1], list | tuple) and len(item[1]) == PYTHON_RANDOM_NUMBERS
        return is_of_python or (isinstance(item[0], str) and item[0] == "MT19937")
    return isinstance(item, dict) and "bit_generator" in item


def is_integer(item: Any) -> bool:
    if isinstance(item, Tensor):
        return item.numel() == 1 and not item.is_floating_point() and item.dtype != torch.bool
    return isinstance(item, int) and not isinstance(item, bool)


def nested_items(value: Any, depth: int = 0) -> Iterator[Any]:
    """Yield a value, and all values in nested dicts and lists."""
    yield value
    items: Any = ()
    if isinstance(value, dict) and depth < 3 and is_container(value):
        items = value.values()
    elif isinstance(value, list | tuple) and depth < 2 and not is_random_state(value):
        items = value
    for item in items:
        yield from nested_items(item, depth + 1)


def is_container(value: dict[Any, Any]) -> bool:
    """Return whether a dict holds several parts.

    It does not if it is weights, the state of an optimizer, or a table of numbers, such as a
    vocabulary.
    """
    is_table = len(value) > 4 and all(isinstance(item, int) for item in value.values())
    return not is_weights(value) and "param_groups" not in value and not is_table


def is_weights(value: Any) -> bool:
    """Return whether a value is a state dict of a model."""
    if not isinstance(value, dict) or not value:
        return False
    if not all(isinstance(key, str) for key in value):
        return False
    known_names = called_models.names.values()
    if not any("." in key or key in known_names for key in value):
        return False
    tensors = [item for item in value.values() if isinstance(item, Tensor)]
    return len(tensors) >= max(1, len(value) * 0.8)
