"""A check of `--sync exact`: a microbatch that is computed twice gives the same loss and gradients.

In some steps, of which the first of an attempt and of each epoch are, each rank reads its first
microbatch once more and computes its loss and gradients twice more, from the same weights and seed.
It also reads its first microbatch of the attempt, as it does before each snapshot.
A job that keeps state between calls, has a random generator of its own, reads the time or asks for
the number of ranks gives others then: it would train other weights on each number of ranks. Before
each snapshot the next microbatch is computed twice, on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stepladder.core.errors import InputError
from stepladder.core.numbers import format_ranks
from stepladder.core.plan import Span
from stepladder.train.batch_norm import RunningStatistics
from stepladder.train.batch_reader import BatchReader
from stepladder.train.comm import Comm
from stepladder.train.fingerprints import HASH_BYTES, find_minority, fingerprint
from stepladder.train.generators import seed_generators
from stepladder.train.kept_state import KeptState
from stepladder.train.pretended_ranks import pretend_more_ranks

REREAD_SEED = 1
VERIFY_HINT = "stepladder verify JOB names the cause"
KEPT = "the job keeps something that no snapshot has"
KEPT_HINT = "a schedule, Job(ema_decay=) or a buffer for it; stepladder verify JOB"


def validate_on_all_ranks(
    reader: BatchReader,
    compute: Callable[[Span, Any], Tensor],
    step: int,
    span: Span,
    hash_gradients: Callable[[Tensor], bytes],
) -> None:
    """Compare one microbatch on all ranks, of which one has read it for this step. A collective.

    What a job keeps of the first samples that it sees, as for a normalization or the numbers of
    labels, is something else on each rank.

    Args:
        reader: Reads the microbatch.
        compute: Returns the loss of a microbatch, shape ().
        step: The step that it belongs to.
        span: The microbatch.
        hash_gradients: `Sync.hash_gradients`.

    Raises:
        InputError: Its data, its loss or a gradient is another one on some rank.
    """
    seed_generators(REREAD_SEED, reader.comm.device)
    batch = reader.read(step, span)
    hashes = hash_batch(batch)
    loss = compute(span, batch)
    hashes += fingerprint((fingerprint(loss), hash_gradients(loss)))
    answers = reader.comm.gather_bytes(hashes.ljust(2 * HASH_BYTES))
    if different := find_minority(answers):
        is_data = len({answer[:HASH_BYTES] for answer in answers}) > 1
        what = "other data are read" if is_data else "another loss or gradient is computed"
        raise InputError(
            f"--sync exact: {what} on {format_ranks(different)} than on others for one microbatch",
            "keep nothing of the samples that were seen first, and no cache of drawn numbers:"
            " compute it in build, from the training data",
        )


def validate_next_values(values: dict[str, Any], expected: dict[str, Any], when: str) -> None:
    """Compare the next loss, gradients and metrics with what they were before.

    Args:
        values: What they are, by what they are.
        expected: What they were; those that are not in it do not count.
        when: The time of it, for the error.

    Raises:
        InputError: One is another one.
    """
    for name, before in expected.items():
        value = values.get(name)
        is_known = "" not in (value, before)  # gradients, on ranks that gather no weights
        if is_known and repr(value) != repr(before):  # NaN equals NaN
            raise InputError(
                f"--sync exact: the next {name} is {value}, and was {before} {when}: {KEPT}",
                KEPT_HINT,
            )


def validate_next_values_on_all_ranks(values: dict[str, Any], comm: Comm) -> None:
    """Raise InputError if some rank has others. A collective."""
    if different := find_minority(comm.gather_bytes(fingerprint(values))):
        raise InputError(
            "--sync exact: the next loss, gradients or metrics are others on"
            f" {format_ranks(different)} than on others: {KEPT}",
            KEPT_HINT,
        )


class RepeatCheck:
    """Notes the first microbatch of a step, and computes its loss once more after all passes.

    The statistics of batch norm count with the loss: a layer that moves them by itself, from where
    they are, gives others.

    Args:
        reader: Reads a microbatch once more.
        compute: Returns the loss of a microbatch, shape ().
        params: The weights that are trained.
        statistics: Has those that batch norm has captured of the last microbatch.
        hash_gradients: `Sync.hash_gradients`.
        kept: Tells what the loss keeps.
    """

    def __init__(
        self,
        reader: BatchReader,
        compute: Callable[[Span, Any], Tensor],
        params: Sequence[nn.Parameter],
        statistics: RunningStatistics,
        hash_gradients: Callable[[Tensor], bytes],
        kept: KeptState,
    ) -> None:
        self.reader = reader
        self.compute = compute
        self.params = params
        self.statistics = statistics
        self.hash_gradients = hash_gradients
        self.kept = kept
        self.span: Span | None = None
        self.batch_hash = b""
        # The step, the microbatch and the hash that were noted first in this attempt.
        self.first: tuple[int, Span, bytes] | None = None
        self.idle_batch: Any = None
        self.loss = torch.zeros(())
        self.result = b""  # a hash of the loss and the statistics
        self.draws = b""

    def note_batch(self, span: Span, batch: Any) -> None:
        """Note a microbatch before its pass, which may write to it."""
        self.span = span
        self.batch_hash = hash_batch(batch)
        self.draws = b""
        self.idle_batch = None if len(span) else batch

    def note_draws(self) -> None:
        """Note how far the forward of the microbatch has moved torch's generator."""
        if not self.draws:
            self.draws = fingerprint(torch.get_rng_state())

    def note_loss(self, loss: Tensor) -> None:
        """Note the loss of the microbatch, shape (), and its statistics."""
        self.loss = loss
        self.result = self._hash(loss)

    def _hash(self, loss: Tensor) -> bytes:
        statistics = self.statistics.captured + 0  # of a skipped layer 0, never -0
        return fingerprint((fingerprint(loss), fingerprint(statistics)))

    def validate(self, step: int) -> None:
        """Read and compute the microbatch once more.

        Raises:
            InputError: Its data or its loss is different.
        """
        if self.span is None:
            return
        if not len(self.span):  # an idle pass, which takes part in the gathers
            self._recompute(self.idle_batch)
            for _ in range(2):
                self.hash_gradients(self.compute(self.span, self.idle_batch))
            return
        # A source that draws must not draw what it has drawn the first time.
        seed_generators(REREAD_SEED, self.loss.device)
        # Twice: a forked worker has drawn what this process draws from its own copy first.
        with pretend_more_ranks():
            batches = [self.reader.read(step, self.span) for _ in range(2)]
        batch = batches[0]
        _validate_same_data(self.batch_hash, batches)
        self.validate_first()
        self.first = self.first or (step, self.span, self.batch_hash)
        loss = self._recompute(batch)
        if self.draws != fingerprint(torch.get_rng_state()):
            raise InputError(
                "--sync exact: the first pass draws random numbers that later passes do not draw",
                "make in build what is made once, such as a layer or a cached tensor",
            )
        if self._hash(loss) != self.result:
            raise InputError(
                "--sync exact: the same microbatch has another loss when it is computed again, or"
                " other statistics of batch norm, from the same weights and seed",
                "no state between calls, no generator of its own (the default ones are seeded), no"
                f" time and no number of processes in the loss; {VERIFY_HINT}",
            )
        kept = self.kept.read()
        self._validate_gradients((batches[1], self.reader.read(step, self.span)))
        if self.reader.comm.world.is_first:
            self.kept.tell_changed(kept)

    def validate_first(self) -> None:
        """Read the microbatch that was noted first, since data may change slowly.

        Raises:
            InputError: It is other data.
        """
        if self.first is not None:
            step, span, batch_hash = self.first
            _validate_same_data(batch_hash, [self.reader.read(step, span)])

    def _validate_gradients(self, batches: tuple[Any, Any]) -> None:
        """Compute the gradients of the microbatch twice, and compare them.

        Args:
            batches: The microbatch, twice: a pass may write to it.

        Raises:
            InputError: They differ, as where a hook keeps state or has a generator of its own.
        """
        assert self.span is not None
        losses = (self.compute(self.span, batch) for batch in batches)
        if len(set(map(self.hash_gradients, losses))) > 1:
            raise InputError(
                "--sync exact: the same microbatch has other gradients when it is computed again,"
                " from the same weights and seed",
                "no state between calls and no generator of its own in hooks and backward;"
                f" {VERIFY_HINT}",
            )

    def _recompute(self, batch: Any) -> Tensor:
        """Return the loss.

        Args:
            batch: The samples of the microbatch.

        Raises:
            InputError: The loss adds gradients by itself.
        """
        assert self.span is not None
        before = self._read_gradients()
        with pretend_more_ranks():
            loss = self.compute(self.span, batch).detach()
        if self._read_gradients() != before:
            raise InputError(
                "--sync exact: the loss changes gradients by itself, by backward or zero_grad",
                "return the sum of all losses; gradients are taken, and cleared, once a step",
            )
        return loss

    def _read_gradients(self) -> list[tuple[int, int]]:
        """Return which tensor is the gradient of each weight, and how often it was written."""
        gradients = (param.grad for param in self.params)
        return [(id(grad), grad._version) for grad in gradients if grad is not None]


def _validate_same_data(expected: bytes, batches: Sequence[Any]) -> None:
    if {hash_batch(batch) for batch in batches} != {expected}:
        raise InputError(
            "--sync exact: the same samples are other data when they are read again",
            "draw random numbers in a map-style Dataset, from the default generators; no number of"
            f" processes and no count of what was read in it; {VERIFY_HINT}",
        )


def hash_batch(batch: Any) -> bytes:
    """Return a hash of the tensors and numbers of a batch; other objects do not count."""
    if isinstance(batch, (Tensor, bool, int, float, str)):
        return fingerprint(batch)
    if isinstance(batch, dict):
        return fingerprint([(name, hash_batch(part)) for name, part in batch.items()])
    if isinstance(batch, (tuple, list)):
        return fingerprint([hash_batch(part) for part in batch])
    return b""
