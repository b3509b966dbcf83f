"""`--replay-every N`: what a rank computes is computed again by another one, and must have the same
bits.

In each N-th step, a rank notes the hash of one of its microbatches' gradients as it goes into the
tree. When all gradients are added, and before they move a weight, each rank computes the noted
microbatch of the rank before it, with the same weights, samples and random keys. All hashes are
compared in one collective. Where two differ, all ranks compute that microbatch once more, and the
majority is right."""

from __future__ import annotations

import copy
import random
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import torch

from stepladder.core.errors import Corrupt, PeerLost, RanksDiffer
from stepladder.core.order import derive_seed
from stepladder.core.plan import Span
from stepladder.data.sources import DatasetSource
from stepladder.train.comm import Comm
from stepladder.train.determinism import find_batch_norms
from stepladder.train.phases import READING, REPLAYING, WAITING
from stepladder.train.replica_check import (
    HASH_BYTES,
    ReplicaCheck,
    ReplicasDiffer,
    fingerprint,
    fingerprint_order,
    format_ranks,
)
from stepladder.train.run_spec import RunSpec
from stepladder.train.sync.base import Backward
from stepladder.train.sync.exact import ExactSync, TreeBucket

TOTAL_BYTES, HOST_BYTES = 16, 64
COUNT, STATISTICS, LOSS = "the loss's count", "batch norm's statistics", "the loss"


class WrongRanks(NamedTuple):
    """Who is wrong about one microbatch. right: its hashes; b"" where nobody can tell which of
    `ranks` it is.
    """

    ranks: list[int]
    right: bytes


class Mismatch(NamedTuple):
    """What all ranks have said of the microbatch of rank `owner`, on which two differ.

    first: hashes by rank, of the owner and of the one that replayed it.  again: each rank's, in
    rank order."""

    owner: int
    span: Span
    first: list[tuple[int, bytes]]
    again: list[bytes]
    hosts: list[str]


