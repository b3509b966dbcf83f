"""The ledger: what each rank trained, as a hash chain that proves every sample was used once.

Each rank of each attempt writes `attempt-0003.rank-1.jsonl`: a header, then one line per step with
an order-free digest of the data-set indices, taken from the batch that the model was given. Every
line ends with a hash over all lines before it, so an altered or deleted line is detected.
"""

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
from stepladder.storage.run_files import LEDGER_FOLDER

Indices = NDArray[np.int64]
Digests = NDArray[np.uint64]
CHAIN_BYTES = 16
# The constants of SplitMix64's finaliser (Steele et al., OOPSLA 2014).
MIX_INCREMENT = np.uint64(0x9E3779B97F4A7C15)
MIX_ROUNDS = (
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB)),
)
MIX_LAST_SHIFT = np.uint64(31)


def _mix_indices(indices: Indices) -> Digests:
    """Return what each index adds to a digest, in the same shape; indices are not negative."""
    try:
        values: Digests = MIXED_SMALL_INDICES[indices]
    except IndexError:
        return _mix(indices)
    return values


def _mix(indices: Indices) -> Digests:
    z = indices.astype(np.uint64)
    z += MIX_INCREMENT
    for shift, factor in MIX_ROUNDS:
        z ^= z >> shift
        z *= factor
    z ^= z >> MIX_LAST_SHIFT
    return z


# Every step waits for its digest: 64 indices take 20 us to compute, and 4 us to look up.
MIXED_SMALL_INDICES = _mix(np.arange(2**16))
NO_INDICES = np.empty(0, np.int64)


def compute_digests(indices: Indices, counts: list[int]) -> Digests:
    """Return an order-free digest of each of consecutive groups of indices.

    It is the sum modulo 2**64 of each index through the SplitMix64 finaliser, so a sample that is
    missing, repeated or replaced changes it.

    Args:
        indices: The indices of all groups, one after the other.
        counts: The size of each group.

    Returns:
        The digests, of shape (len(counts),).
    """
    values = _mix_indices(indices)
    if len(counts) == 1:
        return np.add.reduce(values, keepdims=True)
    sums = np.zeros(len(values) + 1, np.uint64)
    np.cumsum(values, out=sums[1:])
    ends = np.cumsum([0, *counts])
    digests: Digests = sums[ends[1:]] - sums[ends[:-1]]
    return digests


def extend_chain(chain: str, text: str) -> str:
    """Return the hash over `text` and everything before it, as hexadecimal digits."""
    return hashlib.blake2b((chain + text).encode(), digest_size=CHAIN_BYTES).hexdigest()


def join_chains(chains: list[str]) -> str:
    """Return one hash over the chains of all ranks: the next attempt's chains begin with it."""
    return extend_chain("", "/".join(chains))


def format_step(step: int, epoch: int, count: int, digest: int) -> str:
    """Return the line of a step without its hash."""
    return f'{{"step": {step}, "epoch": {epoch}, "count": {count}, "digest": "{digest:016x}"'


def format_line(body: str, chain: str) -> str:
    """Return a line with its hash."""
    return f'{body}, "chain": "{chain}"}}\n'


def ledger_path(run_dir: Path, attempt: int, rank: int) -> Path:
    """Return the path of one rank's ledger of one attempt."""
    return run_dir / LEDGER_FOLDER / f"attempt-{attempt:04d}.rank-{rank}.jsonl"


@dataclass(frozen=True)
class LedgerHeader:
    """The first line of a rank's ledger of one attempt.

    Args:
        attempt: Number of the attempt.
        rank: Number of the rank in the attempt.
        world_size: Number of ranks, 0 if this one joined a running attempt.
        resumed_from_step: Step of the snapshot, 0 if there was none.
        chain: The hash with which this chain begins.
        in_rounds: Whether ranks take the microbatches of a step in turns; written only if so.
        parent: The attempt from which this one resumed, where no snapshot of ours has its chain;
            written only if there is one.
    """

    attempt: int
    rank: int
    world_size: int
    resumed_from_step: int
    chain: str
    in_rounds: bool = False
    parent: int = 0

    @property
    def text(self) -> str:
        """The line without its hash and line break."""
        fields = asdict(self)
        for name in ("in_rounds", "parent"):
            if not fields[name]:
                del fields[name]
        return json.dumps(fields)


class Ledger:
    """Writes one rank's ledger of one attempt; steps stay in memory until `flush`."""

    def __init__(self, run_dir: Path, header: LedgerHeader) -> None:
        self.path = ledger_path(run_dir, header.attempt, header.rank)
        folder = self.path.parent
        durable.make_folder(folder)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        self.file = os.fdopen(open_without_links(self.path, flags), "wb", buffering=0)
        with name_file_in_errors(folder):
            durable.sync(folder)
        body = header.text
        self.chain = extend_chain(header.chain, body)
        # Written at once: a kill before the first steps then leaves a header, not an empty file.
        self._write(f'{body[:-1]}, "link": "{self.chain}"}}\n')
        self.steps: list[tuple[int, int, int]] = []  # step, epoch, number of samples
        self.indices: list[Indices] = []

    def _write(self, text: str) -> None:
        data = text.encode()
        with name_file_in_errors(self.path):
            while data:
                num_written = self.file.write(data)
                data = data[num_written:]

    def record_step(self, step: int, epoch: int, indices: list[Indices]) -> None:
        """Record that a step is done.

        Args:
            step: The step, counted from 1.
            epoch: Its epoch.
            indices: The data-set indices of this rank's batches, in any order; possibly none.
        """
        self.steps.append((step, epoch, sum(map(len, indices))))
        self.indices.extend(indices)

    def record_change(
        self, step: int, ranks: list[int], group: int, why: Sequence[str] = ()
    ) -> None:
        """Record that other ranks continue; lines of later steps that are already written are void.

        Args:
            step: The last step that was done.
            ranks: The ranks that continue, by their numbers in the attempt.
            group: Number of this change, the same on all ranks.
            why: How the ranks that were lost have ended.
        """
        self.flush()
        body = f'{{"step": {step}, "ranks": {json.dumps(ranks)}, "group": {group}'
        if why:
            body += f', "why": {json.dumps(list(why))}'
        self.chain = extend_chain(self.chain, body)
        self._write(format_line(body, self.chain))

    def flush(self, fsync: bool = False) -> None:
        """Write the steps recorded so far.

        Args:
            fsync: Whether they must survive a power failure.
        """
        if self.steps:
            self._write("".join(self._format_steps()))
            self.steps.clear()
            self.indices.clear()
        if fsync:
            with name_file_in_errors(self.path):
                os.fsync(self.file.fileno())

    def _format_steps(self) -> list[str]:
        indices = np.concatenate([NO_INDICES, *self.indices])
        counts = [count for _, _, count in self.steps]
        digests = compute_digests(indices, counts).tolist()
        lines = []
        for (step, epoch, count), digest in zip(self.steps, digests, strict=True):
            body = format_step(step, epoch, count, digest)
            self.chain = extend_chain(self.chain, body)
            lines.append(format_line(body, self.chain))
        return lines

    def close(self) -> None:
        """Write the steps recorded so far, and close the file."""
        self.flush()
        self.file.close()
