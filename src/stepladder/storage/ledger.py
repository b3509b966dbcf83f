"""What was trained, chained: the proof that each sample was used exactly once per epoch.

Each rank of each attempt writes `attempt-0003.rank-1.jsonl`: a header, then one line per step with
an order-free digest of the data-set indices taken from the batch that the model was given. Every
line carries a hash over all before it, so an altered or deleted line is seen."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stepladder.core import durable
from stepladder.core.errors import name_file_in_errors
from stepladder.core.safe_open import open_without_links
from stepladder.storage.rundir import LEDGER

CHAIN_BYTES = 16
# Of SplitMix64.
GOLDEN, LAST_SHIFT = np.uint64(0x9E3779B97F4A7C15), np.uint64(31)
ROUNDS = (
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB)),
)


def mixed(indices: NDArray[np.int64]) -> NDArray[np.uint64]:
    """What each index adds to a digest, in the same shape; indices are not negative."""
    try:
        found: NDArray[np.uint64] = KNOWN[indices]
        return found
    except IndexError:
        return _mixed(indices)


def _mixed(indices: NDArray[np.int64]) -> NDArray[np.uint64]:
    z = indices.astype(np.uint64)
    z += GOLDEN
    for shift, factor in ROUNDS:
        z ^= z >> shift
        z *= factor
    z ^= z >> LAST_SHIFT
    return z


KNOWN = _mixed(
    np.arange(2**16)
)  # in every step, before ranks meet: 20 us to compute 64 of them, 4 to look up
NO_INDICES = np.empty(0, np.int64)


def digests(indices: NDArray[np.int64], counts: list[int]) -> NDArray[np.uint64]:
    """Order-free digest of each of consecutive groups of indices, shape (len(counts),).

    The sum modulo 2**64 of each index through the SplitMix64 finaliser (Steele et al., OOPSLA
    2014): a sample that is missing, extra or another changes it."""
    z = mixed(indices)
    if len(counts) == 1:
        return np.add.reduce(z, keepdims=True)
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(z, dtype=np.uint64)])
    ends = np.cumsum([0, *counts])
    groups: NDArray[np.uint64] = sums[ends[1:]] - sums[ends[:-1]]
    return groups


def link(chain: str, text: str) -> str:
    """The hash over `text` and all before it, as hex."""
    return hashlib.blake2b((chain + text).encode(), digest_size=CHAIN_BYTES).hexdigest()


def join(chains: list[str]) -> str:
    """One hash over the chains of all ranks, in rank order: where the next attempt's chains begin."""
    return link("", "/".join(chains))


def step_text(step: int, epoch: int, count: int, digest: int) -> str:
    """A line of the ledger up to its hash."""
    return f'{{"step": {step}, "epoch": {epoch}, "count": {count}, "digest": "{digest:016x}"'


def line_text(body: str, chain: str) -> str:
    return f'{body}, "chain": "{chain}"}}\n'


def attempt_file(run_dir: Path, attempt: int, rank: int) -> Path:
    return run_dir / LEDGER / f"attempt-{attempt:04d}.rank-{rank}.jsonl"


@dataclass(frozen=True)
class LedgerHeader:
    """The first line of a rank's ledger of one attempt. chain: where its own chain begins.

    in_rounds: whether ranks take turns in a step's microbatches; there only where they do.
    """

    attempt: int
    rank: int
    world_size: int
    resumed_from_step: int
    chain: str
    in_rounds: bool = False

    @property
    def text(self) -> str:
        """Without its hash and the end of the line."""
        told = asdict(self)
        if not self.in_rounds:
            del told["in_rounds"]
        return json.dumps(told)


class Ledger:
    """One rank's ledger of one attempt. Steps are kept in memory until `flush`, which is where they
    cost.
    """

    def __init__(self, run_dir: Path, header: LedgerHeader) -> None:
        path = attempt_file(run_dir, header.attempt, header.rank)
        durable.make_folder(path.parent)
        self.path = path
        self.file = os.fdopen(
            open_without_links(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb", buffering=0
        )
        with name_file_in_errors(path.parent):
            durable.sync(path.parent)
        body = header.text
        self.chain = link(header.chain, body)
        # At once: a kill before the first steps are written leaves a header, not an empty file.
        self._write(f'{body[:-1]}, "link": "{self.chain}"}}\n')
        self.steps: list[tuple[int, int, int]] = []
        self.indices: list[NDArray[np.int64]] = []

    def _write(self, text: str) -> None:
        """Out of this process."""
        data = text.encode()
        with name_file_in_errors(self.path):
            while data:
                data = data[self.file.write(data) :]

    def record(self, step: int, epoch: int, indices: list[NDArray[np.int64]]) -> None:
        """A step is done. indices: what this rank's batches held, in any order, possibly nothing."""
        self.steps.append((step, epoch, sum(map(len, indices))))
        self.indices.extend(indices)

    def change(self, step: int, ranks: list[int], group: int, why: Sequence[str] = ()) -> None:
        """After `step` these ranks go on, by their numbers in the attempt. Lines of later steps are
        void so far.

        group: counts these changes, the same on all ranks.  why: what became of ranks that were
        lost."""
        self.flush()
        body = f'{{"step": {step}, "ranks": {json.dumps(ranks)}, "group": {group}'
        if why:
            body += f', "why": {json.dumps(list(why))}'
        self.chain = link(self.chain, body)
        self._write(line_text(body, self.chain))

    def flush(self, lasting: bool = False) -> None:
        """Write the steps recorded so far. lasting: also past the operating system's cache."""
        if self.steps:
            alone = len(self.indices) == 1
            indices = self.indices[0] if alone else np.concatenate([NO_INDICES, *self.indices])
            lines = []
            counts = [count for *_, count in self.steps]
            for (step, epoch, count), digest in zip(
                self.steps, digests(indices, counts).tolist(), strict=True
            ):
                body = step_text(step, epoch, count, digest)
                self.chain = link(self.chain, body)
                lines.append(line_text(body, self.chain))
            self._write("".join(lines))
            self.steps.clear()
            self.indices.clear()
        if lasting:
            with name_file_in_errors(self.path):
                os.fsync(self.file.fileno())

    def close(self) -> None:
        self.flush()
        self.file.close()
