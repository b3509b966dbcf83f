"""Checks before training that all ranks have the settings, the model and the data of rank 0."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import zip_longest
from typing import Any

import torch

from stepladder.core.errors import InputError, to_one_line
from stepladder.core.numbers import format_ranks
from stepladder.core.settings import SETTING_FLAGS, Settings
from stepladder.data.sources import BatchSource
from stepladder.storage.run_config import find_first_difference
from stepladder.train.broadcast import gather_texts
from stepladder.train.comm import Comm
from stepladder.train.fingerprints import fingerprint, fingerprint_source
from stepladder.train.job import Recipe
from stepladder.train.optimizers import name_params

SAMPLE_COUNT_BYTES = 8
SOURCE_BYTES = 16  # the number of samples, and a hash
MAX_VALUES_COMPARED = 1024  # of each tensor of a model


def validate_equal_settings(comm: Comm, settings: Settings, recipe: Recipe) -> None:
    """Check on all ranks that every rank was started with the same settings as rank 0.

    All ranks must call this function.

    Raises:
        InputError: The settings or the job of a rank differ. All ranks raise it.
    """
    values: dict[str, Any] = {
        name: value
        for name, value in asdict(settings).items()
        if not SETTING_FLAGS[name].may_differ
    }
    values |= recipe.definition | {"recipe": recipe.name, "device": comm.device.type}
    if (difference := _compare_with_first(comm, values)) is None:
        return
    first, peer, ranks = difference
    name = find_first_difference(first, peer)
    raise InputError(
        f"{name} is {to_one_line(str(first.get(name)))} on rank 0, and"
        f" {to_one_line(str(peer.get(name)))} on {to_one_line(ranks)}",
        "start all ranks with the same job and the same flags",
    )


def _compare_with_first(comm: Comm, value: Any) -> tuple[Any, Any, str] | None:
    """Return the values of rank 0 and of the first rank with another one, and who has the latter.

    The result is None if all ranks have the same. Values that are not of JSON count by their type.
    """
    text = json.dumps(value, default=lambda part: type(part).__name__).encode()
    digests = comm.gather_bytes(fingerprint(text))
    different = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if not different:
        return None
    texts = gather_texts(comm, text)
    alike = [rank for rank in different if digests[rank] == digests[different[0]]]
    first, peer = (json.loads(texts[rank], parse_constant=str) for rank in (0, different[0]))
    return first, peer, format_ranks(alike)


def validate_equal_models(
    comm: Comm, model: torch.nn.Module, optimizer: torch.optim.Optimizer, is_exact: bool
) -> None:
    """Check on all ranks that every rank has built the same model and optimizer as rank 0.

    Names, shapes and types are compared, and the order of the parameters in the optimizer. The
    values may differ, since rank 0 broadcasts its own; not in exact mode, where values of a random
    generator without a seed are others in each start. All ranks must call this function.

    Raises:
        InputError: The model of a rank differs. All ranks raise it.
    """
    tensors = [*model.named_parameters(), *model.named_buffers()]
    descriptions = []
    for name, tensor in tensors:
        kind = str(tensor.dtype)
        if is_exact:
            values = fingerprint(tensor.detach().flatten()[:MAX_VALUES_COMPARED])
            kind += f" with values of the hash {values.hex()[:8]}"
        descriptions.append((name, list(tensor.shape), kind))
    names = name_params(model, optimizer)
    descriptions += [(f"in the optimizer {name}", [], "") for name in names]
    if (difference := _compare_with_first(comm, descriptions)) is None:
        return
    first, peer, ranks = difference
    first_tensor, peer_tensor = next(
        pair for pair in zip_longest(first, peer) if pair[0] != pair[1]
    )
    raise InputError(
        f"{ranks} has built another model than rank 0: {_describe_tensor(peer_tensor)},"
        f" where rank 0 has {_describe_tensor(first_tensor)}",
        "build(config) the same on every rank: from the config alone, not from RANK, the host or"
        " its files, the time or a generator without a seed, nor in the order of a set",
    )


def _describe_tensor(description: Any) -> str:
    """Return a tensor's name, shape and type as text; "no more" for None."""
    if description is None:
        return "no more"
    name, shape, dtype = description
    return f"{name} of shape {shape}, {dtype}" if dtype else name


def validate_equal_data(comm: Comm, sources: dict[str, BatchSource | None]) -> None:
    """Check on all ranks that every rank sees the same data as rank 0.

    The number of samples is compared, and a few samples of data in memory. All ranks must call this
    function.

    Args:
        comm: The ranks.
        sources: The sources of this rank, by the name that the error uses.

    Raises:
        InputError: The data of a rank differ. All ranks raise it.
    """
    message = b""
    for source in sources.values():
        message += len(source or ()).to_bytes(SAMPLE_COUNT_BYTES, "big")
        message += fingerprint_source(source)
    messages = comm.gather_bytes(message)
    for rank, rank_message in enumerate(messages):
        for index, name in enumerate(sources):
            begin = index * SOURCE_BYTES
            first = messages[0][begin : begin + SOURCE_BYTES]
            peer = rank_message[begin : begin + SOURCE_BYTES]
            if peer != first:
                raise InputError(
                    f"rank {rank} sees other {name} data than rank 0:"
                    f" {_describe_data_difference(peer, first)}",
                    "the same files on every node: compare `stepladder data info` there",
                )


def _describe_data_difference(peer: bytes, first: bytes) -> str:
    """Return how the data of a rank differ from those of rank 0."""
    peer_count = int.from_bytes(peer[:SAMPLE_COUNT_BYTES], "big")
    first_count = int.from_bytes(first[:SAMPLE_COUNT_BYTES], "big")
    if peer_count != first_count:
        return f"{peer_count} samples against {first_count}"
    return "other values"
