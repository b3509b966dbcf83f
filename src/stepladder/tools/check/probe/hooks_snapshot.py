"""What the script saves and loads: the parts of a snapshot, told by their shape."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from stepladder.tools.check.isolation.guard import refuse_outside
from stepladder.tools.check.probe.hooks_files import absolute
from stepladder.tools.check.probe.hooks_train import Train
from stepladder.tools.check.probe.patching import careful, wrap
from stepladder.tools.check.probe.recorder import here

NO_POSITION = (
    "seed",
    "version",
    "world",
    "rank",
    "size",
    "dim",
    "classes",
    "hidden",
    "layers",
    "vocab",
    "heads",
)
POSITION = ("epoch", "step", "iter", "batch", "position", "global")


def attach() -> None:
    wrap([torch.serialization, torch], "save", saved)
    wrap([torch.serialization, torch], "load", loaded)
    wrap(pickle, "dump", dumped)
    wrap(torch.jit, "save", exported)


def target_of(file: Any) -> tuple[str, Any]:
    """The path that is written. One inside the user's own folder is taken to the copy of it."""
    path = (
        absolute(file)
        if isinstance(file, (str, os.PathLike))
        else absolute(getattr(file, "name", ""))
    )
    settings = here().settings
    own = path.startswith(settings.original + os.sep) and not path.startswith(
        settings.copy + os.sep
    )
    if isinstance(file, (str, os.PathLike)) and own:
        path = file = settings.copy + path.removeprefix(settings.original)
        Path(file).parent.mkdir(parents=True, exist_ok=True)
    return path, file


def saved(original: Any, value: Any, file: Any, *args: Any, **kwargs: Any) -> Any:
    path, file = target_of(file)
    if not path:  # into memory, as collectives of objects do
        return original(value, file, *args, **kwargs)
    refuse_outside(path)  # torch writes it in C++, which no audit hook sees
    existed = os.path.exists.__wrapped__(path)  # type: ignore[attr-defined]
    here().at("save", path=path, existed=existed, **parts_of(value))
    done = original(value, file, *args, **kwargs)
    if here().settings.stop_at_snapshot and here().direct():
        here().write("snapshot")
        Train.stop_next = True
    return done


def exported(original: Any, module: Any, file: Any, *args: Any, **kwargs: Any) -> Any:
    if isinstance(file, (str, os.PathLike)):
        refuse_outside(file)
    return original(module, file, *args, **kwargs)


def dumped(original: Any, value: Any, file: Any, *args: Any, **kwargs: Any) -> Any:
    if here().direct() and (found := parts_of(value)).get("model"):
        here().at(
            "save", path=absolute(getattr(file, "name", "")), existed=True, opened=True, **found
        )
    return original(value, file, *args, **kwargs)


def loaded(original: Any, file: Any, *args: Any, **kwargs: Any) -> Any:
    path, file = target_of(file)
    if not path:
        return original(file, *args, **kwargs)
    weights_only = kwargs.get("weights_only", "default")
    here().at("load", path=path, weights_only=str(weights_only))
    return original(file, *args, **kwargs)


def nothing_known() -> dict[str, Any]:
    parts = dict.fromkeys(
        ("model", "optimizer", "schedule", "random", "position", "prefixed", "bare"), False
    )
    return parts | {"keys": []}


@careful(nothing_known)
def parts_of(value: Any) -> dict[str, Any]:
    """Which parts of a training's state are in it."""
    found: dict[str, Any] = {
        "model": False,
        "optimizer": False,
        "schedule": False,
        "random": False,
        "position": False,
    }
    found |= {
        "prefixed": False,
        "bare": is_weights(value),
        "keys": sorted(map(str, value))[:20] if isinstance(value, dict) else [],
    }
    for name, part in parts(value):
        low = name.lower()
        if is_weights(part) or isinstance(part, torch.nn.Module):
            found["model"] = True
            keys = list(part) if isinstance(part, dict) else []
            found["prefixed"] |= bool(keys) and all(str(key).startswith("module.") for key in keys)
        elif isinstance(part, dict) and "param_groups" in part and "state" in part:
            found["optimizer"] = True
        elif isinstance(part, dict) and (
            "last_epoch" in part or "_step_count" in part or ("best" in part and "patience" in part)
        ):
            found["schedule"] = True
        elif (
            "rng" in low
            or "random" in low
            or (
                isinstance(part, torch.Tensor)
                and part.dtype == torch.uint8
                and part.numel() in (5056, 16)
            )
        ):
            found["random"] = True
        elif is_position(low, part):
            found["position"] = True
    return found


def is_position(name: str, part: Any) -> bool:
    """An epoch or a step: a number under such a name, or a whole number under any that is no
    setting's.
    """
    if isinstance(part, bool) or not isinstance(part, (int, float, torch.Tensor)):
        return False
    if isinstance(part, int) and not any(word in name for word in NO_POSITION):
        return True
    return any(word in name for word in POSITION)


def parts(value: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """All that is in nested dicts, by name; what is a part of its own is not opened."""
    yield name, value
    if isinstance(value, dict) and depth < 3 and is_opened(value):
        for key, part in value.items():
            yield from parts(part, str(key), depth + 1)
    elif isinstance(value, (list, tuple)) and depth < 2:
        for part in value:
            yield from parts(part, name, depth + 1)


def is_opened(value: dict[Any, Any]) -> bool:
    """Not weights, nor an optimizer's state, nor a table of numbers, as a vocabulary is."""
    is_table = len(value) > 4 and all(isinstance(part, int) for part in value.values())
    return not is_weights(value) and "param_groups" not in value and not is_table


def is_weights(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and len(value) > 0
        and all(isinstance(key, str) for key in value)
        and sum(isinstance(part, torch.Tensor) for part in value.values())
        >= max(1, len(value) * 0.8)
        and any("." in key or key in ("weight", "bias") for key in value)
    )
