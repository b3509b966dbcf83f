"""A run-time guard: hashes of everything that must be the same on every rank, compared between
steps.

On a free core a check costs 1.2 ms per MB of weights, buffers and optimizer state (a hash of the
host's copy), and one collective of 16 bytes per rank; details travel only when something differs.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from functools import lru_cache
from hashlib import blake2b
from itertools import zip_longest
from typing import Any, NamedTuple

import torch

from stepladder.core.errors import InputError, RanksDiffer, to_one_line
from stepladder.core.order import SORT
from stepladder.core.plan import Plan
from stepladder.core.settings import CHANGEABLE_ON_RESUME, Settings
from stepladder.data.sources import Source, TensorSource
from stepladder.storage.run_config import find_first_difference
from stepladder.train.comm import Comm
from stepladder.train.job import Recipe

HASH_BYTES = 8
SAMPLES_COMPARED, INDICES_COMPARED = 32, 1024
# Between ranks: rank 0's counts, or nothing depends on it. The others all ranks need for the same
# collectives.
MAY_DIFFER = CHANGEABLE_ON_RESUME - {
    "snapshot_every",
    "steps",
    "guard_every",
    "replay_every",
    "shard",
    "shard_copies",
} | {"init_from"}

CAUSES = {
    "learning rate": "a learning rate set by rank, or a schedule that reads this rank's own loss",
    "data order": "a rank-seeded shuffle: give every rank the same --seed",
    "optimizer": "optimizer state that one rank loaded, changed or stepped on its own",
    "start": "weights initialised by rank: seed torch the same on every rank before the model is built",
    "parameter": "weights updated outside the optimizer, or by one rank only",
    "buffer": "a buffer that forward changes from what this rank alone has seen",
}  # what is first in this list explains what comes after it


class Item(NamedTuple):
    """One thing that all ranks must have alike. kind: a key of CAUSES."""

    kind: str
    name: str
    digest: bytes


class ReplicasDiffer(RanksDiffer):
    """Ranks no longer hold the same. step: steps done.  tensor: the first that differs, in
    registration order.

    ranks: those that differ from the most common value (from rank 0's where none is).
    """

    def __init__(self, step: int, kind: str, tensor: str, ranks: list[int], cause: str) -> None:
        self.at, self.kind, self.tensor, self.ranks, self.cause = step, kind, tensor, ranks, cause
        self.what = tensor if tensor.startswith(kind) else f"{kind} {tensor}"
        super().__init__(
            f"after step {step}, {self.what} of {format_ranks(ranks)} differs from the others'. Likely cause: {cause}"
        )


class ReplicaCheck:
    """Compares this rank's model, optimizer, learning rates and data order with the other ranks'.

    own: buffers that each rank has for itself, such as batch norm's statistics of its share.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        comm: Comm,
        own: Iterable[torch.Tensor] = (),
    ) -> None:
        self.model, self.optimizer, self.comm = model, optimizer, comm
        self.own = {id(buffer) for buffer in own}
        self.names = {p: name for name, p in model.named_parameters()}
        self.first = True

    def check(self, step: int, epoch_order_digest: bytes) -> None:
        """Compare now. step: steps done.  Raises ReplicasDiffer on every rank. A collective."""
        if self.comm.alone:
            return
        items = list(self._items(epoch_order_digest))
        total = blake2b(
            b"".join(item.name.encode() + item.digest for item in items), digest_size=16
        ).digest()
        if len(set(self.comm.gather_bytes(total))) > 1:
            raise self._difference(step, items)
        self.first = False

    def _items(self, epoch_order_digest: bytes) -> Iterator[Item]:
        for name, param in self.model.named_parameters():
            yield Item("parameter", name, fingerprint(param))
        for name, buffer in self.model.named_buffers():
            if id(buffer) not in self.own:
                yield Item("buffer", name, fingerprint(buffer))
        for number, group in enumerate(self.optimizer.param_groups):
            for place, param in enumerate(group["params"]):
                owner = self.names.get(param, f"group {number}, parameter {place}")
                for name, value in self.optimizer.state.get(param, {}).items():
                    yield Item("optimizer", f"{name} of {owner}", fingerprint(value))
        for number, group in enumerate(self.optimizer.param_groups):
            yield Item(
                "learning rate", f"learning rate of group {number}", fingerprint(float(group["lr"]))
            )
        yield Item("data order", "data order of the epoch", epoch_order_digest)

    def _difference(self, step: int, items: list[Item]) -> ReplicasDiffer:
        """Who differs in what. A collective, made by all ranks once one total differs."""
        names = self.comm.gather_bytes(fingerprint([item[:2] for item in items]))
        if odd := find_minority(names):
            return ReplicasDiffer(
                step, "set of tensors", "set of tensors", odd, "a model that is built by rank"
            )
        hashes = self.comm.gather_bytes(b"".join(item.digest for item in items))
        ranks_of = {}
        for number, item in enumerate(items):
            place = slice(number * HASH_BYTES, (number + 1) * HASH_BYTES)
            if odd := find_minority([one[place] for one in hashes]):
                ranks_of[item] = odd
        first = next(iter(ranks_of))
        kinds = {
            "start" if self.first and item.kind == "parameter" else item.kind for item in ranks_of
        }
        cause = next(text for kind, text in CAUSES.items() if kind in kinds)
        return ReplicasDiffer(step, first.kind, first.name, ranks_of[first], cause)


