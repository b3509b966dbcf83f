"""Run directories with real ledgers, written as the trainer does, without training."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepladder.core.plan import Plan
from stepladder.storage.ledger import Ledger, LedgerHeader, join_chains, ledger_path

Indices = NDArray[np.int64]
Reader = Callable[[int, int, list[Indices]], list[Indices]]
NAMES = ("num_samples", "global_batch", "microbatch", "seed", "min_microbatch")


def as_planned(step: int, rank: int, indices: list[Indices]) -> list[Indices]:
    return indices


@dataclass
class FakeRun:
    """A run directory of `plan`. chains[attempt][step]: the hash that a snapshot there would hold."""

    path: Path
    plan: Plan
    chains: dict[int, dict[int, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.path.mkdir()
        plan = {name: getattr(self.plan, name) for name in NAMES}
        (self.path / "config.json").write_text(json.dumps({"plan": plan}))

    def attempt(
        self,
        world_size: int,
        steps: range,
        after: int | None = None,
        read: Reader = as_planned,
        flushed: Mapping[int, int] | None = None,
        by_number: bool = False,
    ) -> int:
        """One more attempt, which trains `steps` (counted from 1); returns its number.

        after: the attempt whose snapshot it resumed from.  read: what a rank's batches held.
        flushed: {rank: last step that it wrote}, where a kill came before the rest.
        by_number: it names the attempt by its number, as a Loader's do.
        """
        number = len(self.chains) + 1
        start = steps.start - 1
        chain = ""
        parent = 0
        if after is not None and by_number:
            parent = after
        elif after is not None:
            chain = self.chains[after][start]
        ledgers = []
        for rank in range(world_size):
            header = LedgerHeader(number, rank, world_size, start, chain, parent=parent)
            ledgers.append(Ledger(self.path, header))
        self.chains[number] = {}
        for step in steps:
            for rank, ledger in enumerate(ledgers):
                if step > (flushed or {}).get(rank, step):
                    continue
                spans = self.plan.share(step - 1, rank, world_size)
                planned = [self.plan.indices(step - 1, span) for span in spans]
                ledger.record_step(
                    step, self.plan.epoch_of_step(step - 1), read(step, rank, planned)
                )
                ledger.flush()
            self.chains[number][step] = join_chains([ledger.chain for ledger in ledgers])
        for ledger in ledgers:
            ledger.close()
        return number

    def snapshot(self, attempt: int, step: int, name: str = "") -> None:
        """A snapshot's manifest, as far as the audit reads it."""
        folder = self.path / "snapshots" / (name or f"step_{step:08d}")
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text(
            json.dumps({"step": step, "ledger": self.chains[attempt][step]})
        )

    def result(self, steps: int) -> None:
        (self.path / "result.json").write_text(json.dumps({"steps": steps}))

    def file(self, attempt: int, rank: int) -> Path:
        return ledger_path(self.path, attempt, rank)

    def lines(self, attempt: int, rank: int) -> list[str]:
        """The header and one line per step, so that line n is step n of a first attempt."""
        return self.file(attempt, rank).read_text().splitlines(keepends=True)

    def edit(self, attempt: int, rank: int, change: Callable[[list[str]], Any]) -> None:
        """Let `change` alter the file's lines in place."""
        lines = self.lines(attempt, rank)
        change(lines)
        self.file(attempt, rank).write_text("".join(lines))
