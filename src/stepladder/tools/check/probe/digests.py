"""Short hashes of tensors, rows and random states. None of them changes anything."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
import xxhash

from stepladder.tools.check.probe.patching import careful

MOST_ROWS = 256


def digest(tensor: Any) -> str:
    """Return a short hash of a tensor's bytes, wherever it lies; an empty one where its bytes
    cannot be read.
    """
    try:
        flat = copied(tensor).reshape(-1)
        return str(xxhash.xxh3_64_hexdigest(flat.view(torch.uint8).numpy()))[:12]
    except (RuntimeError, TypeError, NotImplementedError, AttributeError):
        return ""  # sparse, quantised, distributed: not compared


def copied(tensor: Any) -> Any:
    """Return a contiguous copy on the CPU, of which `.numpy()` may be taken.

    `.numpy()` marks a storage as one that cannot be resized. FSDP and code that offloads resize the
    storages of parameters, so the script's own storage must never be marked."""
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


@careful(str)
def whole(module: Any) -> str:
    """Of all parameters of a model."""
    return _short("".join(digest(parameter) for parameter in module.parameters()))


@careful(list)
def rows(batch: Any) -> list[str]:
    """A hash per row of a batch: over all its tensors with as many rows as the first one."""
    parts = [part for part in leaves(batch) if isinstance(part, torch.Tensor) and part.dim() > 0]
    if not parts or not len(parts[0]):
        return []
    count = len(parts[0])
    parts = [copied(part) for part in parts if len(part) == count]
    arrays = []
    for part in parts:
        try:
            arrays.append(part.reshape(count, -1).view(torch.uint8).numpy())
        except (RuntimeError, TypeError):
            continue
    found = []
    for number in range(min(count, MOST_ROWS)):
        state = xxhash.xxh3_64()
        for array in arrays:
            state.update(array[number].tobytes())
        found.append(state.hexdigest()[:12])
    return found if arrays else []


@careful(int)
def size_of(batch: Any) -> int:
    """Rows of a batch."""
    for part in leaves(batch):
        if isinstance(part, torch.Tensor) and part.dim() > 0:
            return len(part)
    return len(batch) if isinstance(batch, (list, tuple)) else 0


def leaves(value: Any, depth: int = 0) -> Iterable[Any]:
    if depth > 4:
        return
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for part in value:
            yield from leaves(part, depth + 1)
    else:
        yield value


@careful(dict)
def random_states() -> dict[str, str]:
    """Of torch, Python and, where it is loaded, NumPy."""
    states = {"torch": digest(torch.get_rng_state()), "python": _short(repr(random.getstate()))}
    if "numpy" in sys.modules:
        state = sys.modules["numpy"].random.get_state()
        states["numpy"] = _short(state[1].tobytes() + repr(state[2:]).encode())
    return states


@careful(dict)
def generators(owner: Any, depth: int = 0) -> dict[str, str]:
    """States of the random generators that a data set holds itself."""
    found: dict[str, str] = {}
    for name, value in list(getattr(owner, "__dict__", {}).items())[:50]:
        if state := state_of(value):
            found[name] = state
        elif (
            depth < 2 and hasattr(value, "__dict__") and not isinstance(value, (torch.Tensor, type))
        ):
            found |= {
                f"{name}.{inner}": state for inner, state in generators(value, depth + 1).items()
            }
    return found


@careful(str)
def state_of(generator: Any) -> str:
    if isinstance(generator, torch.Generator):
        return digest(generator.get_state())
    if isinstance(generator, random.Random):
        return _short(repr(generator.getstate()))
    if type(generator).__module__.startswith("numpy.random"):
        inner: Any = getattr(generator, "bit_generator", generator)
        state = inner.get_state() if hasattr(inner, "get_state") else inner.state
        return _short(repr(state))
    return ""


def _short(text: str | bytes) -> str:
    return str(xxhash.xxh3_64_hexdigest(text))[:12]


@careful(str)
def fingerprint(dataset: Any, depth: int = 0) -> str:
    """Equal where two ranks' data sets hold the same: class, length, and what they are made of."""
    state = xxhash.xxh3_64(type(dataset).__name__)
    with suppress(TypeError):
        state.update(str(len(dataset)))
    if isinstance(dataset, (list, tuple)):
        state.update(repr([_mark(part, 3) for part in dataset[:20]]))
    for name, value in sorted(getattr(dataset, "__dict__", {}).items()):
        state.update(f"{name}={_mark(value, depth)}")
    return state.hexdigest()[:12]


def _mark(value: Any, depth: int) -> str:
    """What stands for a value: equal for equal values, nothing where that cannot be said cheaply."""
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)}{digest(value.reshape(-1)[:65536])}"
    if type(value).__module__ == "numpy" and hasattr(value, "shape"):
        return (
            f"{value.shape}{_short(value.reshape(-1)[:65536].tobytes())}"
            if value.dtype != object
            else "object"
        )
    if isinstance(value, (bool, int, float, str, bytes, type(None))):
        return repr(value)[:500]
    if isinstance(value, (list, tuple)):
        return f"{len(value)}:" + ",".join(
            _mark(part, depth + 1) for part in value[:20] if depth < 4
        )
    if hasattr(value, "__getitem__") and hasattr(value, "__dict__") and depth < 3:
        return fingerprint(value, depth + 1)
    return type(value).__name__