def format_ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def validate_equal_settings(comm: Comm, settings: Settings, recipe: Recipe) -> None:
    """Raises InputError, on all ranks, where one was started with other settings than rank 0. A
    collective.
    """
    asked = {name: value for name, value in asdict(settings).items() if name not in MAY_DIFFER}
    asked |= recipe.definition | {"recipe": recipe.name, "device": comm.device.type}
    mine = json.dumps(asked, default=lambda value: type(value).__name__).encode()
    length = max(
        int.from_bytes(one, "big") for one in comm.gather_bytes(len(mine).to_bytes(8, "big"))
    )
    texts = comm.gather_bytes(mine.ljust(length))
    if odd := [rank for rank, text in enumerate(texts) if text != texts[0]]:
        first, other = (json.loads(texts[rank], parse_constant=str) for rank in (0, odd[0]))
        name = find_first_difference(first, other)
        alike = [rank for rank in odd if texts[rank] == texts[odd[0]]]
        raise InputError(
            f"{name} is {to_one_line(str(first.get(name)))} on rank 0, and {to_one_line(str(other.get(name)))} on"
            f" {to_one_line(format_ranks(alike))}",
            "start all ranks with the same job and the same flags",
        )


def validate_equal_models(comm: Comm, model: torch.nn.Module) -> None:
    """Raise InputError, on all ranks, where one has built another model than rank 0. A collective.

    Names, shapes and types are compared; the values are rank 0's on all ranks.
    """
    tensors = [*model.named_parameters(), *model.named_buffers()]
    mine = [(name, list(tensor.shape), str(tensor.dtype)) for name, tensor in tensors]
    digests = comm.gather_bytes(fingerprint(mine))
    odd = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if not odd:
        return
    text = json.dumps(mine).encode()
    length = max(
        int.from_bytes(one, "big") for one in comm.gather_bytes(len(text).to_bytes(8, "big"))
    )
    texts = comm.gather_bytes(text.ljust(length))
    pairs = zip_longest(*(json.loads(texts[rank]) for rank in (0, odd[0])))
    first, other = next((first, other) for first, other in pairs if first != other)
    here, there = (
        "no more" if one is None else f"{one[0]} of shape {one[1]}, {one[2]}"
        for one in (first, other)
    )
    raise InputError(
        f"{format_ranks([rank for rank in odd if texts[rank] == texts[odd[0]]])} has built another model than rank 0:"
        f" {there}, where rank 0 has {here}",
        "build(config) the same on every rank: from the config alone, not from RANK, the host or its files",
    )


def validate_equal_data(comm: Comm, sources: dict[str, Source | None]) -> None:
    """Raises InputError, on all ranks, where one does not see the data that rank 0 sees. A
    collective.

    Compares numbers of samples, and of data in memory a few samples all over it.
    """
    mine = b"".join(
        len(s or ()).to_bytes(8, "big") + fingerprint_source(s) for s in sources.values()
    )
    for rank, theirs in enumerate(found := comm.gather_bytes(mine)):
        for place, name in enumerate(sources):
            here, first = (one[16 * place : 16 * place + 16] for one in (theirs, found[0]))
            if here != first:
                counts = [int.from_bytes(one[:8], "big") for one in (here, first)]
                what = (
                    f"{counts[0]} samples against {counts[1]}"
                    if here[:8] != first[:8]
                    else "other values"
                )
                raise InputError(
                    f"rank {rank} sees other {name} data than rank 0: {what}",
                    "the same files on every node: compare `stepladder data info` there",
                )


def validate_finite_weights(model: torch.nn.Module, step: int) -> None:
    """Keeps the last good snapshot where the loss is still a number, but the weights are not."""
    for name, weight in model.named_parameters():
        finite: Any = torch.isfinite(weight).all()
        if not (finite.full_tensor() if hasattr(finite, "full_tensor") else finite):
            raise InputError(
                f"after step {step} the weights of {name} are not finite",
                "a smaller --lr or --warmup-steps N; the last good snapshot is kept",
            )


def fingerprint_source(source: Source | None) -> bytes:
    if not isinstance(source, TensorSource) or not len(source):
        return bytes(HASH_BYTES)
    rows = (
        torch.linspace(0, len(source) - 1, SAMPLES_COMPARED, dtype=torch.float64)
        .long()
        .to(source.device)
    )
    return fingerprint([fingerprint(tensor.index_select(0, rows)) for tensor in source.tensors])


def fingerprint(value: Any) -> bytes:
    """8 bytes that depend on every bit of a tensor (and its shape), or on any other value's text."""
    if not isinstance(value, torch.Tensor):
        return blake2b(repr(value).encode(), digest_size=HASH_BYTES).digest()
    host = value.detach().cpu().contiguous()
    about = blake2b(f"{host.dtype} {list(host.shape)}".encode(), digest_size=HASH_BYTES)
    about.update(host.reshape(-1).view(torch.uint8).numpy().data)
    return about.digest()


def find_minority(values: list[bytes]) -> list[int]:
    """Places of the values that are not the most common one; rank 0's counts as that where none is."""
    counts = Counter(values)
    common = max(counts, key=lambda value: (counts[value], value == values[0]))
    return [rank for rank, value in enumerate(values) if value != common]


@lru_cache(maxsize=1)
def fingerprint_order(plan: Plan, epoch: int) -> bytes:
    """8 bytes that stand for the order in which an epoch reads its samples."""
    if plan.stream is not None:
        order = plan.stream.chunk_order(epoch)
    elif plan.shuffle == SORT:
        order = plan.order(epoch)
    else:  # every index comes of the same keys
        order = plan.indices_at(epoch, 0, min(plan.num_samples, INDICES_COMPARED))
    return blake2b(order.data, digest_size=HASH_BYTES).digest()
