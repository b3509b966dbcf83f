"""Short hashes of tensors, rows and random states, and what gradients are like."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
import xxhash
from torch import Tensor

from stepladder.tools.check.events import Digests
from stepladder.tools.check.probe.patching import default_on_error

DIGEST_CHARACTERS = 12
MAX_HASHED_ROWS = 256
MAX_HELD_SAMPLES = 64
MAX_SUMMED_COLUMNS = 64
MAX_HASHED_ELEMENTS = 65536  # of each tensor of a data set
MAX_ATTRIBUTES = 50
MAX_ATTRIBUTE_DEPTH = 2
MAX_ITEMS = 20  # of a list
MAX_DEPTH = 4  # of nested lists and dicts
MAX_GRADIENT_SUMS = 16
MAX_RECORDED_POINTERS = 8


def short_hash(data: str | bytes) -> str:
    data = data.encode() if isinstance(data, str) else data  # xxhash hashes no text since 4.0
    return str(xxhash.xxh3_64_hexdigest(data))[:DIGEST_CHARACTERS]


def is_divided(tensor: Any) -> bool:
    """Return whether other ranks hold parts of a distributed tensor."""
    placements = getattr(tensor, "placements", ())
    sizes = tensor.device_mesh.shape if placements else ()
    pairs = zip(placements, sizes, strict=True)
    return any(size > 1 and not placement.is_replicate() for placement, size in pairs)


def local(tensor: Any) -> Any:
    """Return what this rank holds of a distributed tensor if that is all of it."""
    is_whole = hasattr(tensor, "to_local") and not is_divided(tensor)
    if is_whole:
        return tensor.to_local()
    return tensor


def digest(tensor: Any) -> str:
    """Return a short hash of a tensor's bytes; an empty one where they cannot be read."""
    try:
        flat = copy_to_cpu(local(tensor)).reshape(-1)
        return short_hash(flat.view(torch.uint8).numpy())
    except (RuntimeError, TypeError, NotImplementedError, AttributeError):
        return ""  # sparse, quantised, distributed: not compared


def copy_to_cpu(tensor: Any) -> Any:
    """Return a contiguous copy on the CPU, of which `.numpy()` may be taken.

    `.numpy()` marks a storage as one that cannot be resized. FSDP and code that offloads resize the
    storages of parameters, so the script's own storage must never be marked.
    """
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


@default_on_error(list)
def flatten(tensor: Any) -> Tensor:
    """Return all elements of a tensor in one dimension: of a shard's whole tensor, and dense."""
    values: Any = tensor.detach()
    if hasattr(values, "full_tensor"):  # a collective of all ranks, which step at the same time
        values = values.full_tensor()
    if values.is_sparse:
        values = values.to_dense()
    flat: Tensor = values.reshape(-1)
    return flat