class RecomputeCheck:
    """Notes this rank's microbatch, computes another one's, and compares. compute: `TrainingLoop._pass`."""

    def __init__(
        self,
        spec: RunSpec,
        comm: Comm,
        sync: ExactSync,
        compute: Callable[[Span, Any, Backward], object],
    ) -> None:
        self.plan, self.comm, self.sync, self.compute = spec.plan, comm, sync, compute
        self.every, model = spec.settings.replay_every or 0, spec.job.model
        self.names = {param: name for name, param in model.named_parameters()}
        gradients = [f"the gradient of {self.names[param]}" for param in sync.params]
        self.items = [*gradients, STATISTICS, LOSS, COUNT]
        self.source, self.threads = spec.train_source, spec.threads
        if (
            isinstance(self.source, DatasetSource) and self.source.num_workers
        ):  # no processes for one batch
            self.source, self.threads = copy.copy(self.source), 1  # as many as a worker has
            self.source.num_workers = 0
        own = [buffer for layer in find_batch_norms(model) for buffer in layer.buffers()]
        self.replicas = ReplicaCheck(model, spec.job.optimizer, comm, own)
        self.hashes: dict[str, bytes] = {}

    def is_due(self, step: int) -> bool:
        return (step + 1) % self.every == 0

    def _chosen(self, step: int, rank: int) -> Span | None:
        """The microbatch of a rank that is replayed in this step, by the run's seed."""
        spans = self.plan.share(step, rank, self.comm.world.world_size)
        return spans[derive_seed(self.plan.seed, "replay", step) % len(spans)] if spans else None

    # -- hashes ------------------------------------------------------------------------------------

    def watching_backward(self, step: int) -> Backward:
        """Takes the place of the sync's `backward` in this step: notes the hashes of the chosen
        microbatch.
        """
        chosen, self.hashes = self._chosen(step, self.comm.world.rank), {}

        def backward(loss: torch.Tensor, count: float, extra: torch.Tensor | None) -> None:
            if chosen is None or self.sync.microbatch != chosen.number:
                self.sync.backward(loss, count, extra)
                return
            self.hashes[COUNT] = fingerprint(count)
            self.sync.watch(self._note)
            self.sync.backward(loss, count, extra)
            self.sync.watch(None)

        return backward

    def _note(self, bucket: TreeBucket) -> None:
        """A leaf is full, and goes into the tree now."""
        for param, part in zip(bucket.params, bucket.parts, strict=True):
            self.hashes[f"the gradient of {self.names[param]}"] = fingerprint(part)
        if bucket is self.sync.buckets[-1]:
            extra = bucket.leaf[bucket.extra]
            self.hashes[LOSS] = fingerprint(extra[:1])
            self.hashes[STATISTICS] = fingerprint(extra[1:])

    def _noted(self) -> bytes:
        """One hash after the other, in the order of `items`; zeros where this rank had no
        microbatch.
        """
        return b"".join(self.hashes.get(item, bytes(HASH_BYTES)) for item in self.items)

    def _compute(self, step: int, owner: int) -> bytes:
        """The hashes of another rank's microbatch, computed here."""
        span, self.hashes = self._chosen(step, owner), {}
        if span is not None:
            with self.comm.phases(REPLAYING), untouched_randomness(self.comm.device):
                self.compute(span, self._read(step, span), self._again)
        return self._noted()

    def _again(self, loss: torch.Tensor, count: float, extra: torch.Tensor | None) -> None:
        assert extra is not None
        self.hashes[COUNT] = fingerprint(count)
        self.sync.again(loss, extra, self._note)

    def _read(self, step: int, span: Span) -> Any:
        request = self.plan.epoch_of_step(step), self.plan.indices(step, span)
        threads = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            with self.comm.phases(READING), closing(self.source.batches([request])) as batches:
                return next(batches)[1]
        finally:
            torch.set_num_threads(threads)

    # -- comparing ---------------------------------------------------------------------------------

    def compare(self, step: int) -> None:
        """Raises Corrupt on a rank whose results are wrong, and PeerLost on the others. A
        collective.

        Where it cannot be told who is wrong, one rank raises RanksDiffer.
        """
        rank, world_size = self.comm.world.rank, self.comm.world.world_size
        mine, theirs = self._noted(), self._compute(step, (rank - 1) % world_size)
        said = self._gather(digest(mine) + digest(theirs))
        odd = [
            owner
            for owner, (one, other) in enumerate(zip(said, [*said[1:], said[0]], strict=True))
            if one[:TOTAL_BYTES] != other[TOTAL_BYTES:]
        ]
        if odd:
            self._settle(step, [self._ask_all(step, owner, mine, theirs) for owner in odd])

    def _ask_all(self, step: int, owner: int, mine: bytes, theirs: bytes) -> Mismatch:
        """What each rank has had, and has when it computes the owner's microbatch now. A
        collective.
        """
        host = socket.gethostname().encode()[:HOST_BYTES].ljust(HOST_BYTES)
        size, span = len(mine), self._chosen(step, owner)
        assert span is not None
        said = self._gather(mine + theirs + self._compute(step, owner) + host)
        replayer = (owner + 1) % self.comm.world.world_size
        return Mismatch(
            owner,
            span,
            [(owner, said[owner][:size]), (replayer, said[replayer][size : 2 * size])],
            [one[2 * size : 3 * size] for one in said],
            [one[3 * size :].decode(errors="replace").strip() for one in said],
        )

    def _settle(self, step: int, cases: list[Mismatch]) -> None:
        """Raises, on each rank, what it has to. Of several differences, one that can be settled
        counts.
        """
        blames = [(case, find_wrong_ranks(case.first, case.again)) for case in cases]
        case, blame = next((pair for pair in blames if pair[1].right), blames[0])
        state = self._other_state(step)
        wrong = [self.comm.members[rank] for rank in blame.ranks]
        if blame.right:
            if self.comm.world.rank in blame.ranks:
                raise Corrupt(self._blame(step, case, blame, state))
            raise PeerLost(f"{format_ranks(wrong)} must leave: what was computed there is wrong")
        if self.comm.world.rank == blame.ranks[0]:
            raise RanksDiffer(self._doubt(step, case, blame, state))
        raise PeerLost(f"{format_ranks(wrong)} have computed different results")

    def _other_state(self, step: int) -> ReplicasDiffer | None:
        """What ranks do not have alike of weights and the optimizer's state. A collective."""
        try:
            self.replicas.check(step, fingerprint_order(self.plan, self.plan.epoch_of_step(step)))
        except ReplicasDiffer as found:
            return found
        return None

    def _gather(self, data: bytes) -> list[bytes]:
        with self.comm.phases(WAITING):
            return self.comm.gather_bytes(data)

    # -- saying so ---------------------------------------------------------------------------------

    def _blame(
        self, step: int, case: Mismatch, blame: WrongRanks, state: ReplicasDiffer | None
    ) -> str:
        """This rank's error, in one line."""
        rank, right = self.comm.world.rank, blame.right
        host, again = case.hosts[rank], case.again[rank]
        values = [said for one, said in case.first if one == rank] + [again]
        item = self._first_other(next(value for value in values if value != right), right)
        others = sum(said == right for one, said in enumerate(case.again) if one != rank)
        against = {0: "what it has now", 1: "what the other rank has"}.get(
            others, f"what {others} other ranks have"
        )
        replayed = (
            ""
            if rank == case.owner
            else f" (which rank {self.comm.members[case.owner]} had trained)"
        )
        if state is not None and (rank in state.ranks or len(case.again) == 2):
            why = f"Its {state.what} differs too: wrong in its memory, or wrongly updated"
        elif again != right:
            why = "Computed again it is wrong again: a defect that lasts"
        else:
            why = "Computed again it is right: a fault that passes, or one in what was sent"
        advice = f"leave {host} out, and test its memory and processor"
        if again == right or state is not None:
            advice = f"if {host} is named again, {advice}"
        return (
            f"{self._named([rank])} on {host} is wrong at step {step + 1}: in microbatch {case.span.number + 1}"
            f"{replayed} {item} differs from {against}. {why}. HINT: {advice}; if"
            " the job computes by rank, `stepladder verify` says so"
        )

    def _doubt(
        self, step: int, case: Mismatch, blame: WrongRanks, state: ReplicasDiffer | None
    ) -> str:
        """One rank's error where nobody can tell who is wrong."""
        (_, one), (_, other) = case.first
        hosts = dict.fromkeys(case.hosts[rank] for rank in blame.ranks)
        found = (
            f"{self._named(blame.ranks)} on {' and '.join(hosts)}"
            f" {'differ' if len(blame.ranks) > 1 else 'differs from itself'} at step {step + 1}: in microbatch"
            f" {case.span.number + 1}, by {self._first_other(one, other)}"
        )
        if len(case.again) == 2 and all(said == case.again[rank] for rank, said in case.first):
            why = f"Their {state.what} differs too" if state else "Their weights are equal"
            return f"{found}. {why}. Two ranks cannot tell which is wrong. HINT: --nproc 3, or more, can"
        return (
            f"{found}. Computed again, no majority has the same. HINT: `stepladder verify` says whether the job"
            " gives the same bits each time; if it does, more than one rank is wrong"
        )

    def _named(self, ranks: list[int]) -> str:
        """By the numbers that the launcher knows."""
        return format_ranks([self.comm.members[rank] for rank in ranks])

    def _first_other(self, one: bytes, other: bytes) -> str:
        places = (slice(n * HASH_BYTES, (n + 1) * HASH_BYTES) for n in range(len(self.items)))
        return next(
            item for item, at in zip(self.items, places, strict=True) if one[at] != other[at]
        )


