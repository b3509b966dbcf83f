"""`--replay-every N`: another rank recomputes a microbatch, and must get the same bits.

In each N-th step, a rank notes the hashes of the gradients of one of its microbatches as they go
into the tree. When all gradients are added, and before they move a weight, each rank recomputes the
noted microbatch of the rank before it, with the same weights, samples and random keys. One
collective compares all hashes. If two ranks differ, all ranks recompute that microbatch, and the
majority result is taken as correct.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stepladder.core.errors import Corrupt, PeerLost, RanksDiffer
from stepladder.core.numbers import format_ranks
from stepladder.core.order import derive_seed
from stepladder.core.plan import Span
from stepladder.train.batch_norm import find_batch_norms
from stepladder.train.batch_reader import BatchReader
from stepladder.train.comm import Comm
from stepladder.train.fingerprints import (
    HASH_BYTES,
    TOTAL_HASH_BYTES,
    digest,
    fingerprint,
    fingerprint_order,
)
from stepladder.train.phases import REPLAYING, WAITING_FOR_RANKS
from stepladder.train.recompute_verdict import Mismatch, MismatchReport, find_wrong_ranks
from stepladder.train.replica_check import ReplicaCheck, ReplicasDiffer
from stepladder.train.run_spec import RunSpec
from stepladder.train.step_listener import LoopListener
from stepladder.train.sync.base import Backward, StepResult
from stepladder.train.sync.exact import ExactSync, TreeBucket

HOST_NAME_BYTES = 64
COUNT_ITEM = "the loss's count"
STATISTICS_ITEM = "batch norm's statistics"
LOSS_ITEM = "the loss"


class RecomputeCheck(LoopListener):
    """Notes the hashes of one microbatch, recomputes a peer's microbatch, and compares the two."""

    def __init__(
        self,
        spec: RunSpec,
        comm: Comm,
        sync: ExactSync,
        compute: Callable[[Span, Any, Backward], object],
    ) -> None:
        """Create the check.

        Args:
            spec: The run.
            comm: The ranks.
            sync: Adds the gradients.
            compute: Runs forward and backward of a microbatch: `TrainingLoop._run_pass`.
        """
        model = spec.job.model
        self.plan = spec.plan
        self.comm = comm
        self.sync = sync
        self.compute = compute
        self.every = spec.settings.replay_every or 0
        self.names = {param: name for name, param in model.named_parameters()}
        gradients = [self._gradient_item(param) for param in sync.params]
        self.items = [*gradients, STATISTICS_ITEM, LOSS_ITEM, COUNT_ITEM]
        self.reader = BatchReader(spec, comm, spec.train_source)
        unshared = [buffer for layer in find_batch_norms(model) for buffer in layer.buffers()]
        self.replicas = ReplicaCheck(model, spec.job.optimizer, comm, unshared)
        self.hashes: dict[str, bytes] = {}  # of the noted microbatch, by item

    def is_due(self, step: int) -> bool:
        """Return whether this step is checked."""
        return (step + 1) % self.every == 0

    def _choose_microbatch(self, step: int, rank: int) -> Span | None:
        """Return the microbatch of a rank that is checked in this step, by the run's seed."""
        spans = self.plan.share(step, rank, self.comm.world.world_size)
        if not spans:
            return None
        return spans[derive_seed(self.plan.seed, "replay", step) % len(spans)]

    def _gradient_item(self, param: torch.nn.Parameter) -> str:
        return f"the gradient of {self.names[param]}"

    # -- hashes ------------------------------------------------------------------------------------

    def begin_step(self, step: int, backward: Backward) -> Backward:
        """Return a backward that also notes the chosen microbatch's hashes, in a checked step."""
        if not self.is_due(step):
            return backward
        chosen = self._choose_microbatch(step, self.comm.world.rank)
        self.hashes = {}

        def noting_backward(loss: Tensor, count: float, extra: Tensor | None) -> None:
            if chosen is None or self.sync.microbatch != chosen.number:
                backward(loss, count, extra)
                return
            self.hashes[COUNT_ITEM] = fingerprint(count)
            self.sync.observe_leaves(self._note_leaf)
            backward(loss, count, extra)
            self.sync.observe_leaves(None)

        return noting_backward

    def after_reduce(self, step: int, result: StepResult) -> None:
        """Compare the hashes, in a checked step: before a wrong gradient changes any weight."""
        if self.is_due(step):
            self.compare(step)

    def _note_leaf(self, bucket: TreeBucket) -> None:
        """Note the hashes of a full leaf, which goes into the tree next."""
        for param, part in zip(bucket.params, bucket.leaf_views, strict=True):
            self.hashes[self._gradient_item(param)] = fingerprint(part)
        if bucket is self.sync.buckets[-1]:
            self.hashes[LOSS_ITEM] = fingerprint(bucket.leaf_extra[:1])
            self.hashes[STATISTICS_ITEM] = fingerprint(bucket.leaf_extra[1:])

    def _join_hashes(self) -> bytes:
        """Return the hashes in the order of `items`; zeros if this rank had no microbatch."""
        return b"".join(self.hashes.get(item, bytes(HASH_BYTES)) for item in self.items)

    def _recompute(self, step: int, owner: int) -> bytes:
        """Return the hashes of a peer's microbatch, computed by this rank."""
        span = self._choose_microbatch(step, owner)
        self.hashes = {}
        if span is not None:
            with self.comm.phases(REPLAYING), _preserve_random_state(self.comm.device):
                self.compute(span, self.reader.read(step, span), self._recompute_backward)
        return self._join_hashes()

    def _recompute_backward(self, loss: Tensor, count: float, extra: Tensor | None) -> None:
        assert extra is not None
        self.hashes[COUNT_ITEM] = fingerprint(count)
        self.sync.recompute_leaves(loss, extra, self._note_leaf)

    # -- comparing ---------------------------------------------------------------------------------

    def compare(self, step: int) -> None:
        """Compare the noted and the recomputed hashes of all ranks. All ranks must call this.

        Args:
            step: Steps done before this one.

        Raises:
            Corrupt: The results of this rank are wrong.
            PeerLost: Those of another rank are wrong, or another rank raises RanksDiffer.
            RanksDiffer: It cannot be told which rank is wrong; one rank raises this.
        """
        rank = self.comm.world.rank
        world_size = self.comm.world.world_size
        own_hashes = self._join_hashes()
        peer_hashes = self._recompute(step, (rank - 1) % world_size)
        digests = self._gather(digest(own_hashes) + digest(peer_hashes))
        mismatched_owners = []
        for owner in range(world_size):
            own_digest = digests[owner][:TOTAL_HASH_BYTES]
            checker_digest = digests[(owner + 1) % world_size][TOTAL_HASH_BYTES:]
            if own_digest != checker_digest:
                mismatched_owners.append(owner)
        mismatches = [
            self._recompute_on_all(step, owner, own_hashes, peer_hashes)
            for owner in mismatched_owners
        ]
        if mismatches:
            self._raise_error(step, mismatches)

    def _recompute_on_all(
        self, step: int, owner: int, own_hashes: bytes, peer_hashes: bytes
    ) -> Mismatch:
        """Recompute the owner's microbatch on all ranks, and collect what each rank has and had."""
        host = socket.gethostname().encode()[:HOST_NAME_BYTES].ljust(HOST_NAME_BYTES)
        span = self._choose_microbatch(step, owner)
        assert span is not None
        recomputed = self._recompute(step, owner)
        messages = self._gather(own_hashes + peer_hashes + recomputed + host)
        size = len(own_hashes)
        checker = (owner + 1) % self.comm.world.world_size
        owner_hashes = messages[owner][:size]
        checker_hashes = messages[checker][size : 2 * size]
        return Mismatch(
            owner=owner,
            span=span,
            first=[(owner, owner_hashes), (checker, checker_hashes)],
            recomputed=[message[2 * size : 3 * size] for message in messages],
            hosts=[message[3 * size :].decode(errors="replace").strip() for message in messages],
        )

    def _raise_error(self, step: int, mismatches: list[Mismatch]) -> None:
        """Raise this rank's error. Of several mismatches, one with a majority result counts."""
        verdicts = [find_wrong_ranks(case.first, case.recomputed) for case in mismatches]
        pairs = list(zip(mismatches, verdicts, strict=True))
        mismatch, wrong = next((pair for pair in pairs if pair[1].correct), pairs[0])
        report = MismatchReport(
            step=step,
            mismatch=mismatch,
            wrong=wrong,
            state=self._compare_state(step),
            items=self.items,
            members=self.comm.members,
        )
        rank = self.comm.world.rank
        names = format_ranks([self.comm.members[wrong_rank] for wrong_rank in wrong.ranks])
        if wrong.correct:
            if rank in wrong.ranks:
                raise Corrupt(report.describe_wrong_rank(rank))
            raise PeerLost(f"{names} must leave: what was computed there is wrong")
        if rank == wrong.ranks[0]:
            raise RanksDiffer(report.describe_doubt())
        raise PeerLost(f"{names} have computed different results")

    def _compare_state(self, step: int) -> ReplicasDiffer | None:
        """Return how the ranks' weights or optimizer state differ. All ranks must call this."""
        try:
            self.replicas.check(step, fingerprint_order(self.plan, self.plan.epoch_of_step(step)))
        except ReplicasDiffer as difference:
            return difference
        return None

    def _gather(self, data: bytes) -> list[bytes]:
        with self.comm.phases(WAITING_FOR_RANKS):
            return self.comm.gather_bytes(data)


@contextmanager
def _preserve_random_state(device: torch.device) -> Iterator[None]:
    """Restore the random generators of Python, NumPy and torch at the end of the block."""
    devices = [torch.cuda.current_device()] if device.type == "cuda" else []
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    with torch.random.fork_rng(devices):
        yield
    random.setstate(python_state)
    np.random.set_state(numpy_state)