def sample_elements(flat: Tensor, count: int) -> Tensor:
    """Return up to `count` elements at equal distances, in double precision."""
    stride = max(1, flat.numel() // count)
    return flat[::stride][:count].double()


def gradient_sums(parameters: list[Any]) -> list[float]:
    """Return the sum over every second element of each of the first gradients."""
    sums = []
    for parameter in parameters[:MAX_GRADIENT_SUMS]:
        sums.append(gradient_sum(local(parameter.grad)))
    return sums


def gradient_sum(gradient: Any) -> float:
    """Return the sum over every second element of a gradient; 0 where it has none to read."""
    if type(gradient) is not Tensor or gradient.is_sparse:
        return 0.0
    return float(gradient.detach().flatten()[::2].double().sum())


def has_no_gradient(parameter: Any) -> bool:
    return parameter.grad is None or not bool(parameter.grad.any())


def gradient_pointers(parameters: list[Any]) -> list[int]:
    """Return the addresses of the first gradients, by which collectives are recognized."""
    pointers = []
    for parameter in parameters:
        if parameter.grad is not None:
            pointers.append(parameter.grad.data_ptr())
    return pointers[:MAX_RECORDED_POINTERS]


def gradient_norm(parameters: list[Any]) -> float:
    squares = 0.0
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.is_sparse:
            gradient = gradient._values()
        squares += float(gradient.detach().float().square().sum())
    return float(squares**0.5)


def trained_matrices(parameters: list[Any]) -> list[Any]:
    """Return the parameters of two dimensions and more that have a gradient.

    Behind a ReLU that is 0 for every sample the last bias still has one.
    """
    matrices = []
    for parameter in parameters:
        is_trained = parameter.requires_grad and parameter.grad is not None
        if is_trained and parameter.dim() > 1:
            matrices.append(parameter)
    return matrices


@default_on_error(str)
def model_digest(module: Any) -> str:
    """Return a hash of all parameters of a model."""
    return short_hash("".join(digest(parameter) for parameter in module.parameters()))


@default_on_error(list)
def row_digests(batch: Any) -> list[str]:
    """Return a hash for each row of a batch.

    It is over all tensors of the batch with as many rows as the first one.
    """
    tensors = list(tensors_with_rows(batch))
    if not tensors or not len(tensors[0]):
        return []
    count = len(tensors[0])
    copies = [copy_to_cpu(tensor) for tensor in tensors if len(tensor) == count]
    arrays = []
    for copy in copies:
        with suppress(RuntimeError, TypeError):
            arrays.append(copy.reshape(count, -1).view(torch.uint8).numpy())
    if not arrays:
        return []
    hashes = []
    for row in range(min(count, MAX_HASHED_ROWS)):
        state = xxhash.xxh3_64()
        for array in arrays:
            state.update(array[row].tobytes())
        hashes.append(state.hexdigest()[:DIGEST_CHARACTERS])
    return hashes


@default_on_error(list)
def row_sums(batch: Any) -> list[float]:
    """Return for each row of a batch the sum of some numbers of its first tensor."""
    first = next(tensors_with_rows(batch))[:MAX_HASHED_ROWS]
    columns = first.reshape(len(first), -1)
    stride = columns.shape[1] // MAX_SUMMED_COLUMNS + 1
    sums = columns[:, ::stride].double().sum(1)
    return list(map(float, sums))


@default_on_error(int)
def row_count(batch: Any) -> int:
    """Return the number of rows of a batch."""
    for tensor in tensors_with_rows(batch):
        return len(tensor)
    if isinstance(batch, list | tuple):
        return len(batch)
    return 0


def tensors_with_rows(batch: Any) -> Iterator[Tensor]:
    for leaf in leaves(batch):
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            yield leaf


def leaves(value: Any, depth: int = 0) -> Iterator[Any]:
    """Yield the values in nested dicts, lists and tuples."""
    if depth > MAX_DEPTH:
        return
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from leaves(item, depth + 1)
    else:
        yield value


@default_on_error(dict)
def random_states() -> Digests:
    """Return hashes of the random states of torch, Python and, where it is loaded, NumPy."""
    states = {"torch": digest(torch.get_rng_state()), "python": short_hash(repr(random.getstate()))}
    if "numpy" in sys.modules:
        state = sys.modules["numpy"].random.get_state()
        states["numpy"] = short_hash(state[1].tobytes() + repr(state[2:]).encode())
    return states


@default_on_error(dict)
def generator_states(owner: Any) -> Digests:
    """Return hashes of the states of random generators that an object holds, by attribute."""
    states = {path: generator_state(value) for path, value in nested_attributes(owner)}
    return {path: state for path, state in states.items() if state}


def nested_attributes(owner: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield what an object such as a data set holds, and what these hold.

    Each comes with the attributes, and the places in lists, that lead to it.
    """
    for name, value in list(getattr(owner, "__dict__", {}).items())[:MAX_ATTRIBUTES]:
        inner = f"{path}.{name}".removeprefix(".")
        yield inner, value
        if isinstance(value, list | tuple):
            for index, item in enumerate(value[:MAX_ITEMS]):
                yield f"{inner}[{index}]", item
        elif depth < MAX_ATTRIBUTE_DEPTH and not isinstance(value, Tensor | type):
            yield from nested_attributes(value, inner, depth + 1)


@default_on_error(str)
def generator_state(generator: Any) -> str:
    """Return a hash of a generator's state; an empty one of any other object."""
    if isinstance(generator, torch.Generator):
        return digest(generator.get_state())
    if isinstance(generator, random.Random):
        return short_hash(repr(generator.getstate()))
    if type(generator).__module__.startswith("numpy.random"):
        inner: Any = getattr(generator, "bit_generator", generator)
        if hasattr(inner, "get_state"):
            return short_hash(repr(inner.get_state()))
        return short_hash(repr(inner.state))
    return ""


@default_on_error(str)
def dataset_fingerprint(dataset: Any, depth: int = 0) -> str:
    """Return a hash that is equal for equal data sets.

    It is over the class, the length, and the attributes.
    """
    state = xxhash.xxh3_64(type(dataset).__name__.encode())
    with suppress(TypeError):
        state.update(str(len(dataset)).encode())
    if isinstance(dataset, list | tuple):
        keys = [value_key(item, 3) for item in dataset[:MAX_ITEMS]]
        state.update(repr(keys).encode())
    for name, value in sorted(getattr(dataset, "__dict__", {}).items()):
        state.update(f"{name}={value_key(value, depth)}".encode())
    return state.hexdigest()[:DIGEST_CHARACTERS]


@default_on_error(list)
def held_sums(dataset: Any) -> list[float]:
    """Return for each of the first samples the sum of what the first attribute holds for it.

    Empty where a data set holds no numbers for its samples, as one that reads files.
    """
    attributes = list(vars(dataset).values()) if hasattr(dataset, "__dict__") else [dataset]
    for attribute in attributes:
        if isinstance(attribute, dict):
            attribute = tuple(attribute.values())
        parts = attribute if isinstance(attribute, tuple) else (attribute,)
        for samples in parts:
            with suppress(TypeError, ValueError, RuntimeError):
                if len(samples) == len(dataset):
                    return list(map(sum_of_numbers, samples[:MAX_HELD_SAMPLES]))
    return []


def sum_of_numbers(value: Any) -> float:
    """Return the sum over arrays and numbers in nested lists; TypeError of anything else."""
    total = 0.0
    for leaf in leaves(value):
        numbers = torch.as_tensor(leaf, dtype=torch.float64)
        total += float(numbers.sum())
    return total


def value_key(value: Any, depth: int) -> str:
    """Return a text that is equal for equal values; the class's name where that would be slow."""
    if isinstance(value, Tensor):
        first = value.reshape(-1)[:MAX_HASHED_ELEMENTS]
        return f"{tuple(value.shape)}{digest(first)}"
    if type(value).__module__ == "numpy" and hasattr(value, "shape"):
        return array_key(value)
    if isinstance(value, (bool, int, float, str, bytes, type(None))):
        return repr(value)[:500]
    if isinstance(value, list | tuple):
        keys = []
        if depth < MAX_DEPTH:
            keys = [value_key(item, depth + 1) for item in value[:MAX_ITEMS]]
        joined = ",".join(keys)
        return f"{len(value)}:{joined}"
    if hasattr(value, "__getitem__") and hasattr(value, "__dict__") and depth < 3:
        return dataset_fingerprint(value, depth + 1)
    return type(value).__name__


def array_key(array: Any) -> str:
    if array.dtype == object:
        return "object"
    return f"{array.shape}{short_hash(array.reshape(-1)[:MAX_HASHED_ELEMENTS].tobytes())}"