def find_wrong_ranks(first: list[tuple[int, bytes]], again: list[bytes]) -> WrongRanks:
    """Who is wrong: whoever has, or had, another value than most ranks have when all compute it
    again.

    Of two ranks that still differ, one that does not repeat its own value is wrong. One alone that
    never does may have a job that cannot."""
    value, votes = Counter(again).most_common(1)[0]
    if 2 * votes > len(again) and (len(again) > 1 or value in [said for _, said in first]):
        return WrongRanks(
            sorted({rank for rank, said in [*first, *enumerate(again)] if said != value}), value
        )
    unsteady = [rank for rank, said in first if said != again[rank]]
    if len(again) == 2 and len(unsteady) == 1:
        return WrongRanks(unsteady, again[1 - unsteady[0]])
    return WrongRanks(sorted({rank for rank, _ in first}), b"")


def digest(hashes: bytes) -> bytes:
    return blake2b(hashes, digest_size=TOTAL_BYTES).digest()


@contextmanager
def untouched_randomness(device: torch.device) -> Iterator[None]:
    """The generators of Python, NumPy and torch are as before when the block ends."""
    devices = [torch.cuda.current_device()] if device.type == "cuda" else []
    before = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices):
        yield
    random.setstate(before[0])
    np.random.set_state(before[1])
